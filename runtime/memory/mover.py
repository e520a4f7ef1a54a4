"""What brings queued records to their slots, as the cache sees it."""

from __future__ import annotations

from typing import Protocol


class Mover(Protocol):
    """Takes transfers from a cache's queue, moves them, and reports to the cache what came of each.

    It works under the cache's lock, with which all but `start`, `poll` and `close` are called.
    """

    def start(self) -> None:
        """Begin; nothing is queued yet."""

    def wake(self, count: int = 1) -> None:
        """So many transfers may start that could not before."""

    def unwatched(self, seconds: float) -> None:
        """Nobody will call for so long, and what is queued is worth moving meanwhile."""

    def wait(self) -> bool:
        """Give what is asked for a while to come.

        Returns:
            False if nothing has come and, for all that is known, nothing will.

        Raises:
            StorageError: nothing can come any more.
        """
        ...

    def poll(self) -> None:
        """Note what has arrived and start more, if that takes a call."""

    def rest(self) -> None:
        """Before a pause without calls: what only a call would note is to be noted before this returns."""

    def close(self) -> None:
        """Nothing is queued any more: return when nothing moves and no thread is left; safe to repeat."""
