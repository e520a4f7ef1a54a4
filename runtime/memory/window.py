"""When each announced expert is needed next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from runtime.memory.location import ExpertKey


class Window:
    """The announced rows as one order of uses.

    Positions count uses from the start of the announcement. The rows of the coming pass are computed together, one
    layer after the other, so they count as one step; every later row is a step of its own.

    Attributes:
        order: the key at each position.
        later: for each position, that of the same key's next use; None where there is none.
        step_ends: the first position after each step.
        fetch: keys that are to be fetched.
        fetch_end: the first position after the steps that have such keys.
    """

    def __init__(self) -> None:
        self.order: list[ExpertKey] = []
        self.later: list[int | None] = []
        self.step_ends: list[int] = []
        self.fetch: set[ExpertKey] = set()
        self.fetch_end = 0
        self._next: dict[ExpertKey, int] = {}
        self._after_pass: dict[ExpertKey, int] = {}

    @property
    def next_use(self) -> Mapping[ExpertKey, int]:
        """Position of each key's next use; a key that is absent is not needed within the window."""
        return self._next

    def announce(self, rows: Sequence[Sequence[ExpertKey]], fetch_rows: int | None, pass_rows: int) -> None:
        """Replace the plan; see ExpertCache.announce."""
        pass_rows = max(pass_rows, 1)
        together = dict.fromkeys(key for row in rows[:pass_rows] for key in row)
        self.order = sorted(together, key=lambda key: key[0])  # stable: within a layer, the order of the rows
        self.step_ends = [len(self.order)]
        for row in rows[pass_rows:]:
            self.order.extend(dict.fromkeys(row))
            self.step_ends.append(len(self.order))
        self.fetch = {key for row in rows[:fetch_rows] for key in row}
        fetch_steps = len(self.step_ends) if fetch_rows is None else max(min(fetch_rows, 1), fetch_rows - pass_rows + 1)
        self.fetch_end = self.step_ends[min(fetch_steps, len(self.step_ends)) - 1] if fetch_steps > 0 else 0
        self._look_back()

    def consume(self, key: ExpertKey) -> None:
        """Note that the coming pass has used the key: its next use is the first one after the pass."""
        position = self._after_pass.get(key)
        if position is None:
            self._next.pop(key, None)
        else:
            self._next[key] = position

    def _look_back(self) -> None:
        """Link each use to the next one of the same key, from the last to the first."""
        uses: dict[ExpertKey, int] = {}
        self.later = [None] * len(self.order)
        for position in range(len(self.order) - 1, self.step_ends[0] - 1, -1):
            key = self.order[position]
            self.later[position] = uses.get(key)
            uses[key] = position
        self._after_pass = uses.copy()
        for position, key in enumerate(self.order[: self.step_ends[0]]):  # each key once
            self.later[position] = uses.get(key)
            uses[key] = position
        self._next = uses
