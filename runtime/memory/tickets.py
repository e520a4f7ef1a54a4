"""Who asked for which experts, who holds them, and who waits."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from runtime.errors import MoespeqError, StorageError
from runtime.memory.eviction import EvictionPolicy
from runtime.memory.location import ExpertKey
from runtime.memory.residency import Residency
from runtime.memory.stats import CacheStats
from runtime.memory.store import RecordReader
from runtime.memory.transfer import Transfer, TransferQueue


@dataclass(slots=True, eq=False)
class Ticket:
    """One stream call, as the cache sees it.

    Attributes:
        ready: experts that are there, pinned, not yet yielded.
        held: experts that were yielded and are still pinned.
        pending: experts that were asked for and are not there.
        error: why one of them will not come.
        thread: the one that asked.
    """

    ready: deque[ExpertKey] = field(default_factory=deque)
    held: list[ExpertKey] = field(default_factory=list)
    pending: set[ExpertKey] = field(default_factory=set)
    error: MoespeqError | None = None
    thread: threading.Thread = field(default_factory=threading.current_thread)


class Tickets:
    """All open tickets of a cache. It has no lock: the cache's is held around every call.

    Args:
        residency: what can be held.
        queue: what is on its way, and where the missing is asked for.
        policy: told of every use and arrival.
        store: knows which experts there are, and names them.
        stats: counts who asked.
        arrived: notified when something has come, or will not, for whoever waits.

    Attributes:
        open: those that may hold or wait for something.
    """

    def __init__(
        self,
        residency: Residency,
        queue: TransferQueue,
        policy: EvictionPolicy,
        store: RecordReader,
        stats: CacheStats,
        arrived: threading.Condition,
    ) -> None:
        self.open: set[Ticket] = set()
        self._waiters: dict[ExpertKey, list[Ticket]] = {}
        self._residency, self._queue, self._policy = residency, queue, policy
        self._store, self._stats, self._arrived = store, stats, arrived

    def ask(self, ticket: Ticket, keys: Iterable[ExpertKey]) -> None:
        """Pin those different keys that are resident and queue what is missing."""
        residency, stats = self._residency, self._stats
        slots, consume, used = residency.slots, residency.window.consume, self._policy.used
        for key in dict.fromkeys(keys):
            used(key)
            consume(key)
            if key in slots:
                residency.use(key)
                ticket.ready.append(key)
                stats.hits += 1
            else:
                self._want(key, ticket)

    def report(self, transfer: Transfer, outcome: int | BaseException) -> None:
        """Hand a record that has come, or the error, to the tickets that wait for it.

        An interrupt of a thread that polls may come in between: what is then done again changes nothing, and tickets
        that are released meanwhile find themselves among the waiters still.

        Args:
            transfer: of the record.
            outcome: its bytes, or why it did not come.
        """
        waiters = self._waiters.get(transfer.key, [])
        if isinstance(outcome, BaseException):
            self._queue.finish(transfer, None)
            error = self._named(outcome, transfer.key)
            for ticket in waiters:
                ticket.error = ticket.error or error
                ticket.pending.discard(transfer.key)
        else:
            self._policy.loaded(transfer.key, outcome, self._queue.leave_link(transfer))
            self._queue.finish(transfer, outcome)
            for ticket in waiters:
                if transfer.key in ticket.pending:
                    self._residency.pin(transfer.key)
                    ticket.ready.append(transfer.key)
                    ticket.pending.discard(transfer.key)
        self._waiters.pop(transfer.key, None)
        if waiters:
            self._arrived.notify_all()

    def release(self, ticket: Ticket) -> list[ExpertKey]:
        """Unpin all that a ticket holds, withdraw what it waits for, and return what was unpinned."""
        self.open.discard(ticket)
        unpinned = [*ticket.held, *ticket.ready]
        ticket.held.clear()
        ticket.ready.clear()
        self._residency.unpin(unpinned)
        for key in ticket.pending:
            waiters = self._waiters[key]
            waiters.remove(ticket)
            if not waiters:
                del self._waiters[key]
                self._queue.demands.pop(key, None)
        ticket.pending.clear()
        return unpinned

    def stuck(self) -> bool:
        """Whether only this thread, which waits, or one that has ended could free a slot."""
        residency, this = self._residency, threading.current_thread()
        if self._queue.in_flight or residency.num_free or len(residency.pins) < len(residency.slots):
            return False
        holders = (other.thread for other in self.open if other.held or other.ready)
        return all(thread is this or not thread.is_alive() for thread in holders)

    def recover(self) -> None:
        """Empty and forget them all, where nobody uses one any more; their pins are the residency's to forget."""
        for ticket in self.open:
            ticket.held.clear()
            ticket.ready.clear()
            ticket.pending.clear()
        self.open.clear()
        self._waiters.clear()

    def _want(self, key: ExpertKey, ticket: Ticket) -> None:
        self._queue.lacking = True
        transfer = self._queue.in_flight.get(key)
        if transfer is None:
            self._store.record_bytes(key)  # an unknown expert is refused here, in the caller's thread
            self._queue.demands.setdefault(key)
            self._stats.misses += 1
        else:
            self._stats.late += 1
            self._stats.prefetched_used += transfer.cause == "prefetch" and not transfer.claimed
            transfer.claimed = True
        self._waiters.setdefault(key, []).append(ticket)
        ticket.pending.add(key)

    def _named(self, error: BaseException, key: ExpertKey) -> MoespeqError:
        if isinstance(error, MoespeqError):
            return error
        named = StorageError(
            expected=f"to read {self._store.describe(key)}",
            found=f"{type(error).__name__}: {error}",
            mend="check the disk, or make the pack again",
        )
        named.__cause__ = error
        return named
