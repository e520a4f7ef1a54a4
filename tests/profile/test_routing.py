"""Counting choices: hand-made cases and properties against a plain loop."""

from __future__ import annotations

import itertools
import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moespeq_cli.profile.charts import percent
from moespeq_cli.profile.routing import AgreementTally, RoutingTally, RoutingTrace, mean_or_none, reuse_edges

NUM_EXPERTS, TOP_K = 5, 2


@st.composite
def routings(draw: st.DrawFn) -> list[torch.Tensor]:
    """A few sequences of choices, int64 [T, k] without an expert twice in a row."""
    pairs = st.permutations(range(NUM_EXPERTS)).map(lambda order: list(order[:TOP_K]))
    sequences = draw(st.lists(st.lists(pairs, min_size=1, max_size=40), min_size=1, max_size=4))
    return [torch.tensor(sequence) for sequence in sequences]


def tally_of(sequences: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    tally = RoutingTally(1, 1, NUM_EXPERTS, max(map(len, sequences)))
    for sequence in sequences:
        tally.add(0, 0, sequence)
    return tally.tensors()


def test_counts_ten_known_tokens() -> None:
    """H18: every figure of ten tokens, worked out by hand."""
    routing = [[0, 1], [1, 0], [2, 0], [2, 3], [0, 3], [1, 2], [0, 1], [0, 1], [3, 2], [0, 3]]
    tensors = tally_of([torch.tensor(routing)])
    assert tensors["counts"].tolist() == [[[7, 5, 4, 4, 0]]]
    assert int(tensors["counts"].sum()) == 10 * TOP_K
    assert tensors["coactivation"][0, 0].tolist() == [7, 4, 1, 2, 0]
    # distances: expert 0: 1 1 2 2 1 2, expert 1: 1 4 1 1, expert 2: 1 2 3, expert 3: 1 4 1
    assert tensors["reuse_histogram"].tolist() == [[[9, 5, 2, 0]]]
    assert tensors["first_uses"].tolist() == [[4]]
    assert tensors["reuse_mean"].tolist() == [[28 / 16]]
    assert tensors["kept_from_previous"].tolist() == [[9 / 18]]


@settings(max_examples=60, deadline=None)
@given(routings())
def test_sums_agree_with_each_other_and_with_a_plain_loop(sequences: list[torch.Tensor]) -> None:
    tensors = tally_of(sequences)
    counts, together = tensors["counts"][0, 0], tensors["coactivation"][0]
    assert torch.equal(together, together.T)
    assert torch.equal(together.diagonal(), counts)
    assert int(counts.sum()) == TOP_K * sum(map(len, sequences))
    assert int(together.sum()) == TOP_K * TOP_K * sum(map(len, sequences))
    assert int(tensors["reuse_histogram"].sum() + tensors["first_uses"].sum()) == int(counts.sum())
    distances = []
    for sequence in sequences:
        last: dict[int, int] = {}
        for token, chosen in enumerate(sequence.tolist()):
            distances += [token - last[expert] for expert in chosen if expert in last]
            last.update(dict.fromkeys(chosen, token))
    edges = reuse_edges(max(map(len, sequences)))
    expected = [sum(low <= d < high for d in distances) for low, high in itertools.pairwise(edges)]
    assert tensors["reuse_histogram"][0, 0].tolist() == expected
    pairs = TOP_K * sum(len(sequence) - 1 for sequence in sequences)
    kept = float(tensors["kept_from_previous"][0, 0])
    assert kept == distances.count(1) / pairs if pairs else math.isnan(kept)


def test_a_sequence_of_one_token_has_nothing_to_keep() -> None:
    tensors = tally_of([torch.tensor([[0, 4]])])
    assert tensors["first_uses"].tolist() == [[2]]
    assert math.isnan(float(tensors["kept_from_previous"])) and math.isnan(float(tensors["reuse_mean"]))
    assert percent(float(tensors["kept_from_previous"])) == "n/a"


def test_edges_hold_every_distance() -> None:
    for longest in range(1, 70):
        edges = reuse_edges(longest)
        assert edges[0] == 1 and edges[-1] > longest - 1
        assert all(high == 2 * low for low, high in itertools.pairwise(edges))


def test_agreement_is_one_of_equal_and_zero_of_opposite_choices() -> None:
    """H18; the order in the top k does not matter."""
    tally = AgreementTally(3, 1, 4)
    target = torch.tensor([[0, 1], [1, 2]])
    tally.add(0, 0, target, target.flip(1))
    tally.add(1, 0, target, torch.tensor([[2, 3], [3, 0]]))
    shares = tally.shares()
    assert shares[:2, 0].tolist() == [1.0, 0.0]
    assert math.isnan(float(shares[2, 0]))


def test_nothing_compared_is_not_zero() -> None:
    """H18: zero drafted tokens print n/a."""
    assert mean_or_none([math.nan, math.nan]) is None
    assert percent(None) == percent(math.nan) == "n/a"
    assert percent(0.0) == "0.0 %"


def test_trace_keeps_whole_tokens_up_to_its_limit() -> None:
    trace = RoutingTrace([3, 4, 5], num_layers=2, top_k=2, max_tokens=5)
    for sequence, length in enumerate((3, 4, 5)):
        trace.add(sequence, 1, torch.full((length, 2), sequence + 1))
    assert trace.tokens == 5 and trace.starts.tolist() == [0, 3]
    assert trace.rows[:, 1, 0].tolist() == [1, 1, 1, 2, 2]
    assert RoutingTrace([3], 2, 2, 0).starts.tolist() == []
