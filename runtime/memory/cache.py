"""The expert cache: records in slots, brought on demand or ahead of need."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Self

from runtime.errors import PlanError, StorageError
from runtime.memory.copier import Copier, Copies
from runtime.memory.eviction import EvictionPolicy
from runtime.memory.location import ExpertKey
from runtime.memory.mover import Mover
from runtime.memory.readers import ReaderThreads
from runtime.memory.residency import Board, Residency
from runtime.memory.slots import Slots
from runtime.memory.stats import CacheStats
from runtime.memory.store import RecordReader
from runtime.memory.stream import ExpertStream, Hold
from runtime.memory.tickets import Ticket, Tickets
from runtime.memory.transfer import TransferQueue

_NEWEST = 0.2  # weight of the newest measurement of how long an announcement takes


class ExpertCache:
    """Experts of one model in a fixed number of slots, with readers that fill them from a store.

    `announce` says what will be needed, `stream` asks for it now. Any number of slots works, one included: then the
    experts of a stream come one after the other. One lock guards all state; a stream whose keys are all resident
    takes it twice.

    Close it in a `finally`, or use it as a context manager: its threads end only then. The store and the pool belong
    to the caller.

    Args:
        store: where records come from.
        pool: the slots.
        policy: which expert gives way; one policy object a cache.
        max_parallel_transfers: reads at a time, at least 1; with `copies`, prefetches at a time.
        copies: move records without a thread; the caller's own `poll` then notes what has arrived and starts more.
        board: told of all that comes and goes; it may keep what is in use though no stream holds it.

    Attributes:
        stats: what it did.
        poll: for a cache with `copies`: call it whenever you would wait for anything else. It notes a copy that has
            arrived and starts more.

    Raises:
        PlanError: a slot is smaller than the largest record, or there is no reader.
    """

    def __init__(
        self,
        store: RecordReader,
        pool: Slots,
        policy: EvictionPolicy,
        max_parallel_transfers: int = 4,
        copies: Copies | None = None,
        board: Board | None = None,
    ) -> None:
        if pool.slot_bytes < store.max_record_bytes:
            raise PlanError(
                expected=f"slots of at least {store.max_record_bytes} bytes, the largest record",
                found=f"slots of {pool.slot_bytes} bytes",
                mend="size the slots by the pack's largest record",
            )
        if max_parallel_transfers < 1:
            raise PlanError(
                expected="at least 1 transfer at a time",
                found=str(max_parallel_transfers),
                mend="raise --max-parallel-transfers",
            )
        self.stats = CacheStats()
        self._store = store
        self._pool = pool
        self._residency = Residency(pool.num_slots, policy, self.stats, board)
        self._queue = TransferQueue(self._residency, self.stats)
        self._fault: BaseException | None = None
        self._lock = threading.RLock()  # taken back after a wait without regard to signals, unlike a Lock
        self._arrived = threading.Condition(self._lock)  # streams wait here
        self._tickets = Tickets(self._residency, self._queue, policy, store, self.stats, self._arrived)
        self._plan_s = 0.0  # that working through an announcement takes
        self._mover = self._make_mover(max_parallel_transfers, copies)
        self.poll = self._mover.poll
        try:
            self._mover.start()
        except BaseException:
            self.close()
            raise

    def announce(
        self, upcoming: Sequence[Sequence[ExpertKey]], fetch_rows: int | None = None, *, pass_rows: int = 1
    ) -> None:
        """Say which experts the coming rows need; replaces the announcement before it.

        Eviction sees from it when each expert is needed next. Prefetches still queued for the announcement before are
        dropped, those in flight go on, and with `copies` as many start first as the link moves meanwhile. Call it
        before each pass, so that row 0 is always the next one to be computed; once a pass has streamed an expert, its
        next use is the first one after the pass.

        Args:
            upcoming: the experts of each row, row 0 first, each row in layer order.
            fetch_rows: missing experts of so many first rows are fetched now, soonest need first; None means all
                rows, 0 none. A prefetch takes a free slot, or that of an unpinned expert which eviction by furthest
                next use would give up for it and which has no use left before it: so it never displaces what its own
                row or a sooner one needs, and adds no read while the rows are as announced. Only once the pass has had
                to wait, and the link is empty, what the pass lacks still takes the place of what is needed last.
            pass_rows: how many first rows the next pass computes together, one layer after the other.
        """
        with self._lock:
            self._check_open()
            self._mover.poll()
            started = time.perf_counter()
            if self._residency.window.goes_on(upcoming):
                self._mover.unwatched(self._plan_s)
            try:
                self._residency.window.announce(upcoming, fetch_rows, pass_rows)
                self._queue.plan()
            except BaseException:
                self._residency.forget_window()
                raise
            self._plan_s += _NEWEST * (time.perf_counter() - started - self._plan_s)
            if self._queue.num_queued:
                self._mover.wake()

    def stream(self, keys: Sequence[ExpertKey]) -> ExpertStream:
        """Ask for these experts now and iterate over (key, uint8 [slot_bytes]) as they are there.

        Each different key comes once: residents first, then in order of arrival. Reads of the missing ones begin
        before this returns and go ahead of all prefetches. A tensor is the slot itself and stays as it is until the
        iterator advances or is closed. Exhaust the iterator or close it, best in a `with`: one that is dropped half way
        keeps its experts pinned until the cache closes.

        Raises (here or while iterating):
            ArtifactError, StorageError: a record cannot be read (the message names file and expert), or the cache
                is closed.
            PlanError: all slots are held by other streams that this thread, or one that has ended, left open.
        """
        ticket = self._ask(keys)
        return ExpertStream(ticket, self._residency.slots, self._pool.tensor, self._advance, self._end)

    def hold(self, keys: Sequence[ExpertKey], kept: Callable[[], None] | None = None) -> Hold:
        """Ask for these experts together and keep them until the hold is closed; returns at once.

        For kernels that run on while the caller goes on: it closes the hold when they are done. There must be slots for
        the different keys beside those that open holds and streams of the same thread keep.

        Args:
            keys: the experts.
            kept: called once those that are here cannot go any more, and before the others look for slots.

        Raises (here or while waiting): as `stream` does.
        """
        return Hold(self._ask(keys, kept), self._residency.slots, self._check, self._wait_for_all, self._end)

    @property
    def num_resident(self) -> int:
        """Experts that are in slots."""
        return len(self._residency.slots)

    def resident_slots(self) -> dict[ExpertKey, int]:
        """The slot of every expert that is in one; unless all are, it may have changed when this returns."""
        with self._lock:
            return dict(self._residency.slots)

    def missing_bytes(self, keys: Sequence[ExpertKey]) -> int:
        """Bytes of those different keys that are not resident; what is still in flight counts in full."""
        slots, record_bytes = self._residency.slots, self._store.record_bytes
        return sum(record_bytes(key) for key in set(keys) if key not in slots)

    def passed_on(self, key: ExpertKey) -> None:
        """Whoever reads from this cache has a record of its own now.

        Until `take_back` it gives way here before any that is in this cache alone, and no announcement fetches it.
        """
        with self._lock:
            self._residency.pass_on(key)

    def take_back(self, key: ExpertKey, fill: Callable[[int], int]) -> bool:
        """Whoever reads from this cache is about to lose a record: it counts as any other again, and is kept if it can.

        It waits for no slot: a record that is not here comes to an empty one, or to that of one that was passed on.
        Whoever waits for it already, and whose read has not begun, gets this one.

        Args:
            key: of the record.
            fill: puts it at the start of this slot of the pool and returns its bytes; not called where there is none.

        Returns:
            Whether the record is here, or on its way.

        Raises:
            Whatever `fill` raises; a stream that waits for the record raises, too.
        """
        with self._lock:
            self._residency.call_back(key)
            if key in self._residency.slots or key in self._queue.in_flight:
                return True
            if self._queue.closed:
                return False
            transfer = self._queue.take_back(key)
            if transfer is None:
                return False
        try:
            outcome: int | BaseException = fill(transfer.slot)
        except BaseException as error:
            outcome = error
        with self._lock:
            self._tickets.report(transfer, outcome)
            if self._queue.num_queued:
                self._mover.wake()
        if isinstance(outcome, BaseException):
            raise outcome
        return True

    def rest(self) -> None:
        """Note all copies under way as they arrive and start no other: before a pause in which nobody polls.

        Without it a copy that arrives in the pause would count as under way up to the next poll.
        """
        with self._lock:
            self._queue.rest()
            self._mover.rest()

    def recover(self) -> None:
        """Take back whatever an interrupted user left held, queued or half claimed.

        Ctrl-C may come between any two steps, also of those that would let go. For a new user, when no stream or hold
        of an earlier one is used any more; copies under way go on.
        """
        with self._lock:
            self._tickets.recover()
            self._queue.recover()

    def close(self) -> None:
        """Drop what is queued, wait for reads in flight, end the threads. Streams still waiting raise."""
        with self._lock:
            self._queue.close()
            self._arrived.notify_all()
        self._mover.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # A stream's side.

    def _ask(self, keys: Sequence[ExpertKey], kept: Callable[[], None] | None = None) -> Ticket:
        """Pin what is resident and queue what is missing; waits for nothing."""
        ticket = Ticket()
        with self._lock:
            self._check_open()
            self._tickets.open.add(ticket)
            try:
                self._tickets.ask(ticket, keys)
                if kept is not None:
                    kept()
                if ticket.pending:
                    self._mover.wake(len(ticket.pending))
            except BaseException:
                self._residency.forget_window()
                self._release(ticket)
                raise
        return ticket

    def _advance(self, ticket: Ticket) -> ExpertKey | None:
        """Unpin what the ticket has yielded and wait for its next expert; None, and the ticket closed, at the end."""
        with self._lock:
            if ticket not in self._tickets.open:
                return None
            # Out of the ticket first: an interrupt may come in between, and nothing may be unpinned twice.
            done = ticket.held.copy()
            ticket.held.clear()
            self._residency.unpin(done)
            if self._queue.may_start(done):
                self._mover.wake()
            self._wait_while(ticket, lambda: bool(ticket.pending) and not ticket.ready)
            if not ticket.ready:
                self._release(ticket)
                return None
            key = ticket.ready.popleft()
            ticket.held.append(key)
            return key

    def _check(self, ticket: Ticket) -> None:
        if ticket.error is not None or (ticket.pending and (self._fault is not None or self._queue.closed)):
            self._wait_for_all(ticket)

    def _wait_for_all(self, ticket: Ticket) -> None:
        with self._lock:
            self._wait_while(ticket, lambda: bool(ticket.pending))

    def _wait_while(self, ticket: Ticket, lacking: Callable[[], bool]) -> None:
        """Wait as long as the ticket lacks something; an error of it, or an interrupt, releases it."""
        try:
            while lacking():
                self._wait(ticket, lacking)
            if ticket.error is not None:
                raise ticket.error
        except BaseException:
            self._release(ticket)
            raise

    def _wait(self, ticket: Ticket, lacking: Callable[[], bool]) -> None:
        if ticket.error is not None:
            raise ticket.error
        self._check_open()
        started = time.perf_counter()
        moving = self._mover.wait()
        self.stats.wait_s += time.perf_counter() - started
        if not moving and lacking() and self._tickets.stuck():
            raise PlanError(
                expected=f"a slot for {self._store.describe(next(iter(ticket.pending)))}",
                found=f"all {self._pool.num_slots} held by streams that were left open, by this thread or an ended one",
                mend="exhaust or close each stream before the next, best in a `with`; a larger cache (--expert-cache) "
                "holds more open ones",
            )

    def _release(self, ticket: Ticket) -> None:
        if self._queue.may_start(self._tickets.release(ticket)):
            self._mover.wake()

    def _end(self, ticket: Ticket) -> None:
        with self._lock:
            if ticket in self._tickets.open:
                self._release(ticket)

    def _check_open(self) -> None:
        if self._fault is not None:
            raise self._fault
        if self._queue.closed:
            raise StorageError(
                expected="an open expert cache", found="one that is closed", mend="stream before closing the cache"
            )

    def _make_mover(self, most: int, copies: Copies | None) -> Mover:
        queue, store, pool, lock, report = self._queue, self._store, self._pool, self._lock, self._tickets.report
        if copies is None:
            return ReaderThreads(most, queue, store, pool, lock, self._arrived, report, self._crash)
        return Copier(copies, most, queue, pool, store.max_record_bytes, self.stats, lock, report)

    def _crash(self, error: BaseException) -> None:
        """A reader ended by a fault of the cache or its policy: no stream may wait for it."""
        with self._lock:
            self._fault = error
            self._arrived.notify_all()
