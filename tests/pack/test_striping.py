"""Striping: equally full shards, with experts that fire together apart."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moespeq_cli.pack.striping import Routing, read_order, shared_reads, stripe


def routing(layers: int, experts: int, tokens: int = 300, top_k: int = 4, seed: int = 0, friends: int = 4) -> Routing:
    """Tokens that mostly use one of some circles of experts."""
    generator = torch.Generator().manual_seed(seed)
    coactivation = torch.zeros(layers, experts, experts, dtype=torch.int64)
    counts = torch.zeros(layers, experts, dtype=torch.int64)
    for layer in range(layers):
        circles = torch.randperm(experts, generator=generator).split(friends)
        for _ in range(tokens):
            liking = torch.rand(experts, generator=generator)
            liking[circles[int(torch.randint(len(circles), (1,), generator=generator))]] += 0.7
            chosen = liking.topk(min(top_k, experts)).indices
            counts[layer, chosen] += 1
            coactivation[layer, chosen[:, None], chosen[None, :]] += 1
    return Routing(coactivation, counts, {})


@settings(max_examples=60, deadline=None)
@given(
    layers=st.integers(1, 5),
    experts=st.integers(1, 20),
    shards=st.integers(1, 9),
    known=st.booleans(),
    seed=st.integers(0, 9),
)
def test_shards_hold_equally_many_experts(layers: int, experts: int, shards: int, known: bool, seed: int) -> None:
    placed = stripe(layers, experts, shards, routing(layers, experts, 20, 3, seed) if known else None)
    whole = Counter(shard for layer in placed for shard in layer)
    counts = [whole[shard] for shard in range(shards)]
    assert max(counts) - min(counts) <= 1 and sum(counts) == layers * experts
    for layer in placed:
        counts = [layer.count(shard) for shard in range(shards)]
        assert max(counts) - min(counts) <= 1


def test_without_a_profile_experts_go_round() -> None:
    assert stripe(2, 3, 2, None) == [[0, 1, 0], [1, 0, 1]]


@pytest.mark.parametrize("shards", [2, 3, 4, 8])
def test_profile_separates_friends_better_than_going_round(shards: int) -> None:
    known = routing(4, 32)
    for layer, (mine, round_robin) in enumerate(
        zip(stripe(4, 32, shards, known), stripe(4, 32, shards, None), strict=True)
    ):
        coactivation = known.coactivation[layer]
        assert shared_reads(coactivation, mine) < 0.97 * shared_reads(coactivation, round_robin)


def test_circles_as_large_as_the_shards_are_many_come_apart_wholly() -> None:
    coactivation = torch.zeros(1, 12, 12, dtype=torch.int64)
    for start in range(0, 12, 4):
        coactivation[0, start : start + 4, start : start + 4] = 10
    known = Routing(coactivation, coactivation.sum(2), {})
    assert shared_reads(coactivation[0], stripe(1, 12, 4, known)[0]) == 0


@pytest.mark.parametrize("seed", range(6))
def test_assignment_is_near_the_best_there_is(seed: int) -> None:
    known = routing(1, 8, tokens=60, top_k=3, seed=seed)
    coactivation = known.coactivation[0]
    costs = []
    for left in combinations(range(1, 8), 3):
        shards = [0 if expert == 0 or expert in left else 1 for expert in range(8)]
        costs.append(shared_reads(coactivation, shards))
    mine = shared_reads(coactivation, stripe(1, 8, 2, known)[0])
    assert mine <= min(costs) + 0.1 * (max(costs) - min(costs))


def test_hot_experts_come_first_and_the_order_is_repeatable() -> None:
    known = Routing(torch.zeros(1, 4, 4, dtype=torch.int64), torch.tensor([[5, 9, 5, 0]]), {})
    assert read_order(0, 4, known) == [1, 0, 2, 3]
    assert read_order(0, 4, None) == [0, 1, 2, 3]
    again = routing(2, 16)
    assert stripe(2, 16, 4, again) == stripe(2, 16, 4, again)
