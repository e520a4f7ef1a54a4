"""Which expert is in which slot, and which slot can be had."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from runtime.memory.eviction import EvictionPolicy
from runtime.memory.location import ExpertKey
from runtime.memory.stats import CacheStats
from runtime.memory.window import Window


class Residency:
    """The table of slots. It has no lock: the cache holds its own around every call that changes something.

    Attributes:
        slots: slot of each resident expert, least recently used or loaded first.
        pins: how many streams hold each pinned expert; absent means none.
        window: the announced plan.
    """

    def __init__(self, num_slots: int, policy: EvictionPolicy, stats: CacheStats) -> None:
        self.slots: OrderedDict[ExpertKey, int] = OrderedDict()
        self.pins: dict[ExpertKey, int] = {}
        self.window = Window()
        self._policy = policy
        self._stats = stats
        self._free = list(range(num_slots - 1, -1, -1))
        self._unused: dict[ExpertKey, int] = {}  # bytes of prefetched records that nothing has asked for yet

    @property
    def num_free(self) -> int:
        """Slots that hold nothing and that no read is filling."""
        return len(self._free)

    def claim(self, keep_before: int | None) -> int | None:
        """A slot to read into, or None while there is none.

        Args:
            keep_before: None for a demand, which may evict any unpinned expert; a prefetch keeps those whose next use
                lies before this position of the window.
        """
        if self._free:
            return self._free.pop()
        victim = self._policy.victim(self._candidates(keep_before), self.window.next_use)
        if victim is None:
            return None
        self._stats.evictions += 1
        if (unused_bytes := self._unused.pop(victim, None)) is not None:
            self._stats.prefetched_unused += 1
            self._stats.prefetched_unused_bytes += unused_bytes
        return self.slots.pop(victim)

    def give_back(self, slot: int) -> None:
        """A claimed slot whose read failed."""
        self._free.append(slot)

    def settle(self, key: ExpertKey, slot: int, unused_bytes: int | None) -> None:
        """A claimed slot whose read is done; unused_bytes is the size of a prefetched record without a taker."""
        self.slots[key] = slot
        if unused_bytes is not None:
            self._unused[key] = unused_bytes

    def pin(self, key: ExpertKey) -> None:
        """Keep a resident expert until as many unpins."""
        self.pins[key] = self.pins.get(key, 0) + 1

    def use(self, key: ExpertKey) -> None:
        """Pin a resident expert for a stream and make it the most recently used."""
        self.slots.move_to_end(key)
        self.pins[key] = self.pins.get(key, 0) + 1
        if self._unused and self._unused.pop(key, None) is not None:
            self._stats.prefetched_used += 1

    def unpin(self, keys: Iterable[ExpertKey]) -> None:
        """Take back one pin of each key."""
        for key in keys:
            count = self.pins.pop(key)
            if count > 1:
                self.pins[key] = count - 1

    def evictable_for(self, key: ExpertKey, keep_before: int) -> bool:
        """Whether this resident expert may give way to a prefetch with that limit."""
        position = self.window.next_use.get(key)
        return position is None or position >= keep_before

    def _candidates(self, keep_before: int | None) -> Iterator[ExpertKey]:
        pins = self.pins
        if keep_before is None:
            return (key for key in self.slots if key not in pins)
        next_use = self.window.next_use
        return (key for key in self.slots if key not in pins and next_use.get(key, keep_before) >= keep_before)
