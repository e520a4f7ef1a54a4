"""Which expert is in which slot, and which slot can be had."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Container, Iterable
from typing import Protocol

from runtime.memory.eviction import EvictionPolicy
from runtime.memory.location import ExpertKey
from runtime.memory.ranking import Ranking
from runtime.memory.schedule import Fetch, schedule
from runtime.memory.stats import CacheStats
from runtime.memory.window import Window


class Board(Protocol):
    """Shows somebody else, who may be looking at any time, what is resident."""

    def put(self, key: ExpertKey, slot: int) -> None:
        """A record has come to a slot."""

    def withdraw(self, key: ExpertKey) -> bool:
        """An unpinned record is about to go; False if somebody may just be using it: then it stays."""


class Residency:
    """The table of slots. It has no lock: the cache holds its own around every call that changes something.

    Args:
        num_slots: slots.
        policy: picks who goes.
        stats: counts who went.
        board: told of all that comes and goes.

    Attributes:
        slots: slot of each resident expert, least recently used or loaded first.
        elsewhere: experts that whoever reads from this cache holds too, resident here or not.
        pins: how many streams hold each pinned expert; absent means none.
        window: the announced plan.
    """

    def __init__(self, num_slots: int, policy: EvictionPolicy, stats: CacheStats, board: Board | None = None) -> None:
        self.slots: OrderedDict[ExpertKey, int] = OrderedDict()
        self.pins: dict[ExpertKey, int] = {}
        self.elsewhere: set[ExpertKey] = set()
        self.window = Window()
        self._policy = policy
        self._ranking = None if policy.takes_first else Ranking(policy)
        self._stats = stats
        self._board = board
        self._num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._twice: dict[ExpertKey, None] = {}  # residents that are elsewhere too, the last to have gone there last
        self._unused: dict[ExpertKey, int] = {}  # bytes of prefetched records that nothing has asked for yet

    @property
    def num_free(self) -> int:
        """Slots that hold nothing and that no read is filling."""
        return len(self._free)

    def claim(self) -> int | None:
        """A slot for a demand, of any unpinned expert that the policy picks; None while there is none."""
        slot = self.claim_free()
        return self._evict_one() if slot is None else slot

    def claim_free(self) -> int | None:
        """A slot that holds nothing, or nothing that is not elsewhere too.

        Of the latter the last to have gone there: whoever holds it lets it go last, and so needs it here last.
        """
        if self._free:
            return self._free.pop()
        for key in reversed(self._twice):
            if key not in self.pins and (slot := self._evict(key)) is not None:
                return slot
        return None

    def claim_ahead(self, fetch: Fetch) -> int | None:
        """A slot for a prefetch: a free one, or its victim's once that has no use left before the newcomer's.

        Where the victim is gone already, `claim_spare` takes its part.
        """
        slot, victim = self.claim_free(), fetch.victim
        if slot is not None:
            return slot
        if victim is None or victim not in self.slots or not self.may_give_way(victim, fetch):
            return None
        return self._evict(victim)

    def lost_victim(self, fetch: Fetch) -> bool:
        """Whether nobody is left to give way to a prefetch."""
        return fetch.victim is None or fetch.victim not in self.slots

    def claim_spare(self) -> int | None:
        """The slot of an expert that the window does not need; None where it needs all."""
        return self._evict_one(needed=self.window.next_use)

    def claim_for_pass(self, fetch: Fetch) -> int | None:
        """A slot for a prefetch of the coming pass: of the unpinned expert whose next use is last, if behind the pass.

        This may add a read, as the demand would that comes otherwise.
        """
        next_use, pass_end = self.window.next_use, self.window.pass_end
        if fetch.position >= pass_end:
            return None
        free = (key for key in self.slots if key not in self.pins)
        victim = max(free, key=lambda key: next_use.get(key, math.inf), default=None)
        if victim is None or next_use.get(victim, math.inf) < pass_end:
            return None
        return self._evict(victim)

    def may_give_way(self, key: ExpertKey, fetch: Fetch) -> bool:
        """Whether a resident expert is unpinned and not needed up to the newcomer's use, or elsewhere too."""
        if key in self._twice:
            return key not in self.pins
        return key not in self.pins and self.window.next_use.get(key, fetch.position + 1) > fetch.position

    def forget_window(self) -> None:
        """Nothing is announced: what an interrupt left half changed would be wrong from then on."""
        self.window = Window()

    def schedule(self, on_their_way: Collection[ExpertKey], left_out: set[ExpertKey]) -> list[Fetch]:
        """The fetches of the window from what is resident or on its way now, without some that are neither."""
        num_free = len(self._free) + len(self._twice)
        not_needed = self.elsewhere | left_out if left_out else self.elsewhere
        return schedule(self.window, self.slots, on_their_way, num_free, self._policy, not_needed)

    def pass_on(self, key: ExpertKey) -> None:
        """Somebody has a copy of an expert, resident or not: here it gives way first and is not fetched ahead."""
        self.elsewhere.add(key)
        if key in self.slots:
            self._twice.pop(key, None)
            self._twice[key] = None

    def call_back(self, key: ExpertKey) -> None:
        """Nobody else has it any more."""
        self.elsewhere.discard(key)
        self._twice.pop(key, None)

    def recover(self, filling: Collection[int]) -> None:
        """Unpin everything, and count as free whatever slot neither holds an expert nor is among those being filled.

        Nobody looks at the board meanwhile.
        """
        taken = {*self.slots.values(), *filling}
        self.pins.clear()
        self._free = [slot for slot in range(self._num_slots - 1, -1, -1) if slot not in taken]
        if self._ranking is not None:
            self._ranking = Ranking(self._policy)
            for key in self.slots:
                self._ranking.put(key)
        if self._board is not None:
            for key, slot in self.slots.items():
                self._board.put(key, slot)

    def give_back(self, slot: int) -> None:
        """A claimed slot whose read failed."""
        self._free.append(slot)

    def settle(self, key: ExpertKey, slot: int, unused_bytes: int | None) -> None:
        """A claimed slot whose read is done; unused_bytes is the size of a prefetched record without a taker."""
        self.slots[key] = slot
        if self._ranking is not None:
            self._ranking.put(key)
        if key in self.elsewhere:
            self._twice[key] = None
        if self._board is not None:
            self._board.put(key, slot)
        if unused_bytes is not None:
            self._unused[key] = unused_bytes

    def pin(self, key: ExpertKey) -> None:
        """Keep a resident expert until as many unpins."""
        self.pins[key] = self.pins.get(key, 0) + 1

    def use(self, key: ExpertKey) -> None:
        """Pin a resident expert for a stream and make it the most recently used."""
        self.slots.move_to_end(key)
        if self._ranking is not None:
            self._ranking.put(key)
        self.pins[key] = self.pins.get(key, 0) + 1
        if self._unused and self._unused.pop(key, None) is not None:
            self._stats.prefetched_used += 1

    def unpin(self, keys: Iterable[ExpertKey]) -> None:
        """Take back one pin of each key."""
        for key in keys:
            if self.pins[key] > 1:
                self.pins[key] -= 1
            else:
                del self.pins[key]

    def _evict_one(self, needed: Container[ExpertKey] = ()) -> int | None:
        """The slot of the one that the policy picks among those unpinned and not needed; None while there is none."""
        pins, in_use = self.pins, set[ExpertKey]()
        while True:
            if self._ranking is not None:
                victim = self._ranking.first(lambda key: not (key in pins or key in needed or key in in_use))
            else:
                free = (key for key in self.slots if key not in pins and key not in needed)
                candidates = (key for key in free if key not in in_use) if in_use else free
                victim = self._policy.victim(candidates, self.window.next_use)
            if victim is None or (slot := self._evict(victim)) is not None:
                return None if victim is None else slot
            in_use.add(victim)

    def _evict(self, victim: ExpertKey) -> int | None:
        """The slot that an unpinned expert had; None if it is in use all the same."""
        if self._board is not None and not self._board.withdraw(victim):
            return None
        self._stats.evictions += 1
        self._twice.pop(victim, None)
        if self._ranking is not None:
            self._ranking.drop(victim)
        if (unused_bytes := self._unused.pop(victim, None)) is not None:
            self._stats.prefetched_unused += 1
            self._stats.prefetched_unused_bytes += unused_bytes
        return self.slots.pop(victim)
