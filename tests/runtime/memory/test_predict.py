from __future__ import annotations

import pytest

from runtime.errors import InputError
from runtime.memory.predict import PREDICTORS, make_predictor

ROW, NEXT = [(0, 1), (1, 2)], [(0, 3), (1, 2)]


def test_history_repeats_the_last_row() -> None:
    predictor = make_predictor("history")
    assert predictor.upcoming([NEXT]) == []
    predictor.observe(NEXT)
    predictor.observe(ROW)
    assert predictor.upcoming([NEXT, NEXT]) == [ROW]


@pytest.mark.parametrize("name", ["draft", "none"])
def test_the_draft_s_routing_is_announced_whether_it_is_fetched_or_not(name: str) -> None:
    predictor = make_predictor(name)
    predictor.observe(ROW)
    assert predictor.upcoming([NEXT, ROW]) == [NEXT, ROW]


def test_unknown_predictor_is_refused_with_the_names() -> None:
    for name in PREDICTORS:
        make_predictor(name)
    with pytest.raises(InputError, match=r"history.*'oracle'"):
        make_predictor("oracle")
