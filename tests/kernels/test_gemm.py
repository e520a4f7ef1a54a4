"""The layer by our own grouped products: each product by the three probes at odd sizes, and the layer as a whole."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from runtime.errors import KernelError, ShapeError
from runtime.kernels.combine import gather_rows
from runtime.kernels.device import Gpu
from runtime.kernels.gemm import CAPABILITY, NARROW, PAIRED, TILES, WIDE, GemmExperts, GemmTile, choose_tile
from runtime.kernels.layout import SlotLayout
from runtime.kernels.reference import KERNEL, activate_torch, compute_torch, slot_experts
from runtime.kernels.shape import Activation, ExpertShape, WeightForm
from tests.kernels.cases import make_pool, make_tokens
from tests.kernels.test_grouped import check_close

BF16 = WeightForm("bf16")
SHAPES = [
    ExpertShape(7, 1, 64, 40),
    ExpertShape(8, 1, 2048, 1408),
    ExpertShape(6, 1, 2880, 2880, Activation.clamped, has_bias=True),
    ExpertShape(40, 1, 136, 264),
    ExpertShape(257, 1, 72, 8),
]
ROWS = (
    300,
    0,
    1,
    7,
    127,
    129,
    16,
    193,
    48,
    331,
    17,
)  # of one expert after the other; 321 and more need two pairs of tiles


@pytest.fixture
def hopper(gpu: Gpu) -> Gpu:
    if gpu.capability != CAPABILITY:
        pytest.skip(f"wgmma needs compute capability 9.0, {gpu.name} has {gpu.capability[0]}.{gpu.capability[1]}")
    return gpu


class Case:
    """A layer with top_k 1 whose experts have given numbers of rows, gathered and ready for the products."""

    def __init__(self, shape: ExpertShape, rows: Sequence[int], tile: GemmTile, whole: bool = False) -> None:
        self.shape, self.tile = shape, tile
        self.layout = SlotLayout(shape, BF16)
        self.pool, self.slot_of = make_pool(self.layout, shape.num_experts + 2, (), "cuda")
        if whole:  # small integers, so that every partial sum is exact
            integers = torch.randint(-3, 4, (self.pool.numel() // 2,), device="cuda").bfloat16()
            self.pool.copy_(integers.view(torch.uint8).view_as(self.pool))
        counts = torch.tensor(list(itertools.islice(itertools.cycle(rows), shape.num_experts)), device="cuda")
        owner = torch.arange(shape.num_experts, device="cuda").repeat_interleave(counts)
        index = owner[torch.randperm(len(owner), device="cuda")].int()[:, None].contiguous()
        self.x = torch.randn(len(owner), shape.hidden_size, device="cuda").bfloat16()
        self.experts = GemmExperts(self.layout, len(owner) + 21, "cuda", tile)
        self.experts.route.build(index, self.slot_of)
        gather_rows(self.x, self.experts.route, self.experts.xs)
        self.experts.xs[len(owner) :] = torch.nan
        self.experts.hs.fill_(torch.nan)
        self.experts.ps.fill_(torch.nan)
        self.ends = [0, *counts.cumsum(0).tolist()]
        self.count = len(owner)

    def gate_up(self) -> None:
        self.experts.gate_up(self.pool, self.slot_of, self.tile)

    def down(self, hs: Tensor | None = None) -> None:
        if hs is not None:
            self.experts.hs[: self.count] = hs
        self.experts.down(self.pool, self.slot_of, self.tile)

    def parts(self) -> list[tuple[slice, Tensor, Tensor, Tensor | float, Tensor | float]]:
        """Rows, gate_up, down and their biases of each expert that has rows, float64."""
        expert = slot_experts(self.layout, self.pool, self.slot_of.tolist())
        found = []
        for number, (first, end) in enumerate(itertools.pairwise(self.ends)):
            if first < end and (dense := expert(number)) is not None:
                biases = (0.0, 0.0) if dense.gate_up_bias is None else (dense.gate_up_bias, dense.down_bias)
                found.append((slice(first, end), dense.gate_up, dense.down, *biases))
        return found


def inside(error: Tensor, bound: Tensor) -> None:
    ratio = error.abs() / bound
    worst = int(ratio.nan_to_num(nan=torch.inf).argmax())
    assert (error.abs() <= bound).all(), (
        f"{divmod(worst, error.shape[1])}: {float(ratio.flatten()[worst])} of the bound"
    )


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
class TestProducts:
    def test_random_rows(self, shape: ExpertShape, tile: GemmTile) -> None:
        """The tensor core cuts sums off instead of rounding them, so the bound grows with twice the usual factor."""
        case = Case(shape, ROWS, tile)
        case.gate_up()
        case.down()
        hs, ps = case.experts.hs, case.experts.ps
        assert hs[case.count :].isnan().all() and ps[case.count :].isnan().all()
        for rows, gate_up, down, gate_up_bias, down_bias in case.parts():
            x = case.experts.xs[rows].double()
            gate, up = (x @ gate_up.T + gate_up_bias).chunk(2, dim=-1)
            step = 8 * 2**-24 * shape.hidden_size**0.5
            gate_spread, up_spread = (x**2 @ (gate_up**2).T).sqrt().mul(step).add(2**-22).chunk(2, dim=-1)
            want = activate_torch(gate, up, shape.activation)
            bound = 2**-8 * want.abs() + 2 * (gate_spread * (up.abs() + 1) + up_spread * gate.abs()) + 2**-24
            inside(hs[rows].double() - want, bound + 2e-6 * gate.abs() * (up.abs() + 1))
            h = hs[rows].double()
            want = h @ down.T + down_bias
            spread = (h**2 @ (down**2).T).sqrt()
            step = 8 * 2**-24 * shape.moe_intermediate_size**0.5
            inside(ps[rows].double() - want, step * spread + 2**-23 * want.abs() + 2**-24)
        first = hs.clone(), ps.clone()
        case.gate_up()
        case.down()
        for old, new in zip(first, (hs, ps), strict=True):
            assert torch.equal(old[: case.count], new[: case.count])

    def test_exact_integers(self, shape: ExpertShape, tile: GemmTile) -> None:
        case = Case(shape, ROWS, tile, whole=True)
        hs = torch.randint(-3, 4, (case.count, shape.moe_intermediate_size), device="cuda").bfloat16()
        case.down(hs)
        for rows, _, down, _, down_bias in case.parts():
            assert torch.equal(case.experts.ps[rows].double(), hs[rows].double() @ down.T + down_bias)

    def test_one_hot_rows(self, shape: ExpertShape, tile: GemmTile) -> None:
        """The contribution is a column of down, bit for bit; the activation that of a column of gate and of up."""
        case = Case(shape, ROWS, tile)
        row = torch.arange(case.count, device="cuda")
        case.experts.xs[: case.count] = 0
        case.experts.xs[row, row * 7 % shape.hidden_size] = 1
        case.gate_up()
        got = case.experts.hs[: case.count].double()
        hs = torch.zeros_like(case.experts.hs[: case.count])
        hs[row, row * 7 % shape.moe_intermediate_size] = 1
        case.down(hs)
        for rows, gate_up, down, gate_up_bias, down_bias in case.parts():
            gate, up = (gate_up.T[row[rows] * 7 % shape.hidden_size] + gate_up_bias).chunk(2, dim=-1)
            want = activate_torch(gate, up, shape.activation)
            inside(got[rows] - want, 2**-8 * want.abs() + 2e-6 * gate.abs() * (up.abs() + 1) + 2**-24)
            want = down.T[row[rows] * 7 % shape.moe_intermediate_size] + down_bias
            assert torch.equal(case.experts.ps[rows], want.float())


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("form", [BF16, WeightForm("int4", 128), WeightForm("int8", -1)], ids=str)
@pytest.mark.parametrize(
    ("shape", "tile"),
    [
        (ExpertShape(60, 4, 2048, 1408), None),
        (ExpertShape(7, 7, 2880, 8, Activation.clamped, has_bias=True), None),
        (ExpertShape(1, 1, 96, 136, Activation.gelu), NARROW),
        (ExpertShape(257, 8, 264, 200, Activation.gelu_tanh, has_bias=True), NARROW),
    ],
    ids=str,
)
def test_computes_the_layer(shape: ExpertShape, tile: GemmTile | None, form: WeightForm) -> None:
    layout = SlotLayout(shape, form)
    missing = (1,) if shape.num_experts > 1 else ()
    pool, slot_of = make_pool(layout, shape.num_experts + 1, missing, "cuda")
    experts = slot_experts(layout, pool, slot_of.tolist(), rounded=True)
    gemm = GemmExperts(layout, 333, "cuda", tile)
    for tokens in (1, 17, 131, 333):
        x, top_k_index, top_k_weights = make_tokens(shape, tokens, "cuda", seed=tokens)
        stages = compute_torch(x, top_k_index, top_k_weights, experts, shape.activation, KERNEL)
        y = torch.full_like(x, torch.nan)
        gemm.run(pool, slot_of, x, top_k_index, top_k_weights, y)
        check_close(y, stages)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_a_row_has_the_same_bits_in_any_batch_and_tile() -> None:
    shape = ExpertShape(5, 2, 520, 264)
    layout = SlotLayout(shape, BF16)
    pool, slot_of = make_pool(layout, 5, (), "cuda")
    x, top_k_index, top_k_weights = make_tokens(shape, 700, "cuda")
    wanted = torch.empty_like(x)
    GemmExperts(layout, 700, "cuda", NARROW).run(pool, slot_of, x, top_k_index, top_k_weights, wanted)
    for tile in (*TILES, GemmTile(1, 8, 6), GemmTile(2, 3, 5)):
        gemm = GemmExperts(layout, 700, "cuda", tile)
        for tokens in (1, 3, 40, 333, 700):
            chosen = torch.randperm(700, device="cuda")[:tokens]
            y = torch.empty_like(x[chosen])
            gemm.run(pool, slot_of, x[chosen], top_k_index[chosen], top_k_weights[chosen], y)
            assert torch.equal(y, wanted[chosen]), f"{tile}, {tokens} tokens"


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("form", [BF16, WeightForm("int4", 128)], ids=str)
def test_two_calls_over_parts_of_the_experts_give_the_bits_of_one(form: WeightForm) -> None:
    shape = ExpertShape(9, 3, 264, 136, Activation.clamped, has_bias=True)
    layout = SlotLayout(shape, form)
    pool, slot_of = make_pool(layout, 9, (), "cuda")
    gemm = GemmExperts(layout, 40, "cuda")
    tokens = make_tokens(shape, 40, "cuda")
    whole, parts = torch.empty_like(tokens[0]), torch.empty_like(tokens[0])
    gemm.run(pool, slot_of, *tokens, whole)
    early = torch.arange(9, device="cuda") % 2 == 0
    pairs = torch.zeros(40, 3, shape.hidden_size, device="cuda")
    gemm.run(pool, slot_of.where(early, -1), *tokens, parts, pairs=pairs)
    assert not torch.equal(whole, parts)
    gemm.run(pool, slot_of.where(~early, -1), *tokens, parts, pairs=pairs, resume=True)
    assert torch.equal(whole, parts)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_in_a_graph_of_several_layers(tile: GemmTile) -> None:
    """Layers that follow one another share the rows, so that a kernel that starts too early would be seen."""
    shape = ExpertShape(60, 4, 512, 264)
    layout = SlotLayout(shape, BF16)
    pools = [make_pool(layout, 60, (), "cuda", seed) for seed in range(3)]
    gemm = GemmExperts(layout, 200, "cuda", tile)
    tokens = make_tokens(shape, 200, "cuda")
    ys = [torch.empty_like(tokens[0]) for _ in pools]
    num_tokens = torch.full((1,), 200, dtype=torch.int32, device="cuda")

    def layers() -> None:
        for (pool, slot_of), y in zip(pools, ys, strict=True):
            gemm.run(pool, slot_of, *tokens, y, num_tokens=num_tokens)

    layers()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(4):
            layers()
    for old, new in zip(tokens, make_tokens(shape, 200, "cuda", seed=9), strict=True):
        old.copy_(new)
    num_tokens.fill_(150)
    for y in ys:
        y.fill_(5)
    graph.replay()
    for (pool, slot_of), y in zip(pools, ys, strict=True):
        wanted = torch.empty_like(y)
        gemm.run(pool, slot_of, *tokens, wanted)
        assert torch.equal(y[:150], wanted[:150]) and (y[150:] == 5).all()


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_no_expert_is_here() -> None:
    layout = SlotLayout(ExpertShape(4, 2, 64, 40), BF16)
    pool, slot_of = make_pool(layout, 4, (), "cuda")
    x, top_k_index, top_k_weights = make_tokens(layout.shape, 9, "cuda")
    y = torch.full_like(x, torch.nan)
    GemmExperts(layout, 9, "cuda").run(pool, torch.full_like(slot_of, -1), x, top_k_index, top_k_weights, y)
    assert (y == 0).all()


def test_other_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.kernels.gemm.current_gpu", lambda: Gpu(0, "an A100", (8, 0), 108, 166912))
    with pytest.raises(KernelError, match=r"found an A100 of 8\.0"):
        GemmExperts(SlotLayout(ExpertShape(4, 2, 64, 40), BF16), 8, "cpu")


@pytest.mark.parametrize(("rows", "tile"), [(0.3, NARROW), (34, NARROW), (68, WIDE), (137, WIDE), (273, PAIRED)])
def test_wider_tiles_for_more_rows(rows: float, tile: GemmTile) -> None:
    assert choose_tile(rows) is tile


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_tiles_fit_in_shared_memory(tile: GemmTile) -> None:
    assert tile.smem_bytes <= 232448  # of a block on compute capability 9.0


@pytest.mark.parametrize("values", [(3, 4, 4), (1, 17, 4), (2, 11, 4), (2, 0, 4), (2, 8, 4, 4)], ids=str)
def test_tiles_that_cannot_be_are_refused(values: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match="sub and cluster of 1 or 2"):
        GemmTile(*values)
