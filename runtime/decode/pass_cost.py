"""What a pass of the target costs, by its rows."""

from __future__ import annotations

_NEWEST = 0.1  # least weight of the newest pass
_OUTLIER = 1.5  # a pass counts for no more than so many times what was expected of it
_SURE_AT_FIRST = 4.0  # how much it weighs that rows cost nothing more, before it was seen; squares of rows, as below
_MOST_SURE = 40.0  # what was seen of rows weighs no more, so that newer passes take the place of older ones


class PassCost:
    """A part's mean and a price a row, learnt from passes as they come; a pass of more rows than a part has several.

    The means of a part's seconds and rows follow the newest passes. The price, 0 at first, follows what passes of more
    or fewer rows than the mean took beside it; the further apart, the more a pass says. Passes of always as many rows
    leave it as it is. It is never negative, nor so high that a part without rows would take less than no time.

    A pass may take far longer than it should, if the host is held up, but not far shorter; so only what is longer is
    cut.

    Args:
        rows_at_once: rows of a part.
    """

    def __init__(self, rows_at_once: int) -> None:
        self._rows_at_once = rows_at_once
        self._passes = 0
        self._mean_s = 0.0
        self._mean_rows = 1.0
        self._row_s = 0.0
        self._sure = _SURE_AT_FIRST

    def computed(self, rows: int, seconds: float) -> None:
        """So many rows took so long, waiting for experts not counted."""
        parts = self.parts(rows)
        part_s, part_rows = max(seconds, 0.0) / parts, rows / parts
        if self._mean_s > 0:
            expected, apart = self._part_s(part_rows), part_rows - self._mean_rows
            part_s = min(part_s, _OUTLIER * expected)
            self._sure = min(self._sure + apart**2, _MOST_SURE)
            self._row_s += apart * (part_s - expected) / self._sure
        self._passes += 1
        weight = max(1 / self._passes, _NEWEST)
        self._mean_s += weight * (part_s - self._mean_s)
        self._mean_rows += weight * (part_rows - self._mean_rows)
        self._row_s = min(max(self._row_s, 0.0), self._mean_s / self._mean_rows)

    def seconds(self, rows: int) -> float:
        """What so many rows are expected to take; 0 before the first pass."""
        parts = self.parts(rows)
        return parts * self._part_s(rows / parts)

    def parts(self, rows: int) -> int:
        """Parts of a pass of so many rows."""
        return -(-rows // self._rows_at_once)

    def _part_s(self, rows: float) -> float:
        return max(self._mean_s + self._row_s * (rows - self._mean_rows), 0.0)
