"""The dense steps of a decoding pass on the GPU against their formulas in float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from runtime.kernels.fused import FusedExperts
from runtime.kernels.rows import MAX_ROWS, Routing, RowKernels, StepLog
from runtime.kernels.rows_reference import TorchRows
from runtime.kernels.shape import ExpertShape
from tests.kernels.layers import INT4, random_layer

pytestmark = pytest.mark.gpu
STEP = 2.0**-8  # half of what BF16 rounds by, relative
SIZES_BESIDE = ((2 * 5632, 2048), (2048, 5632), (61, 2048))
SHAPES = [(1, 32), (16, 64), (17, 96), (61, 2048), (2048, 5632), (2111, 160), (3000, 288)]


@pytest.fixture(scope="module")
def ops(gpu: object) -> RowKernels:
    return RowKernels()


def normal(*sizes: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    made = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(*sizes, generator=made, device="cuda") * scale).bfloat16()


def integers(*sizes: int, seed: int = 0, most: int = 3) -> Tensor:
    made = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(-most, most + 1, sizes, generator=made, device="cuda").bfloat16()


def product(weight: Tensor, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x times weight plus bias, float64, and how far FP32 sums rounded to BF16 may be from it."""
    exact = x.double() @ weight.double().T
    size = x.double().abs() @ weight.double().abs().T
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    return exact, exact.abs() * STEP * 1.01 + size * 2.0**-22 * weight.shape[1] ** 0.5


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_products(ops: RowKernels, n: int, k: int, rows: int) -> None:
    weight, bias, x = normal(n, k, seed=1), normal(n, seed=2), normal(rows, k, seed=3)
    for told in (None, bias):
        exact, bound = product(weight, x, told)
        assert ((ops.linear(weight, told, x).double() - exact).abs() <= bound).all()


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_products_of_integers_are_exact(ops: RowKernels, n: int, k: int) -> None:
    """Sums below 2^24 are exact in FP32, so the only rounding is the last."""
    weight, x, bias = integers(n, k, seed=1), integers(MAX_ROWS, k, seed=2), integers(n, seed=3)
    exact = x.double() @ weight.double().T
    assert torch.equal(ops.linear(weight, bias, x), (exact + bias.double()).bfloat16())
    residual, routed = integers(MAX_ROWS, n, seed=4, most=100), integers(MAX_ROWS, n, seed=5, most=100)
    y = exact.bfloat16()
    assert torch.equal(ops.add(weight, None, x, residual), residual + y)
    assert torch.equal(ops.join(weight, x, residual, routed, None), residual + (routed + y))


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_one_hot_rows_pick_columns(ops: RowKernels, n: int, k: int) -> None:
    weight = normal(n, k, seed=1)
    for first in range(0, min(k, 64), MAX_ROWS):
        x = torch.zeros(MAX_ROWS, k, dtype=torch.bfloat16, device="cuda")
        columns = [(first + r) * 7 % k for r in range(MAX_ROWS)]
        x[torch.arange(MAX_ROWS), columns] = 1
        assert torch.equal(ops.linear(weight, None, x), weight[:, columns].T)


@pytest.mark.parametrize(("n", "k"), [(48, 64), (1408, 2048), (5632, 2048), (2816, 96)])
def test_gates_and_joins(ops: RowKernels, n: int, k: int) -> None:
    """Within one BF16 step a rounding of what the library's operations give, as their sums differ in order."""
    plain = TorchRows()
    weight, x = normal(2 * n, k, seed=1, scale=k**-0.5), normal(MAX_ROWS, k, seed=2)
    ours, theirs = ops.swiglu(weight, x).double(), plain.swiglu(weight.double(), x.double())
    gate, up = (x.double() @ weight.double().T).chunk(2, -1)
    bound = (gate.abs() * up.abs() + theirs.abs()) * 6 * STEP + 1e-6
    assert ((ours - theirs).abs() <= bound).all()
    weight, residual, routed = (
        normal(n, k, seed=3, scale=k**-0.5),
        normal(MAX_ROWS, n, seed=4),
        normal(MAX_ROWS, n, seed=5),
    )
    logits = normal(MAX_ROWS, 5, seed=6)
    ours = ops.join(weight, x, residual, routed, logits[:, 4:]).double()
    theirs = plain.join(*(t.double() for t in (weight, x, residual, routed, logits[:, 4:])))
    size = residual.double().abs() + routed.double().abs() + (x.double() @ weight.double().T).abs()
    assert ((ours - theirs).abs() <= size * 5 * STEP + 1e-6).all()


@pytest.mark.parametrize("width", [8, 64, 200, 2048, 4096, 16384])
@pytest.mark.parametrize("biased", [False, True])
def test_norms(ops: RowKernels, width: int, biased: bool) -> None:
    groups = 3 if width < 4096 else 1
    x, weight = normal(MAX_ROWS, groups * width + 8, seed=1, scale=3.0)[:, : groups * width], normal(width, seed=2)
    bias = normal(width, seed=3) if biased else None
    exact = TorchRows().norm(x.double(), weight.double(), None if bias is None else bias.double(), 1e-5)
    ours = ops.norm(x, weight, bias, 1e-5)
    bound = exact.abs() * 2.1 * STEP + (0 if bias is None else bias.double().abs().repeat(groups) * STEP) + 1e-5
    assert ((ours.double() - exact).abs() <= bound).all()
    before = x.clone()
    assert ops.norm(x, weight, bias, 1e-5, out=x) is x and torch.equal(x, ours) and not torch.equal(x, before)


@pytest.mark.parametrize(("heads", "key_heads", "size", "rotated"), [(4, 4, 64, 64), (8, 2, 128, 32), (6, 3, 96, 96)])
def test_rotary_positions_and_the_kv(ops: RowKernels, heads: int, key_heads: int, size: int, rotated: int) -> None:
    """Bit for bit what torch's operations give: products and sums are single ones."""
    qkv = normal(MAX_ROWS, (heads + 2 * key_heads) * size, seed=1)
    cosine, sine = normal(MAX_ROWS, rotated, seed=2), normal(MAX_ROWS, rotated, seed=3)
    positions = torch.tensor([3, 9, 0, 1, 2, 31, 30, 7], device="cuda")
    found = []
    for one in (ops, TorchRows()):
        keys, values = (torch.zeros(key_heads, 32, size, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        found.append((one.rotate(qkv, cosine, sine, positions, keys, values), keys, values))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


def attention(q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, scale: float, window: int | None) -> Tensor:
    return TorchRows().attend(q.double(), keys.double(), values.double(), positions, keys.shape[1], scale, window)


@pytest.mark.parametrize(
    ("heads", "key_heads", "size"),
    [(16, 16, 128), (32, 8, 128), (8, 1, 64), (6, 2, 96), (4, 4, 32), (16, 1, 64), (2, 2, 256)],
)
@pytest.mark.parametrize("window", [None, 1, 100, 300])
def test_attention(ops: RowKernels, heads: int, key_heads: int, size: int, window: int | None) -> None:
    capacity = 700
    keys, values = normal(key_heads, capacity, size, seed=1), normal(key_heads, capacity, size, seed=2)
    for rows, places in ((8, [0, 1, 127, 128, 129, 400, 511, 699]), (1, [255]), (3, [5, 4, 640])):
        q, positions = normal(rows, heads, size, seed=rows), torch.tensor(places, device="cuda")
        exact = attention(q, keys, values, positions, size**-0.5, window)
        ours = ops.attend(q, keys, values, positions, capacity, size**-0.5, window)
        assert (ours.double() - exact).abs().max() <= 4 * STEP * 4
        assert ((ours.double() - exact).abs().mean() <= STEP).all()


def test_attention_of_one_key_is_its_value(ops: RowKernels) -> None:
    """Keys that are orthogonal and large: a row that asks for one of them gets its value, exactly."""
    size, capacity = 128, 300
    keys, values = torch.zeros(2, capacity, size, dtype=torch.bfloat16, device="cuda"), normal(2, capacity, size)
    for s in range(capacity):
        keys[:, s, s % size] = 64.0 * (1 + s // size)
    wanted = torch.tensor([0, 5, 127, 128, 200, 255, 256, 299], device="cuda")
    q = torch.zeros(8, 2, size, dtype=torch.bfloat16, device="cuda")
    for r, s in enumerate(wanted.tolist()):
        q[r, :, s % size] = 64.0
    ours = ops.attend(q, keys, values, wanted, capacity, 1.0, None).view(8, 2, size)
    assert torch.equal(ours, values[:, wanted].transpose(0, 1))


def test_a_row_has_the_same_bits_in_any_company(ops: RowKernels) -> None:
    keys, values = normal(4, 900, 128, seed=1), normal(4, 900, 128, seed=2)
    weight, x = normal(600, 1408, seed=3), normal(8, 1408, seed=4)
    q, positions = normal(8, 8, 128, seed=5), torch.tensor([0, 30, 127, 128, 300, 511, 512, 640], device="cuda")
    norm_weight = normal(1408, seed=6)

    def attend(at: Tensor) -> Tensor:
        some, places = q[at], positions[at]
        torch.cuda.synchronize()  # positions are read ahead of the wait for the launch before
        return ops.attend(some, keys, values, places, 900, 0.1, None)

    steps: list[Callable[[Tensor], Tensor]] = [
        lambda at: ops.linear(weight, None, x[at]),
        lambda at: ops.swiglu(weight, x[at]),
        lambda at: ops.norm(x[at], norm_weight, None, 1e-6),
        attend,
    ]
    for step in steps:
        whole = step(torch.arange(8, device="cuda"))
        for rows in ([3], [7, 0], [6, 5, 4, 3, 2, 1, 0, 7], [2, 2, 2]):
            at = torch.tensor(rows, device="cuda")
            assert torch.equal(step(at), whole[at])


def test_attention_has_the_same_bits_for_any_length(ops: RowKernels) -> None:
    keys, values = normal(2, 4096, 128, seed=1), normal(2, 4096, 128, seed=2)
    q, positions = normal(8, 4, 128, seed=3), torch.arange(100, 108, device="cuda")
    first = ops.attend(q, keys, values, positions, 108, 0.1, None)
    for length in (129, 256, 1024, 4096):
        assert torch.equal(ops.attend(q, keys, values, positions, length, 0.1, None), first)
    there = positions + 3900
    torch.cuda.synchronize()
    far = ops.attend(q, keys, values, there, 4096, 0.1, None)
    for other in (0, 1000, 4095):  # one row far ahead: the others have more blocks to join
        mixed = positions.clone()
        mixed[0] = other
        torch.cuda.synchronize()
        assert torch.equal(ops.attend(q, keys, values, mixed, 4096, 0.1, None)[1:], first[1:])
    assert torch.equal(ops.attend(q, keys, values, there, 4096, 0.1, None), far)


@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (3, 3), (8, 2), (60, 4), (128, 8), (257, 32), (1024, 6)])
def test_routers(ops: RowKernels, experts: int, top_k: int) -> None:
    logits = normal(MAX_ROWS, experts + 1, seed=1, scale=2.0)[:, :experts]
    for renormalise, round_weights, on_host in itertools.product((False, True), repeat=3):
        made = []
        for one in (ops, TorchRows()):
            index = torch.full((MAX_ROWS, top_k), -7, dtype=torch.int32, device="cuda")
            seen = torch.full_like(index, -7) if on_host else None
            to = Routing(index, torch.zeros(MAX_ROWS, top_k, device="cuda"), seen)
            one.route(logits, to, renormalise, round_weights)
            made.append(to)
        ours, theirs = made
        probabilities = logits.double().softmax(-1)
        picked = probabilities.gather(1, ours.index.long())
        assert torch.equal(
            picked, probabilities.topk(top_k, -1).values
        )  # the largest, largest first; equals in any order
        assert all(len(set(row)) == top_k for row in ours.index.tolist())
        assert (ours.weights - theirs.weights).abs().max() <= (2 * STEP if round_weights else 1e-5)
        assert ours.seen is None or torch.equal(ours.seen, ours.index)


def test_a_router_of_nan_names_experts_that_exist(ops: RowKernels) -> None:
    logits = torch.full((2, 60), float("nan"), dtype=torch.bfloat16, device="cuda")
    to = Routing(torch.zeros(2, 4, dtype=torch.int32, device="cuda"), torch.zeros(2, 4, device="cuda"))
    ops.route(logits, to, True, True)
    assert to.index.tolist() == [[0, 1, 2, 3]] * 2


def test_equals_go_to_the_lower_number(ops: RowKernels) -> None:
    to = Routing(torch.zeros(1, 4, dtype=torch.int32, device="cuda"), torch.zeros(1, 4, device="cuda"))
    logits = torch.zeros(1, 60, dtype=torch.bfloat16, device="cuda")
    logits[0, 37] = 1
    ops.route(logits, to, False, False)
    assert to.index.tolist() == [[37, 0, 1, 2]]


def test_steps_in_a_graph_follow_each_other(ops: RowKernels) -> None:
    """A chain of launches that begin early, recorded and replayed, gives what it gives one by one."""
    weight, up, x = (
        normal(2048, 2048, seed=1, scale=0.02),
        normal(4096, 2048, seed=2, scale=0.02),
        normal(8, 2048, seed=3),
    )
    norm_weight = normal(2048, seed=4)

    def chain() -> Tensor:
        h = x
        for _ in range(12):
            h = ops.add(weight, None, ops.norm(h, norm_weight, None, 1e-6), h)
            h = ops.join(weight, ops.swiglu(up, ops.norm(h, norm_weight, None, 1e-6)), h, x, None)
        return h

    def slow() -> Tensor:
        h = x
        for _ in range(12):
            for step in (0, 1):
                n = ops.norm(h, norm_weight, None, 1e-6)
                torch.cuda.synchronize()
                if step == 0:
                    h = ops.add(weight, None, n, h)
                else:
                    s = ops.swiglu(up, n)
                    torch.cuda.synchronize()
                    h = ops.join(weight, s, h, x, None)
                torch.cuda.synchronize()
        return h

    wanted = slow()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain()
    for _ in range(20):
        found.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("n", [5, 1000, 151936])
def test_the_next_token_is_the_first_largest_and_logged(ops: RowKernels, n: int) -> None:
    state, chosen = torch.tensor([0, 40, 0]).cuda(), torch.zeros(24, 1, 4, dtype=torch.int32).cuda()
    log = StepLog(state, chosen, torch.full((40,), -1).cuda(), torch.full((40, 24, 4), -1).int().cuda())
    table = normal(32, n, seed=1)
    table[3] = 0.5
    table[4, n // 3 :: 7] = torch.nan
    logits = table[:1].clone()

    def step() -> None:
        logits.copy_(table.index_select(0, log.state[2:]))
        chosen.add_(1)
        ops.advance(logits, log)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(31):
            step()
    graph.replay()
    torch.cuda.synchronize()
    wanted = table.float().cpu().argmax(-1).tolist()
    assert log.tokens.tolist() == [*wanted, *[-1] * 8] and state.tolist() == [wanted[-1], 72, 32]
    assert (log.routes[:32].cpu() == torch.arange(1, 33).view(-1, 1, 1)).all() and (log.routes[32:] == -1).all()


def test_what_runs_beside_the_experts_gives_the_same(ops: RowKernels) -> None:
    """Steps as a layer of the draft queues them, recorded and replayed, against the same one by one."""
    layer = random_layer(ExpertShape(60, 4, 2048, 1408), INT4)
    up, down, router = (normal(*sizes, seed=seed, scale=0.02) for seed, sizes in enumerate(SIZES_BESIDE))
    norm_weight, start = normal(2048, seed=4), normal(8, 2048, seed=9)
    beside = FusedExperts(layer.layout, beside=True)

    def chain(rows: int, experts: FusedExperts, wait: Callable[[], None], together: bool) -> Tensor:
        h = start[:rows]
        for _ in range(6):
            x = ops.norm(h, norm_weight, None, 1e-6)
            wait()
            logits, routed = ops.linear(router, None, x), torch.empty_like(x)
            to = Routing(torch.empty(rows, 4, dtype=torch.int32, device="cuda"), torch.empty(rows, 4, device="cuda"))
            wait()
            ops.route(logits[:, :60], to, False, False)
            wait()
            experts.run(layer.pool, layer.slot_of, x, to.index, to.weights, routed)
            wait()
            inner = ops.swiglu(up, x, beside=together)
            wait()
            h = ops.join(down, inner, h, routed, logits[:, 60:])
            wait()
        return h

    for rows in (1, 8):
        wanted = chain(rows, FusedExperts(layer.layout), torch.cuda.synchronize, together=False)
        assert wanted.isfinite().all()
        assert torch.equal(chain(rows, beside, torch.cuda.synchronize, together=True), wanted)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = chain(rows, beside, lambda: None, together=True)
        for _ in range(20):
            found.zero_()
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(found, wanted)
