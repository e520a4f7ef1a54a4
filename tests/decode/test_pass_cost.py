"""What passes are expected to take, learnt from those that were."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.decode.pass_cost import PassCost

ROWS = range(1, 9)


def learnt(passes: list[tuple[int, float]], rows_at_once: int = 8) -> PassCost:
    cost = PassCost(rows_at_once)
    for rows, seconds in passes:
        cost.computed(rows, seconds)
    return cost


def test_nothing_is_expected_before_the_first_pass() -> None:
    assert [PassCost(8).seconds(rows) for rows in (1, 8, 9)] == [0, 0, 0]


@settings(max_examples=200, deadline=None)
@given(
    passes=st.lists(st.tuples(st.integers(1, 20), st.floats(-1.0, 100.0)), min_size=1, max_size=60),
    rows_at_once=st.sampled_from([1, 4, 8]),
)
def test_more_rows_never_cost_less_and_none_less_than_nothing(
    passes: list[tuple[int, float]], rows_at_once: int
) -> None:
    cost = learnt(passes, rows_at_once)
    expected = [cost.seconds(rows) for rows in range(1, 25)]
    assert all(0 <= seconds < math.inf for seconds in expected)
    assert all(less <= more * (1 + 1e-9) for less, more in itertools.pairwise(expected))


@settings(max_examples=100, deadline=None)
@given(
    constant_s=st.floats(1e-3, 10.0),
    share=st.floats(0.0, 0.5),
    rows=st.lists(st.integers(1, 8), min_size=60, max_size=60).filter(lambda rows: len(set(rows[-30:])) > 3),
)
def test_a_constant_and_a_price_are_found(constant_s: float, share: float, rows: list[int]) -> None:
    cost = learnt([(count, constant_s * (1 + share * count)) for count in rows])
    for count in ROWS:
        assert cost.seconds(count) == pytest.approx(constant_s * (1 + share * count), rel=0.25)


def test_two_numbers_of_rows_tell_the_others() -> None:
    draw = random.Random(0)
    cost = learnt([(rows, (3 + 0.3 * rows) * draw.uniform(0.95, 1.05)) for rows in (3, 6) * 20])
    assert [cost.seconds(rows) for rows in (1, 8)] == pytest.approx([3.3, 5.4], rel=0.1)


def test_passes_of_always_as_many_rows_say_nothing_about_others() -> None:
    """So a row costs nothing more at first; what was learnt before is not forgotten."""
    assert {learnt([(5, 4.0)] * 30).seconds(rows) for rows in ROWS} == {4.0}
    cost = learnt([(rows, 2.0 + rows) for rows in (1, 8) * 30] + [(8, 10.0)] * 500)
    assert cost.seconds(1) == pytest.approx(3.0, rel=0.05)


@pytest.mark.parametrize("rows", ROWS)
def test_a_pass_that_was_held_up_hardly_counts(rows: int) -> None:
    known = [(rows, 2.0 + 0.5 * rows) for rows in (2, 6) * 20]
    before, after = learnt(known), learnt([*known, (rows, 1000.0)])
    for count in ROWS:
        assert before.seconds(count) * 0.6 <= after.seconds(count) <= before.seconds(count) * 1.5


def test_a_first_pass_that_was_held_up_is_made_up_for() -> None:
    cost = learnt([(8, 40.0), *[(rows, 2.0 + 0.3 * rows) for rows in (4, 8, 6, 2) * 10]])
    for count in ROWS:
        assert cost.seconds(count) == pytest.approx(2.0 + 0.3 * count, rel=0.3)


@pytest.mark.parametrize("factor", [0.2, 5.0])
def test_another_speed_is_learnt(factor: float) -> None:
    passes = [(rows, 2.0 + 0.3 * rows) for rows in (4, 8, 6, 2) * 20]
    cost = learnt([*passes, *[(rows, factor * seconds) for rows, seconds in passes]])
    for count in ROWS:
        assert cost.seconds(count) == pytest.approx(factor * (2.0 + 0.3 * count), rel=0.15)


def test_a_pass_in_parts_costs_their_sum() -> None:
    cost = learnt([(rows, 2.0 + 0.25 * rows) for rows in (2, 8) * 40])
    assert cost.seconds(16) == pytest.approx(2 * cost.seconds(8))
    assert cost.seconds(12) == pytest.approx(2 * cost.seconds(6))
    assert cost.seconds(9) > cost.seconds(8) + 1.0, "another constant"
    one_by_one = learnt([(3, 6.0), (5, 10.0)], rows_at_once=1)
    assert [one_by_one.seconds(rows) for rows in (1, 2, 7)] == pytest.approx([2.0, 4.0, 14.0])
    together = learnt([(16, 8.0), (8, 4.0)])
    assert together.seconds(8) == pytest.approx(4.0)
