"""The fused kernel: how calls are cut and checked, with a stand-in; what it computes and promises, on the GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moespeq_cli.bench.kernel_candidate import Batch
from moespeq_cli.bench.kernel_check import Probe, probes, random_batch
from moespeq_cli.bench.kernel_ours import interleave
from runtime.errors import KernelError, ShapeError
from runtime.kernels import fused
from runtime.kernels.device import Gpu, current_gpu
from runtime.kernels.fused import FusedConfig, FusedExperts, FusedPlan, plan
from runtime.kernels.layout import SlotLayout
from runtime.kernels.reference import compute_torch, slot_experts
from runtime.kernels.shape import Activation, ExpertShape, WeightForm
from tests.kernels.cases import make_pool, make_tokens
from tests.kernels.layers import (
    BF16,
    DEVICE,
    FEW,
    INT4,
    Layer,
    every_case,
    every_kind,
    generator,
    random_layer,
)

# How a call is cut into launches, and what it refuses: a stand-in for what is compiled.


class StandIn:
    """Computes a launch by the reference, and remembers how many tokens it had."""

    launches: list[int]

    def __init__(self, chosen: FusedPlan, inner: int) -> None:
        self.plan = chosen

    def launch(
        self,
        x: Tensor,
        index: Tensor,
        weights: Tensor,
        slot_of: Tensor,
        pool: Tensor,
        out: Tensor,
        pairs: Tensor | None,
        resume: bool,
        more: tuple[()],
    ) -> None:
        assert 1 <= len(x) <= self.plan.max_tokens
        self.launches.append(len(x))
        experts = slot_experts(self.layout, pool, slot_of.tolist())
        p = compute_torch(x, index, weights, experts, self.layout.shape.activation).p.float()
        if resume:
            absent = (slot_of[index.long()] < 0)[..., None]
            assert pairs is not None
            p = torch.where(absent, pairs, p)
        if pairs is not None:
            pairs.copy_(p)
        y = torch.zeros(x.shape, device=x.device)
        for j in range(index.shape[1]):
            y = torch.addcmul(y, weights[:, j, None], p[:, j])
        out.copy_(y)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[SlotLayout], list[int]]:
    """Gives the sizes of launches, growing, once told the layout."""

    def start(layout: SlotLayout) -> list[int]:
        launches: list[int] = []
        monkeypatch.setattr(StandIn, "launches", launches, raising=False)
        monkeypatch.setattr(StandIn, "layout", layout, raising=False)
        return launches

    monkeypatch.setattr(fused, "_Variant", StandIn)
    monkeypatch.setattr(fused, "current_gpu", lambda: Gpu(0, "an H200", (9, 0), 132, 232448))
    return start


@pytest.mark.parametrize(
    ("shape", "tokens", "wanted"),
    [
        (ExpertShape(5, 2, 64, 40), 1, [1]),
        (ExpertShape(5, 2, 64, 40), 16, [16]),
        (ExpertShape(5, 2, 64, 40), 17, [16, 1]),
        (ExpertShape(5, 2, 64, 40), 37, [16, 16, 5]),
        (ExpertShape(40, 20, 32, 16), 6, [6]),  # 120 pairs
        (ExpertShape(40, 20, 32, 16), 16, [6, 6, 4]),
        (ExpertShape(130, 130, 16, 8), 3, [1, 1, 1]),
        (ExpertShape(5, 2, 64, 40), 0, []),
    ],
)
def test_more_tokens_than_a_launch_takes_are_cut(
    stand_in: Callable[[SlotLayout], list[int]], shape: ExpertShape, tokens: int, wanted: list[int]
) -> None:
    layout = SlotLayout(shape, WeightForm("bf16"))
    launches = stand_in(layout)
    pool, slot_of = make_pool(layout, shape.num_experts + 1)
    x, index, weights = make_tokens(shape, tokens)
    kernel, out = FusedExperts(layout), torch.full_like(x, torch.nan)
    kernel.run(pool, slot_of, x, index, weights, out)
    assert launches == wanted
    if tokens:
        right = compute_torch(x, index, weights, slot_experts(layout, pool, slot_of.tolist()), shape.activation)
        assert ((out.double() - right.y).abs() <= 2**-8 * right.y.abs() + 2**-20).all()
    early = torch.arange(shape.num_experts) % 2 == 0
    pairs, parts = torch.full((tokens, shape.top_k, shape.hidden_size), torch.nan), torch.full_like(x, torch.nan)
    kernel.run(pool, slot_of.where(early, -1), x, index, weights, parts, pairs=pairs)
    kernel.run(pool, slot_of.where(~early, -1), x, index, weights, parts, pairs=pairs, resume=True)
    assert torch.equal(parts, out)


def test_up_to_8_tokens_have_a_kernel_of_their_own(stand_in: Callable[[SlotLayout], list[int]]) -> None:
    layout = SlotLayout(ExpertShape(5, 2, 64, 40), WeightForm("bf16"))
    stand_in(layout)
    pool, slot_of = make_pool(layout, 5)
    kernel, made = FusedExperts(layout), []
    for tokens in (3, 8, 9, 1, 16, 40):
        x, index, weights = make_tokens(layout.shape, tokens)
        kernel.run(pool, slot_of, x, index, weights, torch.empty_like(x))
        made.append([variant.plan.max_tokens for variant in kernel._variants.made.values()])
    assert made == [[8], [8], [8, 16], [8, 16], [8, 16], [8, 16]]


WRONG: list[tuple[str, Callable[[Tensor], Tensor], str]] = [
    ("pool", lambda t: t[:, :-64], r"pool as contiguous uint8 \[5, 16384\]"),
    ("pool", lambda t: t.view(torch.int8), "pool as contiguous uint8"),
    ("pool", lambda t: t.view(-1)[8 : 8 + 4 * 16384].view(4, -1), "pool at a multiple of 16 bytes"),
    ("slot_of", lambda t: t[:-1], r"slot_of as contiguous int32 \[5\]"),
    ("slot_of", lambda t: t.long(), "slot_of as contiguous int32"),
    ("x", lambda t: t.float(), r"x as contiguous bfloat16 \[3, 64\]"),
    ("x", lambda t: t.T.contiguous().T, r"strides \[1, 3\]"),
    ("x", lambda t: torch.cat((t.view(-1)[:1], t.view(-1)))[1:].view(3, 64), "x at a multiple of 16 bytes"),
    ("index", lambda t: t.long(), r"top_k_index as contiguous int32 \[3, 2\]; found int64"),
    ("index", lambda t: t[:2], r"found int32 \[2, 2\]"),
    ("weights", lambda t: t.bfloat16(), "top_k_weights as contiguous float32"),
    ("out", lambda t: t.half(), "out as contiguous bfloat16"),
    ("out", lambda t: t[:, :32], "out as"),
    ("out", lambda t: torch.cat((t.view(-1)[:4], t.view(-1)))[4:].view(3, 64), "out at a multiple of 16 bytes"),
    ("pairs", lambda t: torch.cat((t.view(-1)[:2], t.view(-1)))[2:].view(3, 2, 64), "pairs at a multiple of 16 bytes"),
    ("pairs", lambda t: t[:, :1], r"pairs as contiguous float32 \[3, 2, 64\]"),
]


@pytest.mark.parametrize(("name", "change", "message"), WRONG)
def test_tensors_that_do_not_fit_are_refused(
    stand_in: Callable[[SlotLayout], list[int]], name: str, change: Callable[[Tensor], Tensor], message: str
) -> None:
    layout = SlotLayout(ExpertShape(5, 2, 64, 40), WeightForm("bf16"))
    launches = stand_in(layout)
    pool, slot_of = make_pool(layout, 5)
    x, index, weights = make_tokens(layout.shape, 3)
    pairs = torch.zeros(3, 2, 64)
    tensors = {"pool": pool, "slot_of": slot_of, "x": x, "index": index, "weights": weights, "out": x.clone()}
    tensors, pairs = ({**tensors, name: change(tensors[name])}, pairs) if name in tensors else (tensors, change(pairs))
    with pytest.raises(ShapeError, match=message):
        FusedExperts(layout).run(*tensors.values(), pairs=pairs)
    assert not launches


def test_refuses_to_resume_from_nothing_and_a_torn_group(stand_in: Callable[[SlotLayout], list[int]]) -> None:
    layout = SlotLayout(ExpertShape(5, 2, 64, 40), WeightForm("int4"))
    launches = stand_in(layout)
    pool, slot_of = make_pool(layout, 12)
    tensors = (slot_of, *make_tokens(layout.shape, 3), torch.empty(3, 64, dtype=torch.bfloat16))
    with pytest.raises(ShapeError, match="pairs to resume from"):
        FusedExperts(layout).run(pool, *tensors, resume=True)
    with pytest.raises(ShapeError, match="whole groups of 8 interleaved slots; found 12"):
        FusedExperts(layout, FusedConfig(experts_per_block=8)).run(pool, *tensors)
    assert not launches


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu() -> None:
    with pytest.raises(KernelError, match="an NVIDIA GPU"):
        FusedExperts(SlotLayout(ExpertShape(5, 2, 64, 40), WeightForm("bf16")))


# What it computes.


@pytest.mark.gpu
@every_case
def test_probes(shape: ExpertShape, form: WeightForm) -> None:
    """One-hot x, one-hot h, exact integers, random data, and random data with one set of experts for all tokens."""
    names = []
    for probe in probes(shape, form, max(FEW), generator()):
        judge(probe)
        names.append(probe.name)
    assert names == ["one-hot x", "one-hot h", "integers", "random", "random, one set of experts"]


def judge(probe: Probe) -> None:
    layer = Layer(probe.experts)
    right = layer.answers(probe.batch, probe.sums)
    for tokens in FEW:
        rows = slice(0, tokens)
        wrong = right.rows(rows).wrong(layer.run(probe.batch.rows(rows)))
        assert wrong is None, f"{probe.name}, {tokens} tokens: {wrong}"


@pytest.mark.gpu
@pytest.mark.parametrize(
    "config",
    [
        FusedConfig(block_dim=64),
        FusedConfig(block_dim=128, stages=16),
        FusedConfig(block_dim=256, stages=2),
        FusedConfig(block_dim=1024, stages=2),
        FusedConfig(team=1),
        FusedConfig(team=2, k_split=1),
        FusedConfig(team=32, k_split=32),
        FusedConfig(block_dim=256, experts_per_block=8),
    ],
    ids=str,
)
@every_kind
def test_every_configuration(form: WeightForm, config: FusedConfig) -> None:
    shape = ExpertShape(9, 3, 1032, 520)
    layer = random_layer(shape, form, config)
    contiguous = random_layer(shape, form, replace(config, experts_per_block=1, stages=2))
    if config.experts_per_block > 1 and form.is_coded:
        layer.pool = interleave(layer.layout, layer.pool, config.experts_per_block)
    for tokens in FEW:
        batch = random_batch(shape, tokens, generator(tokens))
        y = layer.run(batch)
        assert (wrong := layer.answers(batch).wrong(y)) is None, f"{tokens} tokens: {wrong}"
        assert torch.equal(y, contiguous.run(batch)), "neither the layout nor the stages change bits"


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape",
    [
        ExpertShape(60, 4, 2048, 1408),
        ExpertShape(64, 6, 2048, 1408),
        ExpertShape(32, 8, 2048, 768),
        ExpertShape(7, 2, 1024, 1152, Activation.clamped, has_bias=True),
        ExpertShape(9, 1, 1152, 640, Activation.gelu),
        ExpertShape(3, 3, 1152, 128),
    ],
    ids=lambda shape: f"{shape.num_experts}:{shape.top_k}:{shape.hidden_size}x{shape.moe_intermediate_size}",
)
def test_bf16_by_warps_with_roles(shape: ExpertShape) -> None:
    """Right, and with the bits of warps that are alike."""
    layer = random_layer(shape, BF16)
    alike = random_layer(shape, BF16, FusedConfig(block_dim=512))
    assert plan(layer.layout, 8, FusedConfig(), current_gpu()).source.name == "moe_bf16.cu"
    for tokens in (1, 2, 3, 5, 7, 8, 9, 17):
        batch = random_batch(shape, tokens, generator(tokens))
        y = layer.run(batch)
        assert (wrong := layer.answers(batch).wrong(y)) is None, f"{tokens} tokens: {wrong}"
        assert torch.equal(y, alike.run(batch))
    for _ in range(200):  # however blocks happen to come
        assert torch.equal(layer.run(batch), y)


@pytest.mark.gpu
@pytest.mark.parametrize(("num_experts", "top_k", "tokens"), [(40, 20, 16), (40, 40, 7), (257, 257, 3), (1024, 9, 17)])
@every_kind
def test_large_top_k_and_many_experts(form: WeightForm, num_experts: int, top_k: int, tokens: int) -> None:
    """Fewer than 16 tokens a launch, down to one."""
    shape = ExpertShape(num_experts, top_k, 72, 136)
    layer = random_layer(shape, form)
    batch = random_batch(shape, tokens, generator())
    assert (wrong := layer.answers(batch).wrong(layer.run(batch))) is None, wrong


@pytest.mark.gpu
@every_kind
@pytest.mark.parametrize("tokens", [*FEW, 8, 9, 40])
def test_all_tokens_on_one_expert(form: WeightForm, tokens: int) -> None:
    """More than 8 tokens of an expert take a second entry of the list; experts without tokens are not read."""
    shape = ExpertShape(6, 1, 264, 136)
    layer = random_layer(shape, form)
    for expert in (0, 5):
        batch = random_batch(shape, tokens, generator(tokens))
        batch = Batch(batch.x, torch.full_like(batch.top_k_index, expert), batch.top_k_weights)
        y = layer.run(batch)
        assert (wrong := layer.answers(batch).wrong(y)) is None, wrong
        for other in set(range(len(layer.pool))) - {int(layer.slot_of[expert])}:
            layer.pool[other] = 0xFF  # NaN in every form
        assert torch.equal(layer.run(batch), y)
        layer.pool = layer.experts.pack(layer.slot_of, len(layer.pool))


@pytest.mark.gpu
@every_kind
def test_numbers_that_are_not_finite_stay_in_their_token(form: WeightForm) -> None:
    """And end the call: no NaN looks like a value of h that is not there yet."""
    shape = ExpertShape(7, 3, 264, 136)
    layer = random_layer(shape, form)
    batch = random_batch(shape, 9, generator())
    y = layer.run(batch)
    batch.x[2, 5], batch.x[4], batch.x[6, 0] = torch.nan, torch.inf, -torch.nan
    batch.x.view(torch.int16)[8] = -1  # NaN of all ones
    bad = layer.run(batch)
    kept = torch.tensor([0, 1, 3, 5, 7], device=DEVICE)
    assert torch.equal(bad[kept], y[kept]) and bad[[2, 4, 6, 8]].isnan().all()
    assert torch.equal(layer.run(batch.rows(kept)), y[kept])


# What it promises beside arithmetic.


@pytest.mark.gpu
@every_case
def test_a_row_has_the_same_bits_in_any_batch(shape: ExpertShape, form: WeightForm) -> None:
    layer = random_layer(shape, form)
    batch = random_batch(shape, 16, generator())
    alone = torch.cat([layer.run(batch.rows(slice(t, t + 1))) for t in range(16)])
    orders = torch.Generator().manual_seed(1)
    for tokens in range(1, 17):
        for _ in range(4):
            order = torch.randperm(16, generator=orders)[:tokens].to(DEVICE)
            assert torch.equal(layer.run(batch.rows(order)), alone[order]), f"{tokens} tokens"
    order = torch.randint(16, (40,), generator=orders).to(DEVICE)  # the same token more than once, in three launches
    assert torch.equal(layer.run(batch.rows(order)), alone[order])


@pytest.mark.gpu
@every_case
def test_repeats_have_the_same_bits(shape: ExpertShape, form: WeightForm) -> None:
    """Whatever the output held, and whatever the call before left in the scratch memory."""
    layer = random_layer(shape, form)
    first, other = random_batch(shape, 16, generator(1)), random_batch(shape, 7, generator(2))
    y, z = layer.run(first), layer.run(other)
    assert not y.isnan().any() and not z.isnan().any()
    for turn in range(20):
        if turn % 3:
            assert torch.equal(layer.run(other), z)
        assert torch.equal(layer.run(first), y)


@pytest.mark.gpu
@every_case
def test_experts_that_are_not_here(shape: ExpertShape, form: WeightForm) -> None:
    layer = random_layer(shape, form)
    here = torch.arange(shape.num_experts, device=DEVICE) % 3 != 1
    for tokens in FEW:
        batch = random_batch(shape, tokens, generator(tokens))
        wrong = layer.answers(batch, present=here).wrong(layer.run(batch, layer.only(here)))
        assert wrong is None, f"{tokens} tokens: {wrong}"
    batch = random_batch(shape, 3, generator())
    assert (layer.run(batch, layer.only(here & False)) == 0).all()


@pytest.mark.gpu
@every_case
@pytest.mark.parametrize("parts", [2, 3])
def test_passes_over_parts_of_the_experts_have_the_bits_of_one(
    shape: ExpertShape, form: WeightForm, parts: int
) -> None:
    layer = random_layer(shape, form)
    part_of = torch.arange(shape.num_experts, device=DEVICE) % parts
    for tokens in FEW:
        batch = random_batch(shape, tokens, generator(tokens))
        whole = layer.run(batch)
        pairs = torch.full((tokens, shape.top_k, shape.hidden_size), torch.nan, device=DEVICE)
        parted = whole
        for number in range(parts):
            parted = layer.run(batch, layer.only(part_of == number), pairs=pairs, resume=number > 0)
        assert torch.equal(parted, whole), f"{tokens} tokens"
        assert torch.equal(layer.run(batch, layer.only(part_of < 0), pairs=pairs, resume=True), whole)
        kept = pairs.clone()
        assert torch.equal(layer.run(batch, pairs=pairs), whole) and torch.equal(pairs, kept)


@pytest.mark.gpu
@every_kind
def test_slots_may_lie_in_any_order(form: WeightForm) -> None:
    shape = ExpertShape(11, 4, 264, 136, Activation.clamped, has_bias=True)
    layer = random_layer(shape, form)
    batch = random_batch(shape, 16, generator())
    y, pool, slot_of = layer.run(batch), layer.pool, layer.slot_of
    for seed in range(5):
        order = torch.randperm(len(pool), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
        layer.pool, place = pool[order].contiguous(), order.argsort().int()
        assert torch.equal(layer.run(batch, place[slot_of.long()]), y)


@pytest.mark.gpu
@every_kind
def test_slots_beyond_4_gib(form: WeightForm) -> None:
    shape = ExpertShape(3, 2, 264, 136, Activation.silu, has_bias=True)
    layer = random_layer(shape, form)
    batch = random_batch(shape, 9, generator())
    wanted, small = layer.run(batch), layer.pool
    count = (5 << 30) // layer.layout.slot_bytes
    free_bytes = torch.cuda.mem_get_info()[0]
    if free_bytes < count * layer.layout.slot_bytes + (1 << 30):
        pytest.skip(f"a pool of 5 GiB needs 6 GiB of GPU memory, {free_bytes / 2**30:.1f} are free")
    layer.pool = torch.empty(count, layer.layout.slot_bytes, dtype=torch.uint8, device=DEVICE)
    borders = ((1 << 32) // layer.layout.slot_bytes + 1, (1 << 31) // layer.layout.slot_bytes + 1, 7)
    for last in (count - 1, *borders):
        slots = torch.tensor([last, last - 1, 0], dtype=torch.int32, device=DEVICE)
        layer.pool[slots.long()] = small[layer.slot_of.long()]
        assert torch.equal(layer.run(batch, slots), wanted), f"slot {last} of {count}"


@pytest.mark.gpu
def test_a_tensor_on_the_host_is_refused() -> None:
    layer = random_layer(ExpertShape(5, 2, 64, 40), INT4)
    batch = random_batch(layer.shape, 3, generator())
    with pytest.raises(ShapeError, match="tensors on the GPU"):
        layer.run(batch, layer.slot_of.cpu())
