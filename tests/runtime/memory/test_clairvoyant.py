from __future__ import annotations

from functools import cache
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.errors import InputError
from runtime.memory.clairvoyant import belady, replay
from runtime.memory.eviction import POLICIES, make_policy
from runtime.memory.location import ExpertKey

Trace = list[list[ExpertKey]]
A, B, C = (0, 0), (0, 1), (0, 2)


def traces(num_experts: int, demands: int, largest: int) -> st.SearchStrategy[Trace]:
    keys = st.tuples(st.just(0), st.integers(0, num_experts - 1))
    return st.lists(st.lists(keys, max_size=largest), max_size=demands)


def misses(name: str, trace: Trace, num_slots: int, heat: dict[ExpertKey, float] | None = None) -> int:
    return replay(trace, num_slots, make_policy(name, heat=heat)).misses


def fewest(trace: Trace, num_slots: int, resident: list[ExpertKey]) -> int:
    """The cheapest of all ways to serve the trace, by search: after each demand any set may stay that slots allow."""

    @cache
    def cost(index: int, cached: frozenset[ExpertKey]) -> int:
        if index == len(trace):
            return 0
        missing = set(trace[index]) - cached
        pool = cached | missing
        kept = (frozenset(some) for count in range(num_slots + 1) for some in combinations(sorted(pool), count))
        return len(missing) + min(cost(index + 1, keep) for keep in kept if not missing or keep & missing)

    return cost(0, frozenset(resident))


@given(traces(5, 6, 3), st.integers(1, 4), st.lists(st.integers(0, 4), unique=True, max_size=4))
@settings(max_examples=80, deadline=None)
def test_belady_is_a_true_bound(trace: Trace, num_slots: int, start: list[int]) -> None:
    resident = [(0, expert) for expert in start][:num_slots]
    assert belady(trace, num_slots, resident) <= fewest(trace, num_slots, resident)


@given(traces(5, 9, 1), st.integers(1, 4), st.lists(st.integers(0, 4), unique=True, max_size=4))
@settings(max_examples=80, deadline=None)
def test_belady_is_exact_for_single_experts(trace: Trace, num_slots: int, start: list[int]) -> None:
    resident = [(0, expert) for expert in start][:num_slots]
    assert belady(trace, num_slots, resident) == fewest(trace, num_slots, resident)


@given(traces(10, 40, 5), st.integers(1, 8), st.sampled_from(POLICIES), st.integers(0, 12))
@settings(max_examples=150, deadline=None)
def test_no_policy_beats_belady(trace: Trace, num_slots: int, name: str, window: int) -> None:
    bound = belady(trace, num_slots)
    found = replay(trace, num_slots, make_policy(name), record_bytes=lambda key: 10, window=window)
    assert bound <= found.misses <= found.requests == sum(len(set(keys)) for keys in trace)
    assert found.read_bytes == 10 * found.misses


@given(st.lists(st.integers(0, 7), max_size=60), st.integers(1, 6))
@settings(max_examples=100, deadline=None)
def test_lookahead_over_the_whole_trace_is_belady(experts: list[int], num_slots: int) -> None:
    trace = [[(0, expert)] for expert in experts]
    found = replay(trace, num_slots, make_policy("lookahead"), window=len(trace))
    assert found.misses == belady(trace, num_slots)


def test_policies_by_hand() -> None:
    trace = [[A], [B], [A], [C], [A], [B]]
    assert (belady(trace, 2), misses("lru", trace, 2), misses("lfu", trace, 2)) == (4, 4, 4)
    assert misses("lru", [[A], [B], [C], [A], [B], [C]], 2) == 6
    assert belady([[A], [B], [C], [A], [B], [C]], 2) == 4
    assert misses("lfu", [[A], [A], [B], [C], [A]], 2) == 3
    assert misses("lru", [[A], [A], [B], [C], [A]], 2) == 4
    assert belady([[A, B], [A, B]], 2, [A, B]) == 0
    assert misses("priority", [[A], [B], [C], [A]], 2, heat={A: 1.0, B: 0.1, C: 0.2}) == 3
    assert belady([], 1) == 0 and replay([], 1, make_policy("lru")).hit_rate is None
    assert replay([[A], [A]], 1, make_policy("lru")).hit_rate == 0.5


@given(traces(8, 40, 4), st.integers(1, 6), st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_a_right_guess_is_as_good_as_the_trace_and_a_wrong_one_costs_reads_only(
    trace: Trace, num_slots: int, window: int
) -> None:
    known = replay(trace, num_slots, make_policy("lookahead"), window=window)
    same = replay(trace, num_slots, make_policy("lookahead"), window=window, foreseen=[list(keys) for keys in trace])
    assert same == known
    rows = replay(trace, num_slots, make_policy("lookahead"), window=window, row_demands=3)
    assert belady(trace, num_slots) <= rows.misses <= rows.requests == known.requests
    wrong = [[(0, 7 - expert) for _, expert in keys] for keys in trace]
    found = replay(trace, num_slots, make_policy("lookahead"), window=window, foreseen=wrong)
    assert belady(trace, num_slots) <= found.misses <= found.requests == known.requests


@pytest.mark.parametrize(("num_slots", "resident"), [(0, []), (1, [A, B])])
def test_refuses_what_no_cache_holds(num_slots: int, resident: list[ExpertKey]) -> None:
    with pytest.raises(InputError, match="slot"):
        belady([[A]], num_slots, resident)
    with pytest.raises(InputError, match="slot"):
        replay([[A]], num_slots, make_policy("lru"), resident=resident)
