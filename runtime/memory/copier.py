"""Copies of records to slots, started and seen to arrive by whoever calls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from runtime.memory.location import ExpertKey
from runtime.memory.pace import Pace
from runtime.memory.slots import Slots
from runtime.memory.stats import CacheStats
from runtime.memory.transfer import Landing, Transfer, TransferQueue

_MOST_AHEAD = 8  # copies that are started beyond the usual number before nobody polls for a while


class Copies(Protocol):
    """Moves records without a thread of its own."""

    def start(self, key: ExpertKey, buffer: Any) -> Landing:
        """Queue the copy of a record to a slot; copies arrive one after the other, in this order."""


class Copier:
    """Move records without a thread: the run's own starts the copies and polls for them. A `Mover`.

    That thread is the one that Ctrl-C stops, and it may do so between any two steps.

    Args:
        copies: starts them.
        most_prefetches: under way at a time.
        queue: what to copy.
        pool: where to.
        record_bytes: of the largest record.
        stats: tell how fast the link is, and are told.
        lock: guards the queue.
        report: told, under the lock, the transfer and the bytes, or the error.
    """

    def __init__(
        self,
        copies: Copies,
        most_prefetches: int,
        queue: TransferQueue,
        pool: Slots,
        record_bytes: int,
        stats: CacheStats,
        lock: threading.RLock,
        report: Callable[[Transfer, int | BaseException], None],
    ) -> None:
        self._copies, self._most_prefetches = copies, most_prefetches
        self._queue, self._pool, self._record_bytes, self._stats = queue, pool, record_bytes, stats
        self._lock, self._report = lock, report
        self._pace = Pace(stats)
        self._starting = False  # whether what is in flight may lack its copy
        self._may_start = False  # whether more could start than at the last poll

    def start(self) -> None:
        """Whoever calls is the thread."""

    def wake(self, count: int = 1) -> None:
        """See `Mover`; as many start as may."""
        self._may_start = True
        self.poll()

    def unwatched(self, seconds: float) -> None:
        """See `Mover`; beyond the usual number as many start as the link is expected to move meanwhile."""
        moved = seconds * self._stats.bytes_per_s / self._record_bytes
        self._start(min(_MOST_AHEAD, round(moved)))

    def wait(self) -> bool:
        """See `Mover`."""
        self.poll()
        return bool(self._queue.in_flight)

    def poll(self) -> None:
        """Note one copy that has arrived, and start more if that made room."""
        if not (self._queue.in_flight or self._may_start):
            return
        with self._lock:
            if self._queue.closed:
                return
            self._look()
            if self._may_start:
                self._may_start = False
                self._start()

    def _look(self) -> None:
        """Note one copy that has arrived."""
        under_way = [transfer for transfer in self._queue.in_flight.values() if transfer.landing is not None]
        for place, transfer in enumerate(under_way):
            landing = transfer.landing
            if landing is not None and landing.done():
                if place == 0:
                    self._pace.arrived(transfer, landing.num_bytes, under_way[1] if len(under_way) > 1 else None)
                self._may_start = True
                self._report(transfer, landing.num_bytes)
                return
            if place == 0:
                self._pace.busy()

    def rest(self) -> None:
        """Note all copies under way as they arrive and start no other."""
        self._pace.pause()
        while self._queue.in_flight and not self._queue.closed:
            for transfer in self._under_way():
                if (landing := transfer.landing) is not None:
                    landing.wait()
                    self._may_start = True
                    self._report(transfer, landing.num_bytes)

    def close(self) -> None:
        """Wait for what is under way."""
        with self._lock:
            for transfer in self._under_way():
                if transfer.landing is not None:
                    transfer.landing.wait()

    def _start(self, more: int = 0) -> None:
        """Start every demand, and prefetches as long as few are under way, or so many more than a few."""
        if self._starting:  # an interrupt came before the end of the last start
            self._under_way()
        self._starting = True
        while self._queue.demands or self._may_prefetch(more):
            transfer = self._queue.take()
            if transfer is None:
                break
            self._fly(transfer)
        self._starting = False

    def _may_prefetch(self, more: int) -> bool:
        """Whether one more prefetch goes on the link now.

        Copies arrive in the order of their start, and who waits for one may ask for the next any time. So a single one
        goes behind what is awaited, which keeps the link busy.
        """
        awaited = [transfer.claimed for transfer in self._queue.in_flight.values()]
        return all(awaited) if any(awaited) else len(awaited) < self._most_prefetches + more

    def _under_way(self) -> list[Transfer]:
        """All that is in flight, with a copy each; one whose copy could not start has none and is reported.

        An interrupt may come between taking a transfer and knowing its copy; then it is copied again, to the same slot.
        """
        transfers = list(self._queue.in_flight.values())
        for transfer in transfers:
            if transfer.landing is None:
                self._fly(transfer)
        return transfers

    def _fly(self, transfer: Transfer) -> None:
        """Start the copy of a transfer."""
        buffer = self._pool.buffer(transfer.slot)
        try:
            transfer.landing = self._copies.start(transfer.key, buffer)
        except Exception as error:  # it belongs to whoever asked for the record
            self._report(transfer, error)
