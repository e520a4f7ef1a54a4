from __future__ import annotations

import pytest

from runtime.errors import InputError
from runtime.memory.predict import PREDICTORS, make_predictor

ROW, NEXT = [(0, 1), (1, 2)], [(0, 3), (1, 2)]


def test_none_announces_nothing() -> None:
    predictor = make_predictor("none")
    predictor.observe(ROW)
    assert predictor.upcoming([NEXT]) == []


def test_history_repeats_the_last_row() -> None:
    predictor = make_predictor("history")
    assert predictor.upcoming([NEXT]) == []
    predictor.observe(NEXT)
    predictor.observe(ROW)
    assert predictor.upcoming([NEXT, NEXT]) == [ROW]


def test_draft_announces_its_own_routing() -> None:
    predictor = make_predictor("draft")
    predictor.observe(ROW)
    assert predictor.upcoming([NEXT, ROW]) == [NEXT, ROW]


def test_unknown_predictor_is_refused_with_the_names() -> None:
    assert [make_predictor(name).name for name in PREDICTORS] == list(PREDICTORS)
    with pytest.raises(InputError, match=r"history.*'oracle'"):
        make_predictor("oracle")
