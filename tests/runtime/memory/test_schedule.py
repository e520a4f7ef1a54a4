from __future__ import annotations

from collections.abc import Container, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.memory.clairvoyant import replay
from runtime.memory.eviction import POLICIES, EvictionPolicy, LookaheadPolicy, make_policy
from runtime.memory.location import ExpertKey
from runtime.memory.schedule import Fetch, schedule
from runtime.memory.window import Window

A, B, C, D, E = ((0, expert) for expert in range(5))


def fetches(
    rows: Sequence[Sequence[ExpertKey]],
    residents: Sequence[ExpertKey],
    num_free: int = 0,
    fetch_rows: int | None = None,
    pass_rows: int = 1,
) -> list[Fetch]:
    window = Window()
    window.announce(rows, fetch_rows, pass_rows)
    return schedule(window, residents[:-1], residents[-1:], num_free, make_policy("lookahead"))


def test_free_slots_come_first_then_what_the_window_does_not_need_least_recent_first() -> None:
    assert fetches([[A, B, C]], [D, E], num_free=1) == [Fetch(A, 0, None), Fetch(B, 1, D), Fetch(C, 2, E)]


def test_the_furthest_next_use_gives_way() -> None:
    assert fetches([[C], [A], [B]], [A, B])[0] == Fetch(C, 0, B)


def test_an_expert_of_an_earlier_row_gives_way_after_its_last_use() -> None:
    assert fetches([[A], [B], [C], [B]], [A, B]) == [Fetch(C, 2, A)]


def test_nothing_gives_way_to_its_own_row() -> None:
    assert fetches([[A, B]], [B])[:1] != [Fetch(A, 0, B)]
    assert fetches([[A], [B]], [B])[:1] == [Fetch(A, 0, B)]
    assert fetches([[A], [B]], [B], pass_rows=2)[:1] != [Fetch(A, 0, B)]


def test_only_the_first_rows_are_fetched() -> None:
    assert [fetch.key for fetch in fetches([[A], [B], [C]], [], num_free=3, fetch_rows=2)] == [A, B]
    assert fetches([[A], [B]], [], num_free=3, fetch_rows=0) == []


def test_without_any_slot_there_is_nothing_to_fetch() -> None:
    assert fetches([[A], [B]], []) == []


@given(
    st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=3, unique=True), max_size=10),
    st.lists(st.integers(0, 6), unique=True, min_size=1, max_size=5),
)
@settings(max_examples=100, deadline=None)
def test_fetching_ahead_reads_no_more_than_looking_ahead(rows: list[list[int]], start: list[int]) -> None:
    trace = [[(0, expert) for expert in row] for row in rows]
    residents = [(0, expert) for expert in start]
    alone = [[key] for row in trace for key in row]
    found = replay(alone, len(residents), make_policy("lookahead"), resident=residents, window=len(alone))
    assert len(fetches(trace, residents)) <= found.misses


@given(
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True), max_size=8),
    st.lists(st.integers(0, 14), unique=True, min_size=1, max_size=9),
    st.integers(1, 4),
)
@settings(max_examples=100, deadline=None)
def test_a_play_that_ends_early_has_the_first_of_all_fetches(
    rows: list[list[int]], start: list[int], most: int
) -> None:
    trace, residents = [[(0, expert) for expert in row] for row in rows], [(0, expert) for expert in start]
    window = Window()
    window.announce(trace, None, 1)
    everything = schedule(window, residents, (), 0, Played())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("runtime.memory.schedule.MOST_FETCHES", most)
        assert schedule(window, residents, (), 0, Played()) == everything[:most]


class Played(LookaheadPolicy):
    takes_first = False


@given(
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True), max_size=8),
    st.lists(st.integers(0, 14), unique=True, max_size=9),
    st.integers(0, 4),
    st.sampled_from([None, 0, 2]),
    st.integers(1, 3),
)
@settings(max_examples=300, deadline=None)
def test_what_needs_no_play_comes_out_as_if_played(
    rows: list[list[int]], start: list[int], num_free: int, fetch_rows: int | None, pass_rows: int
) -> None:
    window, residents = Window(), [(0, expert) for expert in start]
    window.announce([[(0, expert) for expert in row] for row in rows], fetch_rows, pass_rows)
    found = [schedule(window, residents, (), num_free, policy) for policy in (LookaheadPolicy(), Played())]
    assert found[0] == found[1]


def plainly(
    window: Window,
    residents: Sequence[ExpertKey],
    num_free: int,
    policy: EvictionPolicy,
    elsewhere: Container[ExpertKey],
) -> list[Fetch]:
    """The play, each victim looked for among all."""
    there = [key for key in residents if key not in elsewhere]
    present, next_use = set(there), {key: window.next_use[key] for key in there if key in window.next_use}
    idle = [key for key in there if key not in next_use]
    found: list[Fetch] = []
    missed: set[ExpertKey] = set()
    for start, keys, end in window.fetch_steps:
        for position, key in enumerate(keys, start):
            if key in elsewhere:
                continue
            if key not in present:
                victim, needed = None, end
                if num_free:
                    num_free -= 1
                elif idle:
                    victim = policy.victim(idle, {})
                    assert victim is not None
                    idle.remove(victim)
                elif next_use:
                    victim = max(next_use, key=lambda other: next_use[other])
                    needed = next_use.pop(victim)
                else:
                    return found
                present -= {victim}
                present.add(key)
                if key not in missed and key in window.fetch and needed >= end:
                    found.append(Fetch(key, position, victim))
                missed.add(key)
            next_use.pop(key, None)
            later = window.use_from(key, end)
            if later is not None:
                next_use[key] = later
            elif key not in idle:
                idle.append(key)
    return found


@pytest.mark.parametrize("name", POLICIES)
@given(
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True), max_size=8),
    st.lists(st.integers(0, 14), unique=True, max_size=9),
    st.integers(0, 4),
    st.sampled_from([None, 0, 2, 5]),
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(0, 14), st.integers(1, 3), st.floats(0, 1, allow_subnormal=False)), max_size=30),
    st.sets(st.integers(0, 14), max_size=4),
)
@settings(max_examples=150, deadline=None)
def test_victims_are_those_of_the_plain_play(
    name: str,
    rows: list[list[int]],
    start: list[int],
    num_free: int,
    fetch_rows: int | None,
    pass_rows: int,
    past: list[tuple[int, int, float]],
    elsewhere: set[int],
) -> None:
    policy, window, residents = make_policy(name), Window(), [(0, expert) for expert in start]
    for expert, size, seconds in past:
        policy.used((0, expert))
        policy.loaded((0, expert), size, seconds)
    window.announce([[(0, expert) for expert in row] for row in rows], fetch_rows, pass_rows)
    beside = {(0, expert) for expert in elsewhere}
    wanted = plainly(window, residents, num_free, policy, beside)
    assert schedule(window, residents, (), num_free, policy, beside) == wanted
