"""When each announced expert is needed next."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

from runtime.memory.location import ExpertKey

_layer_of = itemgetter(0)


class Step(NamedTuple):
    """Experts that are computed together: each is needed once, at `start` plus its place in `keys`."""

    start: int
    keys: Sequence[ExpertKey]
    end: int


class Window:
    """The announced rows as one order of uses.

    The rows of the coming pass are computed together, one layer after the other, so they count as one step; every
    later row is a step of its own. Positions grow from use to use. An announcement that goes on from the one before,
    first rows gone and new ones at the end, keeps them and costs by the rows that came and went, not by the window.

    Attributes:
        fetch: keys that are to be fetched.
        fetch_steps: the steps up to the last one with such keys.
        pass_end: position behind the uses of the coming pass.
    """

    def __init__(self) -> None:
        self.fetch: set[ExpertKey] = set()
        self.fetch_steps: list[Step] = []
        self.pass_end = 0
        self._announced: list[tuple[ExpertKey, ...]] = []
        self._rows: list[Step] = []
        self._uses: dict[ExpertKey, list[int]] = {}  # every position of each key, as if each row were a pass
        self._next: dict[ExpertKey, int] = {}
        self._moved: list[ExpertKey] = []  # keys whose next use is not the first one of _uses
        self._begun: tuple[int | None, int] | None = None  # fetch_rows and pass_rows while nothing of the pass is used

    @property
    def next_use(self) -> Mapping[ExpertKey, int]:
        """Position of each key's next use; a key that is absent is not needed within the window."""
        return self._next

    @property
    def uses(self) -> Mapping[ExpertKey, Sequence[int]]:
        """Positions of each announced key's uses, in order, as if each row were a pass."""
        return self._uses

    def announce(self, rows: Sequence[Sequence[ExpertKey]], fetch_rows: int | None, pass_rows: int) -> None:
        """Replace the plan; see ExpertCache.announce."""
        announced, pass_rows = [tuple(row) for row in rows], max(pass_rows, 1)
        gone, known = self._num_gone(announced), len(self._rows)
        begun = (fetch_rows, pass_rows)
        if begun == self._begun and not gone and fetch_rows is not None and known >= max(fetch_rows, pass_rows):
            for row in announced[known:]:
                self._append(row)
            return
        for key in self._moved:
            self._next[key] = self._uses[key][0]
        self._moved.clear()
        self._drop(gone)
        for row in announced[len(self._rows) :]:
            self._append(row)
        self._begun = begun
        together = self._begin_pass(pass_rows)
        num_steps = len(rows) if fetch_rows is None else max(min(fetch_rows, 1), fetch_rows - pass_rows + 1)
        self.fetch_steps = [together, *self._rows[pass_rows : pass_rows + num_steps - 1]] if num_steps > 0 else []
        self.fetch = set(chain.from_iterable(row.keys for row in self._rows[:fetch_rows]))

    def goes_on(self, rows: Sequence[Sequence[ExpertKey]]) -> bool:
        """Whether an announcement begins with a row of this one."""
        return bool(rows) and tuple(rows[0]) in self._announced

    def consume(self, key: ExpertKey) -> None:
        """Note that the coming pass has used the key: its next use is the first one after the pass."""
        position = self._next.get(key)
        if position is None or position >= self.pass_end:
            return
        later = self.use_from(key, self.pass_end)
        if later is None:
            del self._next[key]
        else:
            self._next[key] = later
        self._moved.append(key)
        self._begun = None

    def use_from(self, key: ExpertKey, step_start: int) -> int | None:
        """Where an announced key is needed first from the start of a later step on; None where it is not."""
        uses = self._uses[key]
        index = bisect_left(uses, step_start)
        return uses[index] if index < len(uses) else None

    def _num_gone(self, announced: list[tuple[ExpertKey, ...]]) -> int:
        """How many first rows must go for the others to be the first ones of the new announcement."""
        known = self._announced
        for count in range(len(known)):
            if known[count:] == announced[: len(known) - count]:
                return count
        return len(known)

    def _drop(self, count: int) -> None:
        if count == len(self._rows):
            self._uses.clear()
            self._next.clear()
        else:
            for row in self._rows[:count]:
                for key in row.keys:
                    uses = self._uses[key]
                    del uses[0]
                    if uses:
                        self._next[key] = uses[0]
                    else:
                        del self._uses[key], self._next[key]
        del self._announced[:count], self._rows[:count]

    def _append(self, row: tuple[ExpertKey, ...]) -> None:
        keys = tuple(dict.fromkeys(row))
        start = self._rows[-1].end if self._rows else 0
        for position, key in enumerate(keys, start):
            uses = self._uses.get(key)
            if uses is None:
                self._uses[key] = [position]
                self._next[key] = position
            else:
                uses.append(position)
        self._announced.append(row)
        self._rows.append(Step(start, keys, start + len(keys)))

    def _begin_pass(self, pass_rows: int) -> Step:
        """Bring the uses of the first rows into the order of one pass: by layer, then by row."""
        rows = self._rows[:pass_rows]
        if not rows:
            self.pass_end = 0
            return Step(0, (), 0)
        keys = sorted(dict.fromkeys(chain.from_iterable(row.keys for row in rows)), key=_layer_of)
        for position, key in enumerate(keys, rows[0].start):
            if self._next[key] != position:
                self._next[key] = position
                self._moved.append(key)
        self.pass_end = rows[-1].end
        return Step(rows[0].start, keys, rows[-1].end)


def rows_to_fetch(asked: int | None, slots: float, num_experts: int, top_k: int) -> int | None:
    """Rows to fetch ahead: as asked, but no more than have slots side by side, and the next one.

    Args:
        asked: None means any number, as it does in what is returned.
        slots, num_experts: of a layer.
        top_k: experts of a row.
    """
    most = rows_with_slots(slots, num_experts, top_k)
    if most is None:
        return asked
    return most + 1 if asked is None else min(most + 1, asked)


def rows_with_slots(slots: float, num_experts: int, top_k: int) -> int | None:
    """Rows whose experts find so many slots a layer, those that rows share counted once; None means any number.

    Of evenly used experts n rows leave (1 - top_k / num_experts) ** n of a layer untouched. More fit where rows are
    more alike.
    """
    if slots >= num_experts:
        return None
    if top_k >= num_experts:
        return 0
    return int(math.log1p(-slots / num_experts) / math.log1p(-top_k / num_experts) + 1e-9)
