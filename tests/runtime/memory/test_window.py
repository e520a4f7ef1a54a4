from __future__ import annotations

import random
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.memory.eviction import make_policy
from runtime.memory.location import ExpertKey
from runtime.memory.schedule import schedule
from runtime.memory.window import Step, Window

A, B, C, D = (0, 1), (0, 2), (1, 1), (1, 2)
KEYS = [(layer, expert) for layer in range(2) for expert in range(4)]

rows = st.lists(st.sampled_from(KEYS), max_size=5).map(lambda row: sorted(row, key=lambda key: key[0]))


def test_next_use_is_the_first_position() -> None:
    window = Window()
    window.announce([[A, C], [B, C], [A, D]], None, 1)
    assert window.next_use == {A: 0, C: 1, B: 2, D: 5}
    assert window.fetch_steps == [Step(0, [A, C], 2), Step(2, (B, C), 4), Step(4, (A, D), 6)]
    assert [window.use_from(key, 2) for key in (A, C, B, D)] == [4, 3, 2, 5]
    assert [window.use_from(key, 4) for key in (A, C, B, D)] == [4, None, None, 5]


def test_use_in_the_pass_moves_the_next_use_behind_it() -> None:
    window = Window()
    window.announce([[A, C], [B, C], [A, D]], None, 1)
    for key in (A, C):
        window.consume(key)
        window.consume(key)
    assert window.next_use == {A: 4, C: 3, B: 2, D: 5}
    window.consume(B)  # used out of turn: it is still needed by row 1
    assert window.next_use[B] == 2
    window.consume((9, 9))


def test_rows_of_one_pass_are_one_step_in_layer_order() -> None:
    window = Window()
    window.announce([[A, C], [B, C], [C, D]], None, 2)
    assert window.next_use == {A: 0, B: 1, C: 2, D: 5}
    assert window.fetch_steps == [Step(0, [A, B, C], 4), Step(4, (C, D), 6)]
    for key in (A, B, C):
        window.consume(key)
    assert window.next_use == {C: 4, D: 5}


def test_fetch_rows_bounds_what_is_wanted_and_not_what_is_seen() -> None:
    window = Window()
    wanted = {}
    for fetch_rows in (None, 0, 1, 2, 3, 9):
        window.announce([[A], [B], [D]], fetch_rows, 2)
        wanted[fetch_rows] = (window.fetch, [key for step in window.fetch_steps for key in step.keys])
        assert set(window.next_use) == {A, B, D}
    every = ({A, B, D}, [A, B, D])
    assert wanted == {None: every, 0: (set(), []), 1: ({A}, [A, B]), 2: ({A, B}, [A, B]), 3: every, 9: every}


def test_doubles_and_empty_rows_and_a_new_announcement() -> None:
    window = Window()
    window.announce([[A, A], [], [A, B]], None, 1)
    assert [list(step.keys) for step in window.fetch_steps] == [[A], [], [A, B]]
    window.announce([], None, 1)
    assert not window.next_use and not window.fetch_steps


@given(st.lists(rows, min_size=1, max_size=12), st.data())
@settings(max_examples=200, deadline=None)
def test_a_window_that_moves_on_plans_as_one_made_anew(trace: list[list[ExpertKey]], data: st.DataObject) -> None:
    moved, start, end = Window(), 0, 0
    residents = data.draw(st.lists(st.sampled_from(KEYS), unique=True, max_size=5))
    for _ in range(data.draw(st.integers(1, 8))):
        start = min(start + data.draw(st.sampled_from((0, 0, 0, 1, 2, 9))), len(trace))
        end = min(max(start, end) + data.draw(st.integers(0, 2)), len(trace))
        told = trace[start:end]
        if data.draw(st.integers(0, 5)) == 0:  # the target chose another way
            told = data.draw(st.lists(rows, max_size=3))
        fetch_rows = data.draw(st.sampled_from((None, 0, 1, 2, 3)))
        pass_rows = data.draw(st.sampled_from((1, 1, 2, 3)))
        anew = Window()
        for window in (moved, anew):
            window.announce(told, fetch_rows, pass_rows)
        plans = [
            [(fetch.key, fetch.victim) for fetch in schedule(window, residents, (), 0, make_policy("lookahead"))]
            for window in (moved, anew)
        ]
        assert plans[0] == plans[1]
        assert moved.fetch == anew.fetch
        for _ in range(2):
            order = [sorted(window.next_use, key=window.next_use.__getitem__) for window in (moved, anew)]
            assert order[0] == order[1]
            for key in data.draw(st.lists(st.sampled_from(KEYS), max_size=4)):
                moved.consume(key)
                anew.consume(key)


def test_a_row_more_costs_a_row_and_not_the_window() -> None:
    rng, num_layers, top_k = random.Random(3), 48, 8
    tail = [[(layer, e) for layer in range(num_layers) for e in rng.sample(range(128), top_k)] for _ in range(16)]
    window, whole_s, more_s = Window(), [], []
    for _ in range(10):
        window.announce([], 2, 1)
        started = time.perf_counter()
        window.announce(tail[:15], 2, 1)
        half = time.perf_counter()
        window.announce(tail, 2, 1)
        more_s.append(time.perf_counter() - half)
        whole_s.append(half - started)
    assert min(more_s) < 0.4 * min(whole_s)  # 0.1 on a quiet machine
