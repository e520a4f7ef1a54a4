"""When each announced expert is needed next."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from runtime.memory.location import ExpertKey


class Window:
    """The announced rows as one order of uses.

    Positions count uses from the start of the announcement. The rows of the coming pass are computed together, one
    layer after the other, so they count as one step; every later row is a step of its own.
    """

    def __init__(self) -> None:
        self._next: dict[ExpertKey, int] = {}
        self._after_pass: dict[ExpertKey, int] = {}
        self._wanted: list[tuple[ExpertKey, int]] = []

    @property
    def next_use(self) -> Mapping[ExpertKey, int]:
        """Position of each key's next use; a key that is absent is not needed within the window."""
        return self._next

    def announce(self, rows: Sequence[Sequence[ExpertKey]], fetch_rows: int | None, pass_rows: int) -> None:
        """Replace the plan; see ExpertCache.announce."""
        self._next, self._after_pass, self._wanted = {}, {}, []
        pass_rows = max(pass_rows, 1)
        fetch = {key for row in rows[:fetch_rows] for key in row}
        position = 0
        for row_index, step in _steps(rows, pass_rows):
            new = [key for key in step if key not in self._next]
            for key in step:
                self._next.setdefault(key, position)
                if row_index >= pass_rows:
                    self._after_pass.setdefault(key, position)
                position += 1
            # A record of this step may take the place of what is needed after the whole step, nothing sooner.
            self._wanted.extend((key, position) for key in new if key in fetch)

    def wanted(self) -> Iterator[tuple[ExpertKey, int]]:
        """Keys to fetch, soonest first, each once, with the position from which on others may give way to it."""
        return iter(self._wanted)

    def consume(self, key: ExpertKey) -> None:
        """Note that the coming pass has used the key: its next use is the first one after the pass."""
        position = self._after_pass.get(key)
        if position is None:
            self._next.pop(key, None)
        else:
            self._next[key] = position


def _steps(rows: Sequence[Sequence[ExpertKey]], pass_rows: int) -> Iterator[tuple[int, list[ExpertKey]]]:
    """(first row, different keys in order of use) of each step."""
    together = dict.fromkeys(key for row in rows[:pass_rows] for key in row)
    yield 0, sorted(together, key=lambda key: key[0])  # stable: within a layer, the order of the rows
    for row_index, row in enumerate(rows[pass_rows:], start=pass_rows):
        yield row_index, list(dict.fromkeys(row))
