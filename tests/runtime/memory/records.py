"""Shards of random records, and stores that are slow or fail."""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from runtime.memory.cache import ExpertCache
from runtime.memory.eviction import EvictionPolicy, make_policy
from runtime.memory.location import PAGE_BYTES, ExpertKey, RecordLocation
from runtime.memory.slots import SlotPool

RECORD_BYTES = 2 * PAGE_BYTES


def write_shards(
    folder: Path, keys: Sequence[ExpertKey], num_shards: int = 2, payload_bytes: int = RECORD_BYTES - 1000
) -> tuple[dict[ExpertKey, RecordLocation], dict[ExpertKey, bytes]]:
    """Records of random bytes, dealt to the shards in turn; their places and their payloads."""
    rng = random.Random(7)
    padded_bytes = -(-payload_bytes // PAGE_BYTES) * PAGE_BYTES
    blobs = [bytearray(rng.randbytes(PAGE_BYTES)) for _ in range(num_shards)]
    locations, payloads = {}, {}
    for index, key in enumerate(keys):
        shard = index % num_shards
        payloads[key] = rng.randbytes(payload_bytes)
        digest = hashlib.sha256(payloads[key]).hexdigest()
        path = folder / f"target-{shard:04}.safetensors"
        locations[key] = RecordLocation(path, len(blobs[shard]), payload_bytes, padded_bytes, digest)
        blobs[shard] += payloads[key] + bytes(padded_bytes - payload_bytes)
    for shard, blob in enumerate(blobs):
        (folder / f"target-{shard:04}.safetensors").write_bytes(blob)
    return locations, payloads


class MemoryStore:
    """A store without files: `content(key)` repeated; each read waits `delay_s`, then calls `before`."""

    def __init__(self, record_bytes: int = PAGE_BYTES, delay_s: float = 0.0) -> None:
        self.max_record_bytes = record_bytes
        self.delay_s = delay_s
        self.before: Callable[[ExpertKey], None] = lambda key: None
        self.order: list[ExpertKey] = []
        self.most_parallel = 0
        self._now = 0
        self._lock = threading.Lock()

    def record_bytes(self, key: ExpertKey) -> int:
        return self.max_record_bytes

    def describe(self, key: ExpertKey) -> str:
        return f"memory (layer {key[0]}, expert {key[1]})"

    def read_into(self, key: ExpertKey, buffer: memoryview, landed: Callable[[], None] | None = None) -> int:
        with self._lock:
            self.order.append(key)
            self._now += 1
            self.most_parallel = max(self.most_parallel, self._now)
        try:
            time.sleep(self.delay_s)
            self.before(key)
            buffer[: self.max_record_bytes] = content(key) * (self.max_record_bytes // 2)
        finally:
            with self._lock:
                self._now -= 1
        return self.max_record_bytes


def content(key: ExpertKey) -> bytes:
    """Two bytes that tell the key."""
    return bytes([key[0] + 1, key[1] + 1])


def make_cache(
    store: MemoryStore, num_slots: int, policy: str | EvictionPolicy = "lookahead", readers: int = 2
) -> ExpertCache:
    """A cache of this store, to be closed by the test."""
    chosen = make_policy(policy) if isinstance(policy, str) else policy
    return ExpertCache(store, SlotPool(num_slots, store.max_record_bytes), chosen, readers)


def serve(cache: ExpertCache, keys: Sequence[ExpertKey]) -> list[ExpertKey]:
    """Stream the keys, check what each slot holds, and return the order they came in."""
    order = []
    for key, tensor in cache.stream(keys):
        assert tensor[:2].tolist() == list(content(key)), f"{key} holds {tensor[:2].tolist()}"
        assert tensor[-2:].tolist() == list(content(key))
        order.append(key)
    assert sorted(order) == sorted(set(keys))
    return order


def resident(cache: ExpertCache, key: ExpertKey) -> bool:
    """Whether the expert is in a slot, its read finished."""
    return key in cache._residency.slots


def settle(cache: ExpertCache, until: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Wait until the cache's readers have brought about a state."""
    end = time.monotonic() + timeout_s
    while not until():
        assert time.monotonic() < end, f"the readers stand still: {cache.stats.snapshot()}"
        time.sleep(0.001)
