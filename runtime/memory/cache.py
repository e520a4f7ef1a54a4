"""The expert cache: records in slots, brought on demand or ahead of need."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Self

from runtime.errors import MoespeqError, PlanError, StorageError
from runtime.memory.eviction import EvictionPolicy
from runtime.memory.location import ExpertKey
from runtime.memory.residency import Board, Residency
from runtime.memory.slots import Slots
from runtime.memory.stats import CacheStats
from runtime.memory.store import RecordReader
from runtime.memory.stream import ExpertStream, Hold, Ticket
from runtime.memory.transfer import Copies, Landing, ReaderThreads, Transfer, TransferQueue

_CHECK_S = 0.25  # how often a waiting stream looks for what no reader will tell it
_MOST_AHEAD = 8  # copies that are started beyond the usual number before an announcement is worked through
_NEWEST = 0.2  # weight of the newest measurement of how long that takes


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
        self._policy = policy
        self._residency = Residency(pool.num_slots, policy, self.stats, board)
        self._queue = TransferQueue(self._residency, self.stats)
        self._waiters: dict[ExpertKey, list[Ticket]] = {}
        self._open_tickets: set[Ticket] = set()
        self._closed = False
        self._fault: BaseException | None = None
        self._lock = threading.RLock()  # taken back after a wait without regard to signals, unlike a Lock
        self._work = threading.Condition(self._lock)  # readers wait here
        self._arrived = threading.Condition(self._lock)  # streams wait here
        self._copies = copies
        self._most_prefetches = max_parallel_transfers
        self._plan_s = 0.0  # that working through an announcement takes
        self._landings: dict[ExpertKey, tuple[Transfer, Landing]] = {}
        self._starting = False  # whether what is in flight may lack its copy
        self._may_start = False  # whether more could start than at the last poll
        readers = 0 if copies is not None else max_parallel_transfers
        self._readers = ReaderThreads(readers, self._take, self._read, self._report, self._crash)
        try:
            self._readers.start()
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
                row or a sooner one needs, and adds no read while the rows are as announced.
            pass_rows: how many first rows the next pass computes together, one layer after the other.
        """
        with self._lock:
            self._check_open()
            started = time.perf_counter()
            if self._copies is not None and self._residency.window.goes_on(upcoming):
                self._start_copies(self._moved_while_planning())
            try:
                self._residency.window.announce(upcoming, fetch_rows, pass_rows)
                self._queue.plan()
            except BaseException:
                self._residency.forget_window()
                raise
            self._plan_s += _NEWEST * (time.perf_counter() - started - self._plan_s)
            if self._queue.num_queued:
                self._wake()

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
            if self._closed or key in self._queue.demands:
                return False
            transfer = self._queue.take_back(key)
            if transfer is None:
                return False
        try:
            outcome: int | BaseException = fill(transfer.slot)
        except BaseException as error:
            outcome = error
        with self._lock:
            self._report(transfer, outcome)
            if self._queue.num_queued:
                self._wake()
        if isinstance(outcome, BaseException):
            raise outcome
        return True

    def poll(self) -> None:
        """Note which copies have arrived, and start more: for whenever the caller would wait for anything else.

        For a cache with `copies`; it does nothing else.
        """
        if self._copies is None or not (self._queue.in_flight or self._may_start):
            return
        with self._lock:
            if self._closed:
                return
            for transfer in self._queue.in_flight.values():
                if (landing := self._landing(transfer)) is not None and landing.done():
                    self._may_start = True
                    self._report(transfer, landing.num_bytes)
                    self._landings.pop(transfer.key, None)
                    break
            if self._may_start:
                self._may_start = False
                self._start_copies()

    def rest(self) -> None:
        """Note all copies under way as they arrive and start no other: before a pause in which nobody polls.

        Without it a copy that arrives in the pause would count as under way up to the next poll.
        """
        with self._lock:
            self._queue.rest()
            while self._copies is not None and self._queue.in_flight and not self._closed:
                under_way = list(self._queue.in_flight.values())
                self._fly(under_way)
                for transfer in under_way:
                    if (landing := self._landing(transfer)) is not None:
                        landing.wait()
                        self._may_start = True
                        self._report(transfer, landing.num_bytes)
                        self._landings.pop(transfer.key, None)

    def recover(self) -> None:
        """Take back whatever an interrupted user left held, queued or half claimed.

        Ctrl-C may come between any two steps, also of those that would let go. For a new user, when no stream or hold
        of an earlier one is used any more; copies under way go on.
        """
        with self._lock:
            for ticket in self._open_tickets:
                ticket.held.clear()
                ticket.ready.clear()
                ticket.pending.clear()
            self._open_tickets.clear()
            self._waiters.clear()
            self._queue.recover()

    def close(self) -> None:
        """Drop what is queued, wait for reads in flight, end the threads. Streams still waiting raise."""
        with self._lock:
            self._closed = True
            self._queue.clear()
            self._work.notify_all()
            self._arrived.notify_all()
        self._readers.join()
        if self._copies is not None:
            with self._lock:
                self._fly(list(self._queue.in_flight.values()))
                for _, landing in self._landings.values():
                    landing.wait()

    def _moved_while_planning(self) -> int:
        """Copies that the link is expected to move while an announcement is worked through, in which nobody polls."""
        moved = self._plan_s * self.stats.bytes_per_s / self._store.max_record_bytes
        return min(_MOST_AHEAD, round(moved))

    def _start_copies(self, more: int = 0) -> None:
        """Start every demand, and prefetches as long as few are under way, or so many more than a few."""
        if self._starting:  # an interrupt came before the end of the last start
            self._fly(list(self._queue.in_flight.values()))
        self._starting = True
        while self._queue.demands or self._may_prefetch(more):
            transfer = self._queue.take()
            if transfer is None:
                break
            self._fly([transfer])
        self._starting = False

    def _may_prefetch(self, more: int) -> bool:
        """Whether one more prefetch goes on the link now.

        Copies arrive in the order of their start, and who waits for one may ask for the next any time. So a single one
        goes behind what is awaited, which keeps the link busy.
        """
        awaited = [transfer.claimed for transfer in self._queue.in_flight.values()]
        return all(awaited) if any(awaited) else len(awaited) < self._most_prefetches + more

    def _fly(self, transfers: Sequence[Transfer]) -> None:
        """Start the copies of transfers in flight that have none.

        An interrupt may come between taking a transfer and knowing its copy; then it is copied again, to the same slot.
        """
        assert self._copies is not None
        for transfer in transfers:
            if self._landing(transfer) is not None:
                continue
            buffer = self._pool.buffer(transfer.slot)
            try:
                self._landings[transfer.key] = transfer, self._copies.start(transfer.key, buffer)
            except Exception as error:  # it belongs to whoever asked for the record
                self._report(transfer, error)

    def _landing(self, transfer: Transfer) -> Landing | None:
        """The copy of a transfer, None where it has not started; those of the key's earlier transfers do not count."""
        known = self._landings.get(transfer.key)
        return known[1] if known is not None and known[0] is transfer else None

    def _wake(self, count: int = 1) -> None:
        """Something may start that could not before."""
        if self._copies is None:
            self._work.notify(count)
        else:
            self._may_start = True
            self.poll()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # A stream's side.

    def _ask(self, keys: Sequence[ExpertKey], kept: Callable[[], None] | None = None) -> Ticket:
        """Pin what is resident and queue what is missing; waits for nothing."""
        ticket = Ticket()
        residency, stats = self._residency, self.stats
        slots, consume, used = residency.slots, residency.window.consume, self._policy.used
        with self._lock:
            self._check_open()
            self._open_tickets.add(ticket)
            try:
                for key in dict.fromkeys(keys):
                    used(key)
                    consume(key)
                    if key in slots:
                        residency.use(key)
                        ticket.ready.append(key)
                        stats.hits += 1
                    else:
                        self._want(key, ticket)
                if kept is not None:
                    kept()
                if ticket.pending:
                    self._wake(len(ticket.pending))
            except BaseException:
                residency.forget_window()
                self._release(ticket)
                raise
        return ticket

    def _want(self, key: ExpertKey, ticket: Ticket) -> None:
        transfer = self._queue.in_flight.get(key)
        if transfer is None:
            self._store.record_bytes(key)  # an unknown expert is refused here, in the caller's thread
            self._queue.demands.setdefault(key)
            self.stats.misses += 1
        else:
            self.stats.late += 1
            self.stats.prefetched_used += transfer.cause == "prefetch" and not transfer.claimed
            transfer.claimed = True
        self._waiters.setdefault(key, []).append(ticket)
        ticket.pending.add(key)

    def _advance(self, ticket: Ticket) -> ExpertKey | None:
        """Unpin what the ticket has yielded and wait for its next expert; None, and the ticket closed, at the end."""
        with self._lock:
            if ticket not in self._open_tickets:
                return None
            # Out of the ticket first: an interrupt may come in between, and nothing may be unpinned twice.
            done = ticket.held.copy()
            ticket.held.clear()
            self._residency.unpin(done)
            if self._queue.may_start(done):
                self._wake()
            self._wait_while(ticket, lambda: bool(ticket.pending) and not ticket.ready)
            if not ticket.ready:
                self._release(ticket)
                return None
            key = ticket.ready.popleft()
            ticket.held.append(key)
            return key

    def _check(self, ticket: Ticket) -> None:
        if ticket.error is not None or (ticket.pending and (self._fault is not None or self._closed)):
            self._wait_for_all(ticket)

    def _wait_for_all(self, ticket: Ticket) -> None:
        with self._lock:
            self._wait_while(ticket, lambda: bool(ticket.pending))

    def _wait_while(self, ticket: Ticket, lacking: Callable[[], bool]) -> None:
        """Wait as long as the ticket lacks something; an error of it, or an interrupt, releases it."""
        try:
            while lacking():
                self._wait(ticket)
            if ticket.error is not None:
                raise ticket.error
        except BaseException:
            self._release(ticket)
            raise

    def _wait(self, ticket: Ticket) -> None:
        if ticket.error is not None:
            raise ticket.error
        self._check_open()
        started = time.perf_counter()
        if self._copies is None:
            notified = self._arrived.wait(_CHECK_S)
        else:
            self.poll()
            notified = bool(self._queue.in_flight) or not ticket.pending
        self.stats.wait_s += time.perf_counter() - started
        if notified:
            return
        if self._copies is None and not self._readers.alive():
            raise StorageError(
                expected="running reader threads",
                found="none in this process",
                mend="make the cache in the process that uses it, after any fork",
            )
        if self._stuck():
            raise PlanError(
                expected=f"a slot for {self._store.describe(next(iter(ticket.pending)))}",
                found=f"all {self._pool.num_slots} held by streams that were left open, by this thread or an ended one",
                mend="exhaust or close each stream before the next, best in a `with`; a larger cache (--expert-cache) "
                "holds more open ones",
            )

    def _stuck(self) -> bool:
        """Whether only this thread, which waits, or one that has ended could free a slot."""
        residency, this = self._residency, threading.current_thread()
        if self._queue.in_flight or residency.num_free or len(residency.pins) < len(residency.slots):
            return False
        holders = (other.thread for other in self._open_tickets if other.held or other.ready)
        return all(thread is this or not thread.is_alive() for thread in holders)

    def _release(self, ticket: Ticket) -> None:
        """Unpin all that the ticket holds and withdraw what it waits for."""
        self._open_tickets.discard(ticket)
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
        if self._queue.may_start(unpinned):
            self._wake()

    def _end(self, ticket: Ticket) -> None:
        with self._lock:
            if ticket in self._open_tickets:
                self._release(ticket)

    def _check_open(self) -> None:
        if self._fault is not None:
            raise self._fault
        if self._closed:
            raise StorageError(
                expected="an open expert cache", found="one that is closed", mend="stream before closing the cache"
            )

    # The readers' side.

    def _take(self) -> Transfer | None:
        """Wait for a transfer that can start; None when the cache closes."""
        with self._lock:
            while not self._closed:
                transfer = self._queue.take()
                if transfer is not None:
                    if self._queue.num_queued:
                        self._work.notify()  # each reader that starts wakes the next
                    return transfer
                self._work.wait()
        return None

    def _read(self, transfer: Transfer) -> int:
        return self._store.read_into(transfer.key, self._pool.buffer(transfer.slot), lambda: self._landed(transfer))

    def _landed(self, transfer: Transfer) -> None:
        with self._lock:
            self._queue.leave_link(transfer)

    def _report(self, transfer: Transfer, outcome: int | BaseException) -> None:
        """Hand the record, or the error, to the streams that wait for it.

        An interrupt of a thread that polls may come in between: what is then done again changes nothing, and tickets
        that are released meanwhile find themselves among the waiters still.
        """
        with self._lock:
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

    def _crash(self, error: BaseException) -> None:
        """A reader ended by a fault of the cache or its policy: no stream may wait for it."""
        with self._lock:
            self._fault = error
            self._arrived.notify_all()

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
