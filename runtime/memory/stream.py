"""One demand for experts, and how they are handed over: one by one as they arrive, or all at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Self

import torch

from runtime.memory.location import ExpertKey
from runtime.memory.tickets import Ticket


class ExpertStream(Iterator[tuple[ExpertKey, torch.Tensor]]):
    """What `ExpertCache.stream` returns; for one thread.

    Exhaust it, or close it: best in a `with`. Its end and an error that it raises release all that it holds. One that
    is dropped half way without a close keeps its experts pinned until the cache closes: there is no destructor, for an
    interrupt that arrives in one is lost.

    While nothing is missing it takes no lock an expert, and all pins go together at its end. While something is
    missing each advance frees the expert before it, so that its slot can take the next.

    Args:
        ticket: what was asked for.
        slots: slot of each resident expert.
        tensor: slot -> its bytes.
        advance: unpins what was yielded and waits for the next expert; None at the end.
        end: releases the ticket; safe to repeat.
    """

    __slots__ = ("_advance", "_end", "_slots", "_tensor", "_ticket")

    def __init__(
        self,
        ticket: Ticket,
        slots: Mapping[ExpertKey, int],
        tensor: Callable[[int], torch.Tensor],
        advance: Callable[[Ticket], ExpertKey | None],
        end: Callable[[Ticket], None],
    ) -> None:
        self._ticket, self._slots, self._tensor = ticket, slots, tensor
        self._advance, self._end = advance, end

    def __next__(self) -> tuple[ExpertKey, torch.Tensor]:
        ticket = self._ticket
        if ticket.pending or not ticket.ready:
            key = self._advance(ticket)
            if key is None:
                raise StopIteration
        else:
            key = ticket.ready.popleft()
            ticket.held.append(key)
        return key, self._tensor(self._slots[key])

    def close(self) -> None:
        """Unpin what it holds and withdraw what it waits for; safe to repeat."""
        self._end(self._ticket)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Hold:
    """Experts that stay where they are until it is closed: for one thread, best in a `with`.

    Args:
        ticket: what was asked for.
        slots: slot of each resident expert.
        check: raises if something of the ticket will not come.
        wait: returns when nothing of the ticket is pending.
        end: releases the ticket; safe to repeat.
    """

    __slots__ = ("_check", "_end", "_slots", "_ticket", "_wait")

    def __init__(
        self,
        ticket: Ticket,
        slots: Mapping[ExpertKey, int],
        check: Callable[[Ticket], None],
        wait: Callable[[Ticket], None],
        end: Callable[[Ticket], None],
    ) -> None:
        self._ticket, self._slots, self._check, self._wait, self._end = ticket, slots, check, wait, end

    @property
    def complete(self) -> bool:
        """Whether all experts are there."""
        return not self._ticket.pending

    def check(self) -> None:
        """Raise, as `wait` would, if one of them will not come; waits for nothing."""
        self._check(self._ticket)

    def here(self) -> dict[ExpertKey, int]:
        """The slots of those that are there by now."""
        return {key: self._slots[key] for key in list(self._ticket.ready)}

    def wait(self) -> dict[ExpertKey, int]:
        """The slots of all of them, once they are there.

        Raises:
            ArtifactError, StorageError: a record cannot be read, or the cache is closed.
        """
        if self._ticket.pending or self._ticket.error is not None:
            self._wait(self._ticket)
        return self.here()

    def close(self) -> None:
        """Let them go; safe to repeat."""
        self._end(self._ticket)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
