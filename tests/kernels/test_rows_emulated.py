"""The dense steps of a decoding pass without a GPU: right, and nothing read before the kernel ahead has ended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from runtime.kernels.rows import MAX_ROWS, Routing, RowKernels, StepLog
from runtime.kernels.rows_reference import TorchRows
from tests.kernels.emulated_rows import row_kernels

PLAIN = TorchRows()
STEP = 2.0**-8  # half of what BF16 rounds by, relative


@pytest.fixture(scope="module")
def ops(folder: Path) -> Iterator[RowKernels]:
    with pytest.MonkeyPatch.context() as patch:
        yield row_kernels(folder, patch)


def normal(*sizes: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


def integers(*sizes: int, seed: int = 0, most: int = 3) -> Tensor:
    return torch.randint(-most, most + 1, sizes, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize(("n", "k", "rows"), [(1, 32, 8), (61, 2112, 1), (130, 288, 8)])
def test_products_of_integers_are_exact(ops: RowKernels, n: int, k: int, rows: int) -> None:
    """Tiles of many warps and of few, each with a ragged last tile or last step."""
    weight, x, bias = integers(n, k, seed=1), integers(rows, k + 8, seed=2)[:, :k], integers(n, seed=3)
    y = (x.double() @ weight.double().T).bfloat16()
    assert torch.equal(ops.linear(weight, bias, x), (x.double() @ weight.double().T + bias.double()).bfloat16())
    residual, routed = integers(rows, n, seed=4, most=100), integers(rows, n, seed=5, most=100)
    assert torch.equal(ops.add(weight, None, x, residual), residual + y)
    assert torch.equal(ops.join(weight, x, residual, routed, None), residual + (routed + y))


@pytest.mark.parametrize(("n", "k"), [(24, 64), (100, 1056)])
def test_gates_and_joins(ops: RowKernels, n: int, k: int) -> None:
    weight, x = normal(2 * n, k, seed=1, scale=k**-0.5), normal(MAX_ROWS, k, seed=2)
    gate, up = (x.double() @ weight.double().T).chunk(2, -1)
    exact = PLAIN.swiglu(weight.double(), x.double())
    assert torch.equal(ops.swiglu(weight, x, beside=True), ops.swiglu(weight, x))
    assert ((ops.swiglu(weight, x) - exact).abs() <= (gate.abs() * up.abs() + exact.abs()) * 6 * STEP + 1e-6).all()
    residual, routed, logits = (normal(MAX_ROWS, size, seed=size) for size in (n, n + 1, 5))
    all_of = weight[:n], x, residual, routed[:, :n].contiguous(), logits[:, 4:]
    exact = PLAIN.join(*(tensor.double() for tensor in all_of))
    size = sum(tensor.double().abs() for tensor in all_of[2:4]) + (x.double() @ weight[:n].double().T).abs()
    assert ((ops.join(*all_of) - exact).abs() <= size * 5 * STEP + 1e-6).all()


@pytest.mark.parametrize(("width", "groups", "biased"), [(8, 3, True), (200, 2, False), (2056, 1, True)])
def test_norms(ops: RowKernels, width: int, groups: int, biased: bool) -> None:
    x, weight = normal(3, groups * width + 8, seed=1, scale=3.0)[:, : groups * width], normal(width, seed=2)
    bias = normal(width, seed=3) if biased else None
    exact = PLAIN.norm(x.double(), weight.double(), None if bias is None else bias.double(), 1e-5)
    ours = ops.norm(x, weight, bias, 1e-5)
    bound = exact.abs() * 2.1 * STEP + (0 if bias is None else bias.double().abs().repeat(groups) * STEP) + 1e-5
    assert ((ours - exact).abs() <= bound).all()
    assert ops.norm(x, weight, bias, 1e-5, out=x) is x and torch.equal(x, ours)


@pytest.mark.parametrize(("heads", "key_heads", "size", "rotated"), [(8, 2, 128, 32), (6, 3, 96, 96)])
def test_rotary_positions_and_the_kv(ops: RowKernels, heads: int, key_heads: int, size: int, rotated: int) -> None:
    qkv = normal(MAX_ROWS, (heads + 2 * key_heads) * size, seed=1)
    cosine, sine = normal(MAX_ROWS, rotated, seed=2), normal(MAX_ROWS, rotated, seed=3)
    positions = torch.tensor([3, 9, 0, 1, 2, 31, 30, 7])
    found = []
    for one in (ops, PLAIN):
        keys, values = (torch.zeros(key_heads, 32, size, dtype=torch.bfloat16) for _ in range(2))
        found.append((one.rotate(qkv, cosine, sine, positions, keys, values), keys, values))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


CAPACITY = 300
ROWS = [0, 1, 127, 128, 129, 255, 256, 299]


@pytest.mark.parametrize(
    ("heads", "key_heads", "size", "window"), [(6, 2, 96, None), (6, 2, 96, 130), (8, 1, 32, 1), (1, 1, 256, None)]
)
def test_attention(ops: RowKernels, heads: int, key_heads: int, size: int, window: int | None) -> None:
    keys, values = normal(key_heads, CAPACITY, size, seed=1), normal(key_heads, CAPACITY, size, seed=2)
    for places in (ROWS, [5, 4, 200]):
        q, positions = normal(len(places), heads, size, seed=3), torch.tensor(places)
        wide = (t.double() for t in (q, keys, values))
        exact = PLAIN.attend(*wide, positions, CAPACITY, size**-0.5, window)
        past = max(places) + 1  # what nobody has written may be anything
        dirty = keys.clone(), values.clone()
        for tensor in dirty:
            tensor[:, past:] = torch.nan
        ours = ops.attend(q, *dirty, positions, CAPACITY, size**-0.5, window)
        assert ((ours - exact).abs() <= (exact.abs() + 3) * 3 * STEP).all()
        assert not ops._tickets.any()


def test_attention_has_the_same_bits_in_any_company_and_for_any_length(ops: RowKernels) -> None:
    keys, values = normal(1, CAPACITY, 96, seed=1), normal(1, CAPACITY, 96, seed=2)
    q, positions = normal(8, 3, 96, seed=3), torch.tensor(ROWS)
    whole = ops.attend(q, keys, values, positions, CAPACITY, 0.1, None)
    for rows in ([3], [7, 0], [2, 2, 5, 4]):
        some = ops.attend(q[rows], keys, values, positions[rows], max(positions[rows].tolist()) + 1, 0.1, None)
        assert torch.equal(some, whole[rows])


@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (60, 4), (130, 32)])
def test_routers(ops: RowKernels, experts: int, top_k: int) -> None:
    logits = normal(MAX_ROWS, experts + 1, seed=1, scale=2.0)[:, :experts]
    logits[1] = 0.5  # of equals the lower number comes first
    logits[2] = torch.nan
    for renormalise, round_weights in ((False, True), (True, False)):
        index = torch.full((MAX_ROWS, top_k), -7, dtype=torch.int32)
        to = Routing(index, torch.zeros(MAX_ROWS, top_k), torch.full_like(index, -7))
        ops.route(logits, to, renormalise, round_weights)
        assert to.seen is not None and torch.equal(to.seen, index)
        assert index[1].tolist() == index[2].tolist() == list(range(top_k))
        good = [row for row in range(MAX_ROWS) if row != 2]
        picked = logits[good].double().softmax(-1).gather(1, index[good].long())
        assert torch.equal(picked, logits[good].double().softmax(-1).topk(top_k, -1).values)
        wanted = picked / picked.sum(-1, keepdim=True) if renormalise else picked
        assert ((to.weights[good] - wanted).abs() <= wanted * (STEP if round_weights else 0) + 1e-6).all()


def test_the_next_token_is_the_first_largest_and_logged(ops: RowKernels) -> None:
    chosen = torch.zeros(3, 1, 2, dtype=torch.int32)
    for n in (7, 1000):
        log = StepLog(torch.tensor([0, 40, 0]), chosen, torch.full((6,), -1), torch.full((6, 3, 2), -1).int())
        rows = [
            normal(1, n, seed=1),
            torch.zeros(1, n).bfloat16(),
            -normal(1, n, seed=2).abs() - 1,
            normal(1, n, seed=3),
        ]
        rows[1][0, : n // 2] = -0.0
        rows[3][0, n // 3 :: 5] = torch.nan
        tokens = []
        for number, logits in enumerate(rows):
            chosen += torch.arange(6, dtype=torch.int32).view(3, 1, 2) + 1
            ops.advance(logits, log)
            tokens.append(int(logits[0].float().argmax()))
            assert log.state.tolist() == [tokens[-1], 41 + number, number + 1]
            assert torch.equal(log.routes[number], chosen[:, 0]) and (log.routes[number + 1 :] == -1).all()
        assert log.tokens.tolist() == [*tokens, -1, -1]
    assert not ops._best.any()


def linear(ops: RowKernels) -> None:
    test_products_of_integers_are_exact(ops, 61, 288, 3)


def attend(ops: RowKernels) -> None:
    test_attention(ops, 3, 1, 96, 130)


FAULTS = {
    "x is read too early": (linear, "  if (!BESIDE) wait_for_previous_kernel();\n", ""),
    "warps do not wait for each other": (linear, "= c[t][i];\n  __syncthreads();", "= c[t][i];"),
    "scores are read too early": (attend, "  __syncthreads();\n\n  for (int line = warp", "  for (int line = warp"),
    "values are read too early": (attend, "  copy_wait<0>();\n", ""),
    "the window is one too long": (attend, "> place[row] - window", ">= place[row] - window"),
    "a ticket stays": (attend, "tickets[head] = 0", "tickets[head] = arrived"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_emulation_finds(fault: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, before, after = FAULTS[fault]
    with pytest.raises(AssertionError) as found:
        step(row_kernels(folder, monkeypatch, edit=(before, after)))
    assert " once in " not in str(found.value) and "error:" not in str(found.value)  # it was planted, and compiled
