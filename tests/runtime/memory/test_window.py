from __future__ import annotations

from runtime.memory.window import Window

A, B, C, D = (0, 1), (0, 2), (1, 1), (1, 2)


def test_next_use_is_the_first_position() -> None:
    window = Window()
    window.announce([[A, C], [B, C], [A, D]], None, 1)
    assert window.next_use == {A: 0, C: 1, B: 2, D: 5}
    assert window.order == [A, C, B, C, A, D] and window.step_ends == [2, 4, 6]
    assert window.later == [4, 3, None, None, None, None] and window.fetch_end == 6


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
    assert window.next_use == {A: 0, B: 1, C: 2, D: 4}
    assert window.order == [A, B, C, C, D] and window.step_ends == [3, 5]
    assert window.later == [None, None, 3, None, None]
    for key in (A, B, C):
        window.consume(key)
    assert window.next_use == {C: 3, D: 4}


def test_fetch_rows_bounds_what_is_wanted_and_not_what_is_seen() -> None:
    window = Window()
    rows = [[A], [B], [D]]
    wanted = {}
    for fetch_rows in (None, 0, 1, 2, 3, 9):
        window.announce(rows, fetch_rows, 2)
        wanted[fetch_rows] = (window.fetch, window.fetch_end)
        assert set(window.next_use) == {A, B, D}
    every = {A, B, D}
    assert wanted == {None: (every, 3), 0: (set(), 0), 1: ({A}, 2), 2: ({A, B}, 2), 3: (every, 3), 9: (every, 3)}


def test_doubles_and_empty_rows_and_a_new_announcement() -> None:
    window = Window()
    window.announce([[A, A], [], [A, B]], None, 1)
    assert window.order == [A, A, B] and window.step_ends == [1, 1, 3]
    window.announce([], None, 1)
    assert not window.next_use and window.fetch_end == 0
