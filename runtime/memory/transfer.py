"""What is to be read next, and what is being read."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

from runtime.memory.location import ExpertKey
from runtime.memory.residency import Residency
from runtime.memory.schedule import MOST_FETCHES, Fetch
from runtime.memory.stats import CacheStats

Cause = Literal["demand", "prefetch", "return"]


class Landing(Protocol):
    """A copy under way.

    Attributes:
        num_bytes: that it moves.
    """

    num_bytes: int

    def done(self) -> bool:
        """Whether it has arrived."""

    def wait(self) -> None:
        """Return when it has."""


@dataclass(slots=True)
class Transfer:
    """One read on its way into a claimed slot.

    Attributes:
        claimed: whether a stream asked for it before it arrived.
        started: when it went on the link, by `time.perf_counter`.
        read_s: seconds on the link; None while it is there.
        landing: its copy once that has started; None where a reader moves it.
    """

    key: ExpertKey
    slot: int
    cause: Cause
    claimed: bool = False
    started: float = 0.0
    read_s: float | None = None
    landing: Landing | None = None


class TransferQueue:
    """Demands in order of asking, then prefetches in order of need. No lock: the cache holds its own.

    Attributes:
        in_flight: what has left the queue and is not in its slot yet.
        demands: what somebody waits for, in order of asking.
        lacking: whether somebody has had to wait since the window was planned.
        closed: whether nothing is given out any more.
    """

    def __init__(self, residency: Residency, stats: CacheStats) -> None:
        self.in_flight: dict[ExpertKey, Transfer] = {}
        self.demands: dict[ExpertKey, None] = {}
        self.lacking = False
        self.closed = False
        self._failed: set[ExpertKey] = set()  # prefetches, until a demand has succeeded
        self._fetches: dict[ExpertKey, Fetch] = {}
        self._cut_short = False  # whether the window has more than these
        self._takers: dict[ExpertKey, Fetch] = {}  # by victim
        self._wants_spare = False  # whether a fetch may have lost its victim and found nobody else
        self._residency = residency
        self._stats = stats
        self._on_link = 0
        self._busy_since = 0.0  # up to here busy time is counted, while something is on the link
        self._idle_since: float | None = None  # since when it is empty though something is queued

    def plan(self) -> None:
        """Replace the queued prefetches by those of the window.

        Those already in flight go on; an expert whose prefetch failed is left to demand until one has succeeded.
        """
        self.lacking = False
        slots, in_flight, demands = self._residency.slots, self.in_flight, self.demands
        found = self._residency.schedule(in_flight, self._failed)
        self._cut_short = len(found) == MOST_FETCHES
        self._fetches = {
            fetch.key: fetch
            for fetch in found
            if not (fetch.key in slots or fetch.key in in_flight or fetch.key in demands)
        }
        self._takers = {fetch.victim: fetch for fetch in reversed(self._fetches.values()) if fetch.victim is not None}
        self._watch_link()

    @property
    def num_queued(self) -> int:
        """Transfers that wait for a reader or a slot; a prefetch overtaken by a demand may count still."""
        return len(self.demands) + len(self._fetches)

    def may_start(self, unpinned: Iterable[ExpertKey]) -> bool:
        """Whether these newly unpinned experts may give a queued transfer its slot."""
        if self.demands:
            return True
        if not self._fetches:
            return False
        residency, takers, next_use = self._residency, self._takers, self._residency.window.next_use
        return any(
            key in residency.elsewhere
            or (key in takers and residency.may_give_way(key, takers[key]))
            or (self._wants_spare and key not in next_use)
            for key in unpinned
        )

    def take(self) -> Transfer | None:
        """The next transfer with its slot, now in flight; None while nothing is queued or no slot can be had."""
        if self.demands:
            slot = self._residency.claim()
            if slot is None:
                return None
            key = next(iter(self.demands))
            del self.demands[key]
            return self._start(Transfer(key, slot, "demand", claimed=True))
        if self._cut_short and not self._fetches:
            self.plan()
        spare = True  # until the residents were looked through in vain
        for fetch in list(self._fetches.values()):
            if fetch.key in self._residency.slots or fetch.key in self.in_flight:
                del self._fetches[fetch.key]
                continue
            slot = self._residency.claim_ahead(fetch)
            if slot is None and spare and self._residency.lost_victim(fetch):
                slot = self._residency.claim_spare()
                spare = slot is not None
            if slot is not None:
                return self._prefetch(fetch, slot)
        self._wants_spare = not spare
        if self.lacking and not self._on_link and self._fetches:
            soonest = next(iter(self._fetches.values()))
            slot = self._residency.claim_for_pass(soonest)
            if slot is not None:
                return self._prefetch(soonest, slot)
        self._watch_link()  # what a demand overtook is queued no more
        return None

    def take_back(self, key: ExpertKey) -> Transfer | None:
        """A slot that nobody misses for an expert that comes without a read; None while there is none."""
        slot = self._residency.claim_free()
        if slot is None:
            return None
        awaited = key in self.demands
        transfer = self.in_flight[key] = Transfer(key, slot, "return", awaited, read_s=0.0)  # never on the link
        self.demands.pop(key, None)
        return transfer

    def leave_link(self, transfer: Transfer) -> float:
        """Count the time of a transfer whose bytes are there, and the link's busy time up to now; safe to repeat."""
        if transfer.read_s is None:
            now = time.perf_counter()
            transfer.read_s = now - transfer.started
            self._stats.read_s += transfer.read_s
            self._stats.link_busy_s += now - self._busy_since
            self._busy_since = now
            self._on_link -= 1
            self._watch_link()
        return transfer.read_s

    def finish(self, transfer: Transfer, num_bytes: int | None) -> None:
        """Take a transfer out of flight and count it; num_bytes None means that it failed and its slot is free."""
        self.leave_link(transfer)
        if num_bytes is None:
            del self.in_flight[transfer.key]
            self._residency.give_back(transfer.slot)
            if transfer.cause == "prefetch":
                self._failed.add(transfer.key)
                self._stats.failed_prefetches += 1
            return
        self._failed.discard(transfer.key)
        self._stats.count_read(transfer.cause, num_bytes)
        unused_bytes = num_bytes if transfer.cause == "prefetch" and not transfer.claimed else None
        self._residency.settle(transfer.key, transfer.slot, unused_bytes)
        del self.in_flight[transfer.key]

    def rest(self) -> None:
        """Count the time in which the link was idle up to now; from here to `clear` nobody waits for what is queued."""
        self._watch_link()
        if self._idle_since is not None:
            now = time.perf_counter()
            self._stats.link_idle_s += now - self._idle_since
            self._idle_since = now

    def clear(self) -> None:
        """Forget what is queued; that it waited since the last change is no idleness of the link."""
        self.demands.clear()
        self._fetches.clear()
        self._cut_short = False
        self._idle_since = None

    def close(self) -> None:
        """Give out nothing any more; what is in flight goes on."""
        self.closed = True
        self.clear()

    def recover(self) -> None:
        """Forget what is queued and who holds what; only what is in flight, and not in its slot yet, still counts."""
        self.clear()
        for key in self.in_flight.keys() & self._residency.slots.keys():
            del self.in_flight[key]
        under_way = self.in_flight.values()
        self._on_link = sum(transfer.read_s is None for transfer in under_way)
        self._residency.recover([transfer.slot for transfer in under_way])

    def _watch_link(self) -> None:
        """Count the time in which the link is empty though something is queued."""
        idle = not self._on_link and self.num_queued > 0
        if idle and self._idle_since is None:
            self._idle_since = time.perf_counter()
        elif not idle and self._idle_since is not None:
            self._stats.link_idle_s += time.perf_counter() - self._idle_since
            self._idle_since = None

    def _prefetch(self, fetch: Fetch, slot: int) -> Transfer:
        del self._fetches[fetch.key]
        return self._start(Transfer(fetch.key, slot, "prefetch"))

    def _start(self, transfer: Transfer) -> Transfer:
        transfer.started = time.perf_counter()
        if not self._on_link:
            self._busy_since = transfer.started
        self._on_link += 1
        self._wants_spare = True  # who gave way for it may have been the victim of another
        self._watch_link()
        self.in_flight[transfer.key] = transfer
        return transfer
