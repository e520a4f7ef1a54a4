"""Copies that arrive late, without a device."""

from __future__ import annotations

from collections.abc import Callable

from runtime.memory.cache import ExpertCache
from runtime.memory.eviction import make_policy
from runtime.memory.location import PAGE_BYTES, ExpertKey
from runtime.memory.slots import SlotPool

from .records import MemoryStore, content

A, B, C, D = ((0, expert) for expert in range(4))


class Late:
    """A copy that arrives at the second look."""

    num_bytes = PAGE_BYTES

    def __init__(self, key: ExpertKey, buffer: memoryview) -> None:
        self._key, self._buffer, self._looks = key, buffer, 0

    def done(self) -> bool:
        self._looks += 1
        if self._looks == 2:
            self.wait()
        return self._looks >= 2

    def wait(self) -> None:
        self._buffer[:PAGE_BYTES] = content(self._key) * (PAGE_BYTES // 2)


class LateCopies:
    """Calls `after` when a copy has been started."""

    def __init__(self) -> None:
        self.started: list[ExpertKey] = []
        self.after: Callable[[ExpertKey], None] = lambda key: None

    def start(self, key: ExpertKey, buffer: memoryview) -> Late:
        self.started.append(key)
        landing = Late(key, buffer)
        self.after(key)
        return landing


def make(num_slots: int, policy: str = "lookahead") -> tuple[ExpertCache, LateCopies]:
    copies = LateCopies()
    pool = SlotPool(num_slots, PAGE_BYTES)
    return ExpertCache(MemoryStore(), pool, make_policy(policy), 2, copies), copies


def get(cache: ExpertCache, keys: list[ExpertKey]) -> None:
    """Hold the keys, wait for them, and look at what is in their slots."""
    with cache.hold(keys) as hold:
        slots = hold.wait()
        assert slots.keys() == set(keys)
        for key, slot in slots.items():
            assert bytes(cache._pool.tensor(slot)[:2].tolist()) == content(key)
