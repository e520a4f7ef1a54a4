"""How many proposals each governor takes."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.decode.governor import GOVERNORS, Measured, Situation, make_governor
from runtime.errors import InputError


def situation(
    most: int, bytes_by_j: list[int] | None = None, link: float = 0.0, measured: Measured | None = None
) -> Situation:
    return Situation(most, lambda j: bytes_by_j[j] if bytes_by_j else 0, link, measured or Measured())


def timed(row_s: float, draft_s: float, *accepted: int, tried: int = 8) -> Measured:
    measured = Measured()
    measured.computed(1, row_s)
    measured.drafted(draft_s)
    for count in accepted:
        measured.judged(tried, count)
    return measured


def test_fixed_takes_its_window_or_what_there_is() -> None:
    governor = make_governor("fixed", 3)
    assert [governor.choose(situation(most)) for most in (0, 2, 3, 9)] == [0, 2, 3, 3]


def test_threshold_moves_by_one_with_the_mean_of_the_last_ten_rates() -> None:
    governor = make_governor("threshold", 4)
    chosen = []
    for accepted in (1.0, 1.0, 1.0, 1.0):
        chosen.append(governor.choose(situation(9)))
        governor.observe(10, int(10 * accepted))
    assert chosen == [1, 2, 3, 4]
    governor.observe(10, 10)
    assert governor.choose(situation(9)) == 4, "never above the window"
    for expected in (3, 2, 1, 1):  # the mean falls under 0.9 at once: 5 of 6, 5 of 7, ...
        governor.observe(10, 0)
        assert governor.choose(situation(9)) == expected
    for _ in range(9):
        governor.observe(10, 10)
    assert governor.choose(situation(9)) == 1, "the last of the wrong ones still counts: a mean of exactly 0.9"
    governor.observe(10, 10)
    assert governor.choose(situation(9)) == 2


def test_threshold_learns_nothing_from_a_round_without_proposals() -> None:
    governor = make_governor("threshold", 4)
    governor.observe(0, 0)
    assert governor.choose(situation(9)) == 1


def test_roofline_takes_all_when_rows_cost_nothing_more() -> None:
    """The link is the limit and the further rows need no further expert."""
    governor = make_governor("roofline", 4)
    assert governor.choose(situation(8, [100] * 9, 1.0, timed(1e-3, 1e-3, 8, 8))) == 4


def test_roofline_takes_none_when_each_row_costs_as_much_as_the_first() -> None:
    """Tokens a second fall with every row that may be wrong."""
    governor = make_governor("roofline", 4)
    assert governor.choose(situation(8, [100 * (j + 1) for j in range(9)], 1.0, timed(1e-3, 1e-3, 4, 4))) == 0
    assert governor.choose(situation(8, None, 0.0, timed(1.0, 0.0, 2, 2, 2))) == 0


def test_roofline_stops_where_the_next_row_is_dear() -> None:
    governor = make_governor("roofline", 8)
    assert governor.choose(situation(8, [100, 110, 120, 1000, 1010, 1020, 1030, 1040, 1050], 1.0)) == 2
    assert governor.choose(situation(1, [100, 100], 1.0)) == 1


def test_roofline_takes_fewer_rows_where_each_makes_a_pass_dearer() -> None:
    """The same bytes and the same steps, by what passes of different rows took."""

    def chosen(row_s: float) -> int:
        measured = Measured(rows_at_once=8)
        for rows in (1, 8) * 20:
            measured.computed(rows, 2.0 + row_s * rows)
        for _ in range(20):
            measured.judged(8, 4)
        return make_governor("roofline", 7).choose(situation(7, measured=measured))

    numbers = [chosen(row_s) for row_s in (0.0, 0.2, 1.0, 5.0)]
    assert numbers == sorted(numbers, reverse=True)
    assert numbers[0] > numbers[-1] + 1


def test_steps_hide_half_of_what_is_missing() -> None:
    """A proposal needs steps of 1 s and bytes; the row before it alone takes 2 s of pass and a step, of 3 in all."""
    measured = Measured(rows_at_once=8)
    measured.computed(8, 2.0)
    measured.drafted(1.0)
    for _ in range(200):
        measured.judged(1, 1)  # so a proposal is a token: worth another 3 s, a step of its own among them

    def chosen(num_bytes: int) -> int:
        return make_governor("roofline", 1).choose(situation(1, [0, num_bytes], 1.0, measured))

    assert [chosen(num_bytes) for num_bytes in (0, 4, 6)] == [1, 1, 0]


def test_roofline_looks_at_no_more_rows_than_may_pay() -> None:
    """Once the bytes of a row take longer than all tokens are worth, no further row is looked at."""
    seen: list[int] = []

    def bytes_of(j: int) -> int:
        seen.append(j)
        return (0, 0, 30, 600, 1200, 1800, 2400, 3000)[j]

    measured = Measured(rows_at_once=8)
    measured.computed(1, 50.0)
    assert make_governor("roofline", 7).choose(Situation(7, bytes_of, 1.0, measured)) == 2
    assert seen == [0, 1, 2, 3]


@settings(max_examples=200, deadline=None)
@given(
    added=st.lists(st.integers(0, 60), min_size=9, max_size=9),
    accepted=st.lists(st.integers(0, 8), max_size=40),
    row_s=st.sampled_from([0.0, 1.0, 9.0, 40.0]),
    draft_s=st.sampled_from([0.0, 1.0, 9.0]),
    rows_at_once=st.sampled_from([1, 8]),
)
def test_roofline_finds_the_best_without_looking_at_all(
    added: list[int], accepted: list[int], row_s: float, draft_s: float, rows_at_once: int
) -> None:
    measured = Measured(rows_at_once)
    measured.computed(1, row_s)
    measured.drafted(draft_s)
    for count in accepted:
        measured.judged(8, count)
    bytes_by_j = list(itertools.accumulate(added))

    def rate(j: int) -> float:
        expected = sum(math.prod(measured.acceptance(place) for place in range(row)) for row in range(j + 1))
        link_s, pass_s, steps_s = bytes_by_j[j], measured.pass_s(j + 1), expected * draft_s
        return expected / max((max(link_s, pass_s + steps_s) + max(link_s, pass_s) + steps_s) / 2, 1e-9)

    chosen = make_governor("roofline", 8).choose(situation(8, bytes_by_j, 1.0, measured))
    assert rate(chosen) == pytest.approx(max(rate(j) for j in range(9)))


def test_a_draft_step_stands_for_a_pass_before_the_first_one() -> None:
    """A pass that seemed to cost nothing would take no proposal where none brings bytes."""
    measured = Measured(rows_at_once=8)
    measured.drafted(2.0)
    assert measured.pass_s(1) == measured.pass_s(8) == 2.0
    assert make_governor("roofline", 7).choose(situation(7, [0] * 8, 1.0, measured)) == 7
    measured.computed(8, 5.0)
    assert measured.pass_s(8) == 5.0


def test_acceptance_is_learnt_by_place() -> None:
    measured = Measured()
    assert measured.acceptance(3) == pytest.approx(0.9)
    for _ in range(100):
        measured.judged(3, 1)
    assert measured.acceptance(0) > 0.99
    assert measured.acceptance(1) < 0.01
    assert measured.acceptance(2) == pytest.approx(0.9), "never reached, nothing learnt"
    assert measured.acceptance(7) == measured.acceptance(2)


def test_unknown_names_and_negative_windows_are_refused() -> None:
    with pytest.raises(InputError, match="fixed, threshold, roofline"):
        make_governor("best", 1)
    for name in GOVERNORS:
        assert make_governor(name, 0).name == name
        with pytest.raises(InputError, match="verify-window"):
            make_governor(name, -1)


def test_roofline_recovers_after_a_bad_stretch() -> None:
    """At j = 0 the target's own next token still meets a proposal, and that is learnt from."""
    measured = timed(0.001, 0.001)
    governor = make_governor("roofline", 4)

    def choose() -> int:  # fetching costs the same for all rows: more right proposals a round pay
        return governor.choose(Situation(8, lambda j: 10**9, 1e9, measured))

    for _ in range(60):
        measured.judged(1, 0)
    bad = choose()
    for _ in range(60):
        measured.judged(max(choose(), 1), max(choose(), 1))
    assert choose() == 4 > bad


def test_rows_beyond_those_computed_at_once_cost_another_pass() -> None:
    """Seven proposals and the row before them fill a pass of eight; one proposal more costs as much again."""
    measured = Measured(rows_at_once=8)
    measured.computed(3, 1.0)
    assert [measured.pass_s(rows) for rows in (1, 8, 9, 16, 17)] == [1, 1, 2, 2, 3]
    for _ in range(50):
        measured.judged(12, 12)
    assert make_governor("roofline", 12).choose(situation(12, measured=measured)) == 7
    measured.computed(16, 2.0)
    assert measured.pass_s(8) == pytest.approx(1.0)


def test_drafts_what_pays_where_nothing_is_missing() -> None:
    """A step as dear as a row of the target never pays; a cheap one does, as far as proposals are right."""
    governor = make_governor("roofline", 4)
    assert governor.depth(timed(1e-3, 1e-3, 8, 8)) == 0
    right = Measured(rows_at_once=8)
    right.computed(1, 1e-3)
    right.drafted(1e-4)
    for _ in range(40):
        right.judged(8, 8)
    assert governor.depth(right) == 4
    for _ in range(60):
        right.judged(8, 0)
    assert governor.depth(right) == 0
    for _ in range(300):
        right.idle()
    assert governor.depth(right) > 0, "tried again after a while"
    assert governor.depth(Measured()) == 4
    assert make_governor("fixed", 3).depth(Measured()) == 3
    assert make_governor("threshold", 3).depth(Measured()) == 1
