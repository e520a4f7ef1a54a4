"""Sorting pairs on the device against NumPy's stable sort."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from runtime.errors import ShapeError
from runtime.kernels.route import Route

Ints = NDArray[np.int32]


def sort_pairs(top_k_index: Ints, slot_of: Ints, num_keys: int, by_slot: bool) -> dict[str, Ints]:
    """What a Route must hold, from the definition."""
    expert = top_k_index.reshape(-1)
    slot = slot_of[expert]
    key = np.where(slot < 0, -1, slot if by_slot else expert)
    pairs = np.argsort(key, kind="stable")[np.count_nonzero(key < 0) :]
    position = np.full(len(key), -1)
    position[pairs] = np.arange(len(pairs))
    counts = np.bincount(key[key >= 0], minlength=num_keys)
    active = np.flatnonzero(counts)
    first = np.concatenate([(np.cumsum(counts) - counts)[active], [len(pairs)]])
    lists = {"pairs": pairs, "position": position, "active": active, "first": first, "ends": np.cumsum(counts)}
    return lists | {"num_active": np.array([len(active)]), "num_sorted": np.array([len(pairs)])}


def draw(
    num_experts: int, top_k: int, tokens: int, skew: float, missing: int, num_slots: int, seed: int = 0
) -> tuple[Ints, Ints]:
    """top_k_index with distinct experts in a row, some experts far more popular, and slot_of in random order."""
    rng = np.random.default_rng(seed)
    scores = rng.random((tokens, num_experts)) + skew * rng.random(num_experts)
    top_k_index = np.argsort(-scores, axis=1)[:, :top_k].astype(np.int32)
    slot_of = rng.permutation(num_slots)[:num_experts].astype(np.int32)
    slot_of[rng.permutation(num_experts)[:missing]] = -1
    return np.ascontiguousarray(top_k_index), slot_of


def check(route: Route, top_k_index: Ints, slot_of: Ints) -> None:
    want = sort_pairs(top_k_index, slot_of, route.num_keys, route.by_slot)
    for name, values in want.items():
        got = getattr(route, name).cpu().numpy()
        np.testing.assert_array_equal(got[: len(values)], values, err_msg=name)


CASES = [
    (num_experts, top_k, tokens)
    for num_experts, ks in ((1, (1,)), (3, (1, 2, 3)), (60, (1, 4, 60)), (257, (1, 8, 257)), (1024, (2, 1024)))
    for top_k in ks
    for tokens in (1, 2, 16, 17, 255, 1024, 1025, 4096, 5000)
    if tokens * top_k <= 1_300_000
]


@pytest.mark.gpu
@pytest.mark.parametrize(("num_experts", "top_k", "tokens"), CASES)
def test_sorts_by_expert_and_by_slot(num_experts: int, top_k: int, tokens: int) -> None:
    num_slots = min(num_experts + 5, 1024)
    for skew, missing, slots in ((0.0, 0, None), (2.0, num_experts // 3, None), (0.5, num_experts // 2, num_slots)):
        top_k_index, slot_of = draw(num_experts, top_k, tokens, skew, missing, num_slots, seed=tokens)
        route = Route(num_experts, top_k, tokens, "cuda", slots)
        for name in ("num_active", "active", "first", "ends", "pairs", "position"):
            getattr(route, name).fill_(-77)
        for _ in range(2):  # a second call finds the first one's leavings
            route.build(torch.from_numpy(top_k_index).cuda(), torch.from_numpy(slot_of).cuda())
        check(route, top_k_index, slot_of)


@pytest.mark.gpu
def test_all_tokens_on_one_expert_and_none_here() -> None:
    for tokens in (16, 5000):
        route = Route(60, 1, tokens, "cuda")
        top_k_index, slot_of = np.full((tokens, 1), 59, np.int32), np.arange(60, dtype=np.int32)
        route.build(torch.from_numpy(top_k_index).cuda(), torch.from_numpy(slot_of).cuda())
        check(route, top_k_index, slot_of)
        slot_of[:] = -1
        route.build(torch.from_numpy(top_k_index).cuda(), torch.from_numpy(slot_of).cuda())
        check(route, top_k_index, slot_of)
        assert int(route.num_active) == 0 and int(route.first[0]) == 0


@pytest.mark.gpu
def test_experts_out_of_range_are_left_out() -> None:
    top_k_index = torch.tensor([[0, 7], [-1, 2], [99, 1]], dtype=torch.int32, device="cuda")
    route = Route(4, 2, 3, "cuda")
    route.build(top_k_index, torch.arange(4, dtype=torch.int32, device="cuda"))
    assert route.position.tolist() == [0, -1, -1, 2, -1, 1] and int(route.num_sorted) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("most", [33, 5000, 40000])
def test_a_graph_follows_the_number_of_tokens(most: int) -> None:
    top_k_index, slot_of = draw(60, 4, most, 0.5, 7, 60)
    route = Route(60, 4, most, "cuda")
    index, slots = torch.from_numpy(top_k_index).cuda(), torch.from_numpy(slot_of).cuda()
    num_tokens = torch.full((1,), most, dtype=torch.int32, device="cuda")
    route.build(index, slots, num_tokens)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        route.build(index, slots, num_tokens)
    for tokens in (1, most // 2, 0, most, most + 9):
        num_tokens.fill_(tokens)
        graph.replay()
        check(route, top_k_index[:tokens], slot_of)


@pytest.mark.gpu
@pytest.mark.parametrize(("num_experts", "top_k", "tokens"), [(128, 8, 65536), (60, 4, 65537)])
def test_sorts_the_most_tokens(num_experts: int, top_k: int, tokens: int) -> None:
    top_k_index, slot_of = draw(num_experts, top_k, tokens, 0.3, 3, num_experts)
    route = Route(num_experts, top_k, tokens, "cuda")
    index, slots = torch.from_numpy(top_k_index).cuda(), torch.from_numpy(slot_of).cuda()
    for count in (tokens, 300, 20000, tokens):  # other grids in the same memory
        route.build(index[:count], slots)
        check(route, top_k_index[:count], slot_of)


def test_refuses_what_the_kernel_cannot_count() -> None:
    with pytest.raises(ShapeError, match="at most 1024"):
        Route(60, 4, 16, "cpu", num_slots=1025)
    with pytest.raises(ShapeError, match="pairs"):
        Route(1024, 1024, 1 << 21, "cpu")
    with pytest.raises(ShapeError, match="top_k_index"):
        Route(4, 2, 3, "cpu").build(torch.zeros(3, 2, dtype=torch.int64), torch.zeros(4, dtype=torch.int32))
    with pytest.raises(ShapeError, match="slot_of"):
        Route(4, 2, 3, "cpu").build(torch.zeros(3, 2, dtype=torch.int32), torch.zeros(5, dtype=torch.int32))
