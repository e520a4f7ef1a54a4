from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.memory.cache import ExpertCache
from runtime.memory.clairvoyant import belady, replay
from runtime.memory.eviction import POLICIES, make_policy
from runtime.memory.location import ExpertKey, RecordLocation
from runtime.memory.schedule import Fetch
from runtime.memory.slots import SlotPool
from runtime.memory.store import RecordStore
from runtime.memory.window import Window

from .records import MemoryStore, make_cache, serve, settle, write_shards

NUM_LAYERS, NUM_EXPERTS = 3, 6
KEYS = [(layer, expert) for layer in range(NUM_LAYERS) for expert in range(NUM_EXPERTS)]

experts = st.lists(st.integers(0, NUM_EXPERTS - 1), min_size=1, max_size=4, unique=True)
rows = st.lists(experts, min_size=NUM_LAYERS, max_size=NUM_LAYERS).map(
    lambda row: [(layer, expert) for layer, chosen in enumerate(row) for expert in chosen]
)


class Shards:
    """Record files that all examples share."""

    def __init__(self, folder: Path) -> None:
        self.locations: dict[ExpertKey, RecordLocation]
        self.locations, self.payloads = write_shards(folder, KEYS)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Shards:
    return Shards(tmp_path_factory.mktemp("pack"))


class JitterStore(RecordStore):
    """Reads that take a random while, so that arrivals and prefetches interleave in many ways."""

    jitter = random.Random(0)

    def read_into(self, key: ExpertKey, buffer: memoryview, landed: Callable[[], None] | None = None) -> int:
        num_bytes = super().read_into(key, buffer, landed)
        time.sleep(self.jitter.choice((0, 0, 0.0002, 0.001)))
        return num_bytes


class RecordedWindow(Window):
    """Tells, apart from the positions, in which row each key is needed next."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[set[ExpertKey]] = []
        self.pass_rows = 1
        self.consumed: set[ExpertKey] = set()

    def announce(self, rows: Sequence[Sequence[ExpertKey]], fetch_rows: int | None, pass_rows: int) -> None:
        super().announce(rows, fetch_rows, pass_rows)
        self.rows, self.pass_rows, self.consumed = [set(row) for row in rows], pass_rows, set()
        assert [set(step.keys) for step in self._rows] == self.rows

    def consume(self, key: ExpertKey) -> None:
        super().consume(key)
        self.consumed.add(key)

    def row_of(self, position: int) -> int:
        row = sum(step.end <= position for step in self._rows)
        return 0 if row < self.pass_rows else row

    def next_row(self, key: ExpertKey) -> int | None:
        first = self.pass_rows if key in self.consumed else 0
        needed = [index for index, row in enumerate(self.rows) if index >= first and key in row]
        if not needed:
            return None
        return 0 if needed[0] < self.pass_rows else needed[0]


def audit(cache: ExpertCache, harm: list[str]) -> None:
    """Note every eviction that breaks the rules into `harm`."""
    residency, window = cache._residency, RecordedWindow()
    residency.window = window
    evict = residency._evict
    fetching: list[Fetch] = []

    def watched(claim: Callable[[Fetch], int | None]) -> Callable[[Fetch], int | None]:
        def watched_claim(fetch: Fetch) -> int | None:
            fetching.append(fetch)
            try:
                return claim(fetch)
            finally:
                fetching.clear()

        return watched_claim

    def watched_evict(victim: ExpertKey) -> int:
        if residency.num_free:
            harm.append(f"evicted {victim} with {residency.num_free} free slots")
        if victim in residency.pins:
            harm.append(f"evicted {victim}, which is pinned")
        for fetch in fetching:
            needed, lost = window.row_of(fetch.position), window.next_row(victim)
            if lost is not None and lost <= needed:
                harm.append(f"a prefetch of {fetch.key} for row {needed} evicted {victim} of row {lost}")
        return evict(victim)

    residency.claim_ahead = watched(residency.claim_ahead)  # type: ignore[method-assign]
    residency.claim_for_pass = watched(residency.claim_for_pass)  # type: ignore[method-assign]
    residency._evict = watched_evict  # type: ignore[method-assign]


@given(
    trace=st.lists(rows, min_size=1, max_size=6),
    num_slots=st.integers(1, len(KEYS) + 1),
    readers=st.integers(1, 4),
    policy=st.sampled_from(POLICIES),
    window=st.integers(0, 5),
    pass_rows=st.integers(1, 3),
    data=st.data(),
)
@settings(max_examples=120, deadline=None)
def test_streams_the_file_whatever_is_announced(
    shards: Shards,
    trace: list[list[ExpertKey]],
    num_slots: int,
    readers: int,
    policy: str,
    window: int,
    pass_rows: int,
    data: st.DataObject,
) -> None:
    harm: list[str] = []
    asked = 0
    num_threads = threading.active_count()
    with (
        JitterStore(shards.locations, direct=data.draw(st.booleans())) as store,
        ExpertCache(store, SlotPool(num_slots, store.max_record_bytes), make_policy(policy), readers) as cache,
    ):
        audit(cache, harm)
        for index in range(0, len(trace), pass_rows):
            tail = trace[index : index + window]
            if data.draw(st.booleans()):  # a wrong guess
                tail = [*tail[:1], data.draw(rows), *tail[2:]]
            cache.announce(tail, data.draw(st.none() | st.integers(0, 3)), pass_rows=pass_rows)
            for layer in range(NUM_LAYERS):
                keys = [key for row in trace[index : index + pass_rows] for key in row if key[0] == layer]
                asked += len(set(keys))
                came = []
                for key, tensor in cache.stream(keys):
                    payload = shards.payloads[key]
                    assert bytes(tensor[: len(payload)].numpy()) == payload, key
                    came.append(key)
                assert sorted(came) == sorted(set(keys))
        assert not cache._residency.pins and not cache._tickets.open and not cache._tickets._waiters
    stats = cache.stats
    assert not harm
    assert stats.requests == asked
    assert stats.demand_reads == stats.misses
    assert stats.prefetched_used + stats.prefetched_unused <= stats.prefetch_reads
    assert stats.read_bytes == (stats.demand_reads + stats.prefetch_reads) * store.max_record_bytes
    assert stats.prefetch_reads + stats.demand_reads - stats.evictions == len(cache._residency.slots) <= num_slots
    assert threading.active_count() == num_threads


@given(st.lists(rows, min_size=1, max_size=8), st.integers(1, 18), st.sampled_from(POLICIES), st.integers(0, 8))
@settings(max_examples=40, deadline=None)
def test_no_cache_reads_less_than_belady(
    trace: list[list[ExpertKey]], num_slots: int, policy: str, window: int
) -> None:
    demands = [[key for key in row if key[0] == layer] for row in trace for layer in range(NUM_LAYERS)]
    with make_cache(MemoryStore(), num_slots, policy) as cache:
        for index, row in enumerate(trace):
            cache.announce(trace[index : index + window])
            for layer in range(NUM_LAYERS):
                serve(cache, [key for key in row if key[0] == layer])
    assert cache.stats.prefetch_reads + cache.stats.demand_reads >= belady(demands, num_slots)


def local_trace(num_rows: int, num_layers: int = 6, num_experts: int = 16, top_k: int = 4) -> list[list[ExpertKey]]:
    """Rows that keep about a third of the experts of the row before, the rest drawn with favourites."""
    rng = random.Random(5)
    weights = [1 / (1 + expert) ** 0.5 for expert in range(num_experts)]
    chosen: list[list[int]] = [[] for _ in range(num_layers)]
    trace = []
    for _ in range(num_rows):
        for layer in range(num_layers):
            kept = [expert for expert in chosen[layer] if rng.random() < 0.35]
            while len(kept) < top_k:
                expert = rng.choices(range(num_experts), weights)[0]
                if expert not in kept:
                    kept.append(expert)
            chosen[layer] = kept
        trace.append([(layer, expert) for layer in range(num_layers) for expert in chosen[layer]])
    return trace


def run_trace(cache: ExpertCache, trace: list[list[ExpertKey]], window: int, fetch_rows: int) -> None:
    for index, row in enumerate(trace):
        if window:
            cache.announce(trace[index : index + window], fetch_rows)
        for layer in range(6):
            serve(cache, [key for key in row if key[0] == layer])


@pytest.mark.parametrize(("num_slots", "share_of_lru"), [(24, 0.78), (48, 0.65), (72, 0.65)])
def test_lookahead_moves_fewer_bytes_than_lru(num_slots: int, share_of_lru: float) -> None:
    trace = local_trace(60)
    demands = [[key for key in row if key[0] == layer] for row in trace for layer in range(6)]
    with make_cache(MemoryStore(), num_slots, "lru") as lru:
        run_trace(lru, trace, window=0, fetch_rows=0)
    moved = {}
    for fetch_rows in (0, 2):
        with make_cache(MemoryStore(), num_slots, "lookahead") as ahead:
            run_trace(ahead, trace, window=12, fetch_rows=fetch_rows)
        moved[fetch_rows] = ahead.stats.read_bytes
    bound = belady(demands, num_slots) * 4096
    assert bound <= min(moved.values())
    assert moved[2] <= 1.1 * moved[0]  # fetching ahead moves reads in time and adds few
    assert max(moved.values()) < share_of_lru * lru.stats.read_bytes
    assert abs(lru.stats.misses - replay(demands, num_slots, make_policy("lru")).misses) <= 0.02 * lru.stats.misses


def test_prefetch_hides_reads_behind_compute() -> None:
    trace = local_trace(10)
    waits = {}
    for fetch_rows in (0, 3):
        with make_cache(MemoryStore(delay_s=0.001), 48, readers=4) as cache:
            for index, row in enumerate(trace):
                cache.announce(trace[index : index + 4], fetch_rows)
                settle(cache, lambda current=cache: not current._queue.in_flight)  # drafting takes its time
                for layer in range(6):
                    serve(cache, [key for key in row if key[0] == layer])
        waits[fetch_rows] = cache.stats.wait_s
        assert cache.stats.failed_prefetches == 0
    assert waits[3] < 0.5 * waits[0]
