"""Rows gathered, activated and combined, codes expanded, and the layer by loop and by grouped product."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from runtime.errors import ShapeError
from runtime.kernels.combine import BiasPlace, activate_rows, combine_rows, gather_rows
from runtime.kernels.dequant import dequantize_experts, plain_layout
from runtime.kernels.grouped import GroupedExperts
from runtime.kernels.layout import SlotLayout
from runtime.kernels.loop import LoopExperts, tokens_by_expert
from runtime.kernels.reference import (
    LIBRARY,
    Stages,
    activate_torch,
    compute_torch,
    dequantize,
    error_bound,
    slot_experts,
)
from runtime.kernels.route import Route
from runtime.kernels.shape import Activation, ExpertShape, WeightForm
from tests.kernels.cases import make_pool, make_tokens

FORMS = [
    WeightForm("bf16"),
    WeightForm("int4", 32),
    WeightForm("int4", 96),
    WeightForm("int4", 128),
    WeightForm("int4", 160),
    WeightForm("int4", -1),
    WeightForm("int8", -1),
    WeightForm("int8", 64),
]
SHAPES = [
    ExpertShape(3, 2, 72, 40),
    ExpertShape(7, 7, 2880, 8, Activation.clamped, has_bias=True),
    ExpertShape(60, 4, 2048, 1408),
    ExpertShape(1, 1, 96, 136, Activation.gelu),
    ExpertShape(257, 8, 264, 200, Activation.gelu_tanh, has_bias=True),
]


def check_close(y: Tensor, stages: Stages, extra: Tensor | float = 0.0) -> None:
    """Element by element, naming the worst."""
    assert torch.isfinite(y).all()
    ratio = (y.double() - stages.y).abs() / (error_bound(stages) + extra)
    worst = int(ratio.argmax())
    where = divmod(worst, y.shape[1])
    assert ratio.flatten()[worst] <= 1, f"{where}: {float(y[where])} for {float(stages.y[where])}"


def loop_roundings(stages: Stages, top_k_weights: Tensor) -> Tensor:
    """What the loop's further roundings to BF16 may add: inside the activation, of weights and of partial sums."""
    sums = (stages.p * top_k_weights[:, :, None]).abs().sum(1)
    return 2.0**-5 * stages.scale + 2.0**-9 * (3 + top_k_weights.shape[1]) * sums


@pytest.mark.parametrize("activation", list(Activation))
def test_the_loop_computes_the_layer(activation: Activation) -> None:
    layout = SlotLayout(ExpertShape(5, 3, 96, 40, activation, has_bias=True), WeightForm("bf16"))
    pool, slot_of = make_pool(layout, 6, missing=(1,))
    x, top_k_index, top_k_weights = make_tokens(layout.shape, 9)
    y = LoopExperts(layout, pool, slot_of.tolist()).run(x, top_k_weights, tokens_by_expert(top_k_index))
    experts = slot_experts(layout, pool, slot_of.tolist())
    stages = compute_torch(x, top_k_index, top_k_weights, experts, activation, LIBRARY)
    check_close(y, stages, loop_roundings(stages, top_k_weights))


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS[1:], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_expands_codes_bit_for_bit(shape: ExpertShape, form: WeightForm) -> None:
    layout = SlotLayout(shape, form)
    missing = tuple(range(0, shape.num_experts - 1, 5))
    pool, slot_of = make_pool(layout, shape.num_experts + 2, missing, "cuda")
    here = torch.nonzero(slot_of >= 0).flatten().to(torch.int32)
    active = here[::2].contiguous()
    plain = plain_layout(layout)
    out = plain.new_pool(shape.num_experts, "cuda").fill_(0x55)
    num_active = torch.tensor([len(active)], dtype=torch.int32, device="cuda")
    dequantize_experts(layout, pool, slot_of, active, num_active, out)
    untouched = torch.ones(shape.num_experts, dtype=torch.bool, device="cuda")
    untouched[active.long()] = False
    assert (out[untouched] == 0x55).all()
    assert (out[:, plain.down.end_bytes :] == 0x55).all()
    gate_up, down, _ = plain.views_bf16(out[active.long()])
    coded_gate_up, coded_down, _ = layout.unpack_codes(pool[slot_of[active.long()].long()])
    assert torch.equal(gate_up.double(), dequantize(coded_gate_up, form, rounded=True))
    assert torch.equal(down.double(), dequantize(coded_down, form, rounded=True))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 17, 301])
def test_gathers_activates_and_combines(shape: ExpertShape, tokens: int) -> None:
    layout = SlotLayout(shape, WeightForm("bf16"))
    pool, slot_of = make_pool(layout, shape.num_experts, (0,) if shape.num_experts > 1 else (), "cuda")
    x, top_k_index, top_k_weights = make_tokens(shape, tokens, "cuda")
    route = Route(shape.num_experts, shape.top_k, tokens, "cuda")
    route.build(top_k_index, slot_of)
    count = int(route.num_sorted)
    pairs = route.pairs[:count].long()
    slots = slot_of[top_k_index.flatten()[pairs].long()].long()
    biases = layout.biases(pool)
    generator = torch.Generator("cuda").manual_seed(tokens)

    xs = torch.full((route.capacity, shape.hidden_size), 7.0, dtype=torch.bfloat16, device="cuda")
    gather_rows(x, route, xs)
    assert torch.equal(xs[:count], x[pairs // shape.top_k]) and (xs[count:] == 7).all()

    inner = shape.moe_intermediate_size
    for dtype in (torch.bfloat16, torch.float32):
        gate_up = torch.randn(route.capacity, 2 * inner, generator=generator, device="cuda").mul(3).to(dtype)
        h = torch.full((route.capacity, inner), 7.0, dtype=torch.bfloat16, device="cuda")
        place = None
        want = gate_up[:count].double()
        if biases is not None:
            place = BiasPlace(pool, layout.gate_up_bias, slot_of, top_k_index)
            want = want + biases.gate_up[slots].double()
        activate_rows(gate_up, route, shape.activation, place, h)
        gate, up = want.chunk(2, dim=-1)
        want = activate_torch(gate, up, shape.activation)
        lost = 2**-20 * (1 + (gate * up).abs())  # where 1 and an erf or a tanh near -1 cancel
        assert ((h[:count].double() - want).abs() <= 2**-8 * want.abs() + lost).all()
        assert (h[count:] == 7).all()

    for dtype in (torch.bfloat16, torch.float32):
        p = torch.full((route.capacity, shape.hidden_size), torch.nan, dtype=dtype, device="cuda")
        p[:count] = torch.randn(count, shape.hidden_size, generator=generator, device="cuda").to(dtype)
        y = torch.full_like(x, torch.nan)
        place = None
        terms = torch.zeros(tokens * shape.top_k, shape.hidden_size, dtype=torch.float64, device="cuda")
        terms[pairs] = p[:count].double()
        if biases is not None:
            place = BiasPlace(pool, layout.down_bias, slot_of, top_k_index)
            terms[pairs] += biases.down[slots].double()
        combine_rows(p, route, top_k_weights, place, y)
        products = terms.view(tokens, shape.top_k, -1) * top_k_weights[:, :, None].double()
        bound = 2**-8 * products.sum(1).abs() + 2**-20 * products.abs().sum(1) + 2**-30
        assert ((y.double() - products.sum(1)).abs() <= bound).all()


@pytest.mark.gpu
def test_combines_exactly_in_the_order_of_the_choice() -> None:
    """1 + 2^24 - 2^24 depends on the order of its terms."""
    route = Route(3, 3, 1, "cuda")
    route.build(torch.tensor([[2, 0, 1]], dtype=torch.int32, device="cuda"), torch.arange(3, dtype=torch.int32).cuda())
    p = torch.tensor([2.0**24, -(2.0**24), 1.0], device="cuda")[:, None].expand(3, 8).contiguous()  # by expert
    y = torch.empty(1, 8, dtype=torch.bfloat16, device="cuda")
    combine_rows(p, route, torch.ones(1, 3, device="cuda"), None, y)
    assert (y == 0).all()  # 1 is lost when 2^24 comes after it


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_grouped_product_computes_the_layer(shape: ExpertShape, form: WeightForm) -> None:
    layout = SlotLayout(shape, form)
    missing = (1,) if shape.num_experts > 1 else ()
    pool, slot_of = make_pool(layout, shape.num_experts + 1, missing, "cuda")
    experts = slot_experts(layout, pool, slot_of.tolist(), rounded=True)
    grouped = GroupedExperts(layout, 131, len(pool), "cuda")
    loop = LoopExperts(layout, pool, slot_of.tolist())
    for tokens in (1, 17, 131):
        x, top_k_index, top_k_weights = make_tokens(shape, tokens, "cuda", seed=tokens)
        stages = compute_torch(x, top_k_index, top_k_weights, experts, shape.activation, LIBRARY)
        y, again = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
        grouped.run(pool, slot_of, x, top_k_index, top_k_weights, y)
        check_close(y, stages)
        grouped.run(pool, slot_of, x, top_k_index, top_k_weights, again)
        assert torch.equal(y, again)
        y = loop.run(x, top_k_weights, tokens_by_expert(top_k_index))
        check_close(y, stages, loop_roundings(stages, top_k_weights))


@pytest.mark.gpu
@pytest.mark.parametrize("form", [WeightForm("bf16"), WeightForm("int4", 128)], ids=str)
def test_two_calls_over_parts_of_the_experts_give_the_bits_of_one(form: WeightForm) -> None:
    shape = ExpertShape(9, 3, 264, 136, Activation.clamped, has_bias=True)
    layout = SlotLayout(shape, form)
    pool, slot_of = make_pool(layout, 9, (), "cuda")
    grouped = GroupedExperts(layout, 40, 9, "cuda")
    tokens = make_tokens(shape, 40, "cuda")
    whole, parts = torch.empty_like(tokens[0]), torch.empty_like(tokens[0])
    grouped.run(pool, slot_of, *tokens, whole)
    early = torch.arange(9, device="cuda") % 2 == 0
    pairs = torch.zeros(40, 3, shape.hidden_size, device="cuda")
    grouped.run(pool, slot_of.where(early, -1), *tokens, parts, pairs=pairs)
    assert not torch.equal(whole, parts)
    grouped.run(pool, slot_of.where(~early, -1), *tokens, parts, pairs=pairs, resume=True)
    assert torch.equal(whole, parts)


@pytest.mark.gpu
@pytest.mark.parametrize("form", [WeightForm("bf16"), WeightForm("int4", 128)], ids=str)
def test_grouped_product_in_a_graph(form: WeightForm) -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("the library's fallback waits for the device")
    shape = ExpertShape(60, 4, 512, 264)
    layout = SlotLayout(shape, form)
    pool, slot_of = make_pool(layout, 60, (), "cuda")
    grouped = GroupedExperts(layout, 64, 60, "cuda")
    tokens = make_tokens(shape, 64, "cuda")
    y, wanted = torch.empty_like(tokens[0]), torch.empty_like(tokens[0])
    num_tokens = torch.full((1,), 64, dtype=torch.int32, device="cuda")
    grouped.run(pool, slot_of, *tokens, y, num_tokens=num_tokens)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grouped.run(pool, slot_of, *tokens, y, num_tokens=num_tokens)
    others = make_tokens(shape, 64, "cuda", seed=9)
    for old, new in zip(tokens, others, strict=True):
        old.copy_(new)
    num_tokens.fill_(50)
    y.fill_(5)
    graph.replay()
    grouped.run(pool, slot_of, *others, wanted)
    assert torch.equal(y[:50], wanted[:50]) and (y[50:] == 5).all()


def test_refuses_more_groups_than_the_library_takes() -> None:
    layout = SlotLayout(ExpertShape(4, 2, 64, 40), WeightForm("bf16"))
    with pytest.raises(ShapeError, match="slots in a pool"):
        GroupedExperts(layout, 8, 1024, "cpu")


def test_refuses_to_resume_from_nothing() -> None:
    route, rows = Route(4, 2, 3, "cpu"), torch.zeros(6, 64)
    with pytest.raises(ShapeError, match="pairs"):
        combine_rows(rows, route, torch.ones(3, 2), None, torch.zeros(3, 64).bfloat16(), resume=True)


@pytest.mark.parametrize("name", ["x", "xs", "p", "y", "pairs"])
def test_refuses_rows_that_vectors_do_not_fit(name: str) -> None:
    """8 bytes past a multiple of 16, where a vector would fault on the GPU."""

    def rows(own: str, dtype: torch.dtype, *sizes: int) -> torch.Tensor:
        extra = 8 // dtype.itemsize if own == name else 0
        return torch.zeros(math.prod(sizes) + extra, dtype=dtype)[extra:].view(sizes)

    route, half = Route(4, 2, 3, "cpu"), torch.bfloat16
    x, xs = rows("x", half, 3, 64), rows("xs", half, 6, 64)
    p, y, pairs = rows("p", half, 6, 64), rows("y", half, 3, 64), rows("pairs", torch.float32, 3, 2, 64)
    with pytest.raises(ShapeError, match=f"{'out' if name in ('xs', 'y') else name} at a multiple of 16 bytes"):
        if name in ("x", "xs"):
            gather_rows(x, route, xs)
        else:
            combine_rows(p, route, torch.ones(3, 2), None, y, pairs=pairs)
