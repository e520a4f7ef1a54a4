"""Which experts the coming rows will need, before their routing is computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from runtime.errors import InputError
from runtime.memory.location import ExpertKey

PREDICTORS = ("none", "history", "draft")


class Predictor(Protocol):
    """Turns what is known into the rows to announce to the cache."""

    def observe(self, row: Sequence[ExpertKey]) -> None:
        """The target has computed a row that was kept; its experts in layer order."""
        ...

    def upcoming(self, tail_rows: Sequence[Sequence[ExpertKey]]) -> list[list[ExpertKey]]:
        """Rows to announce, the next one to be computed first.

        Args:
            tail_rows: routing of the rows that the draft has computed and the target has not, in order.
        """
        ...


class HistoryPredictor:
    """Guesses that the next row uses the experts of the last one: neighbouring tokens share many."""

    def __init__(self) -> None:
        self._last: list[ExpertKey] = []

    def observe(self, row: Sequence[ExpertKey]) -> None:
        """Keep it in place of the row before."""
        self._last = list(row)

    def upcoming(self, tail_rows: Sequence[Sequence[ExpertKey]]) -> list[list[ExpertKey]]:
        """The last observed row; before the first one no rows."""
        return [list(self._last)] if self._last else []


class DraftPredictor:
    """Takes the draft's own routing of its rows."""

    def observe(self, row: Sequence[ExpertKey]) -> None:
        """Nothing is kept."""

    def upcoming(self, tail_rows: Sequence[Sequence[ExpertKey]]) -> list[list[ExpertKey]]:
        """The tail's rows."""
        return [list(row) for row in tail_rows]


def make_predictor(name: str) -> Predictor:
    """A new predictor of this name, one of PREDICTORS; InputError for any other.

    "none" says that nothing is to be fetched ahead. Eviction sees the draft's rows all the same, so it is the draft's
    predictor, for announcements with fetch_rows 0.
    """
    if name == "history":
        return HistoryPredictor()
    if name in ("draft", "none"):
        return DraftPredictor()
    raise InputError(
        expected=f"a predictor of {', '.join(PREDICTORS)}",
        found=repr(name),
        mend="pass one of these names (--prefetch)",
    )
