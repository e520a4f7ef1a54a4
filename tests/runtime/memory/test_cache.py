from __future__ import annotations

import hashlib
import threading
import time
from pathlib import Path

import pytest

from runtime.errors import ArtifactError, PlanError, StorageError
from runtime.memory import store as store_module
from runtime.memory.cache import ExpertCache
from runtime.memory.eviction import LruPolicy, make_policy
from runtime.memory.location import PAGE_BYTES, ExpertKey
from runtime.memory.slots import SlotPool
from runtime.memory.store import RecordStore

from .records import MemoryStore, content, make_cache, resident, serve, settle, write_shards

A, B, C, D, E, F = ((0, expert) for expert in range(6))


def test_residents_come_first_and_each_key_once() -> None:
    with make_cache(MemoryStore(), 4) as cache:
        serve(cache, [A, B])
        assert serve(cache, [C, A, C, B, A])[:2] == [A, B]
        assert (cache.stats.hits, cache.stats.misses) == (2, 3)
        assert cache.stats.demand_bytes == 3 * PAGE_BYTES
        assert all(resident(cache, key) for key in (A, B, C)) and not resident(cache, D)
        assert cache.missing_bytes([A, D, E, D]) == 2 * PAGE_BYTES
        assert serve(cache, []) == []


@pytest.mark.parametrize("num_slots", [1, 2, 3, 16])
@pytest.mark.parametrize("readers", [1, 4])
def test_serves_more_experts_than_slots_in_waves(num_slots: int, readers: int) -> None:
    keys = [(layer, expert) for layer in range(2) for expert in range(8)]
    with make_cache(MemoryStore(), num_slots, readers=readers) as cache:
        for _ in range(3):
            serve(cache, keys)
        assert cache.stats.requests == 48


def test_arrivals_come_in_order_of_arrival() -> None:
    store = MemoryStore()
    gate = threading.Event()
    store.before = lambda key: gate.wait(5) and None if key == A else None
    with make_cache(store, 4) as cache:
        stream = cache.stream([A, B])
        assert next(stream)[0] == B
        gate.set()
        assert next(stream)[0] == A


def test_reads_begin_before_the_first_next() -> None:
    with make_cache(MemoryStore(), 4, readers=1) as cache:
        stream = cache.stream([A, B])
        settle(cache, lambda: resident(cache, A) and resident(cache, B))
        assert cache.stats.wait_s == 0
        assert [key for key, _ in stream] == [A, B]


def test_parallel_reads_are_bounded_by_the_readers() -> None:
    store = MemoryStore(delay_s=0.01)
    with make_cache(store, 8, readers=3) as cache:
        serve(cache, [A, B, C, D, E, F])
        assert store.most_parallel == 3
        assert cache.stats.link_busy_s <= cache.stats.read_s <= 3.1 * cache.stats.link_busy_s


def test_busy_time_grows_while_the_link_is_never_idle() -> None:
    store = MemoryStore()
    last = threading.Event()
    store.before = lambda key: last.wait(5) and None if key == F else time.sleep(0.02)
    with make_cache(store, 8, readers=2) as cache:
        started = time.perf_counter()
        cache.announce([[F, A, B, C]])
        settle(cache, lambda: resident(cache, C))
        busy_s, elapsed_s = cache.stats.link_busy_s, time.perf_counter() - started
        assert 0.06 <= busy_s <= elapsed_s  # F is in flight all the time
        last.set()
        settle(cache, lambda: resident(cache, F))
        time.sleep(0.05)
        assert cache.stats.link_busy_s <= time.perf_counter() - started - 0.05  # idle time does not count
        before_s, started = cache.stats.link_busy_s, time.perf_counter()
        serve(cache, [E])
        assert 0.02 <= cache.stats.link_busy_s - before_s <= time.perf_counter() - started


def test_checksums_of_first_reads_are_no_link_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really_hash = hashlib.sha256

    def slow(data: memoryview) -> object:
        time.sleep(0.05)
        return really_hash(data)

    locations, _ = write_shards(tmp_path, [A, B, C])
    monkeypatch.setattr(store_module.hashlib, "sha256", slow)
    with (
        RecordStore(locations) as store,
        ExpertCache(store, SlotPool(3, store.max_record_bytes), make_policy("lru"), 1) as cache,
    ):
        started = time.perf_counter()
        assert len(list(cache.stream([A, B, C]))) == 3
        assert 0 < cache.stats.link_busy_s <= time.perf_counter() - started - 0.15
        assert cache.stats.link_busy_s == pytest.approx(cache.stats.read_s, abs=0.001)  # one reader


def test_prefetch_fills_free_slots_earliest_row_first() -> None:
    store = MemoryStore()
    with make_cache(store, 8, readers=1) as cache:
        cache.announce([[A, B], [B, C], [D]])
        settle(cache, lambda: resident(cache, D))
        assert store.order == [A, B, C, D]
        serve(cache, [A, B])
        assert (cache.stats.hits, cache.stats.misses, cache.stats.prefetched_used) == (2, 0, 2)
        assert (cache.stats.demand_bytes, cache.stats.prefetch_bytes) == (0, 4 * PAGE_BYTES)


def test_fetch_rows_bounds_the_prefetch() -> None:
    store = MemoryStore()
    with make_cache(store, 8) as cache:
        cache.announce([[A], [B], [C]], fetch_rows=0)
        time.sleep(0.05)
        assert store.order == []
        cache.announce([[A], [B], [C]], fetch_rows=2)
        settle(cache, lambda: resident(cache, A) and resident(cache, B))
        time.sleep(0.02)
        assert sorted(store.order) == [A, B]


def test_prefetch_displaces_only_what_is_needed_strictly_later() -> None:
    store = MemoryStore()
    with make_cache(store, 2, readers=1) as cache:
        serve(cache, [A])
        serve(cache, [B])
        cache.announce([[A, B], [C], [B]])  # C comes with row 1; A and B are needed in row 0
        time.sleep(0.05)
        assert store.order == [A, B]
        serve(cache, [A, B])  # now A is not needed any more and B only in row 2
        settle(cache, lambda: resident(cache, C))
        assert resident(cache, B) and not resident(cache, A)
        cache.announce([[D], [B], [C]])  # both are needed, C last
        settle(cache, lambda: resident(cache, D))
        assert resident(cache, B) and not resident(cache, C)
        assert cache.stats.prefetched_unused == 1 and cache.stats.prefetched_unused_bytes == PAGE_BYTES


def test_prefetch_never_displaces_what_its_own_row_needs() -> None:
    store = MemoryStore()
    with make_cache(store, 1, readers=1) as cache:
        serve(cache, [B])
        cache.announce([[A, B]])
        time.sleep(0.05)
        assert store.order == [B]
        cache.announce([[A], [B]])
        settle(cache, lambda: resident(cache, A))


def test_rows_of_one_pass_do_not_displace_each_other() -> None:
    store = MemoryStore()
    with make_cache(store, 1, readers=1) as cache:
        serve(cache, [B])
        cache.announce([[A], [B]], pass_rows=2)
        time.sleep(0.05)
        assert store.order == [B]


def test_demand_evicts_the_furthest_next_use() -> None:
    with make_cache(MemoryStore(), 3) as cache:
        serve(cache, [A, B, C])
        cache.announce([[D, A], [C], [B]], fetch_rows=0)
        serve(cache, [D])
        assert not resident(cache, B) and resident(cache, A) and resident(cache, C)


def test_a_key_counts_by_its_use_after_the_pass() -> None:
    with make_cache(MemoryStore(), 2) as cache:
        serve(cache, [A, B])
        cache.announce([[A, C], [B], [A]], fetch_rows=0)
        serve(cache, [A])
        serve(cache, [C])  # A is needed in row 2, B in row 1
        assert resident(cache, B) and not resident(cache, A)


def test_new_announcement_cancels_queued_prefetches() -> None:
    store = MemoryStore()
    gate = threading.Event()
    store.before = lambda key: gate.wait(5) and None
    with make_cache(store, 8, readers=1) as cache:
        cache.announce([[A, B, C]])
        settle(cache, lambda: store.order == [A])
        cache.announce([[D]])
        gate.set()
        settle(cache, lambda: resident(cache, D))
        assert store.order == [A, D]


def test_demand_overtakes_queued_prefetches() -> None:
    store = MemoryStore()
    gate = threading.Event()
    store.before = lambda key: gate.wait(5) and None
    with make_cache(store, 8, readers=1) as cache:
        cache.announce([[A, B, C, D]])
        settle(cache, lambda: store.order == [A])
        stream = cache.stream([A, D, F])
        gate.set()
        assert {key for key, _ in stream} == {A, D, F}
        settle(cache, lambda: resident(cache, C))
        assert store.order == [A, D, F, B, C]
        assert (cache.stats.late, cache.stats.misses, cache.stats.prefetched_used) == (1, 2, 1)
        assert cache.stats.prefetch_bytes == 3 * PAGE_BYTES and cache.stats.demand_bytes == 2 * PAGE_BYTES


def test_demand_waits_for_prefetches_that_fill_all_slots() -> None:
    store = MemoryStore(delay_s=0.02)
    with make_cache(store, 2, readers=2) as cache:
        cache.announce([[A, B]])
        settle(cache, lambda: len(store.order) == 2)
        serve(cache, [C, D])
        assert cache.stats.prefetched_unused == 2


def test_tensor_is_untouched_until_the_iterator_advances() -> None:
    with make_cache(MemoryStore(), 1, readers=2) as cache:
        stream = cache.stream([A])
        key, tensor = next(stream)
        cache.announce([[B]])
        other = threading.Thread(target=lambda: serve(cache, [C]))
        other.start()
        time.sleep(0.05)
        assert tensor[:2].tolist() == list(content(key)) and resident(cache, A)
        assert next(stream, None) is None
        other.join(5)
        assert not other.is_alive()


def test_reader_error_surfaces_within_a_second_and_names_the_expert() -> None:
    store = MemoryStore()

    def fail(key: ExpertKey) -> None:
        if key == B:
            raise RuntimeError("loose cable")

    store.before = fail
    with make_cache(store, 4) as cache:
        started = time.monotonic()
        with pytest.raises(StorageError, match=r"layer 0, expert 1.*loose cable") as caught:
            serve(cache, [A, B, C])
        assert time.monotonic() - started < 1
        assert isinstance(caught.value.__cause__, RuntimeError)
        serve(cache, [A, C, D])
        store.before = lambda key: None
        serve(cache, [B])  # a fault that has passed costs one more read
        assert not cache._residency.pins


def test_failed_prefetch_is_counted_left_to_demand_and_raised_there() -> None:
    store = MemoryStore()

    def fail(key: ExpertKey) -> None:
        raise OSError(5, "Input/output error")

    store.before = fail
    with make_cache(store, 1) as cache:
        for _ in range(3):
            cache.announce([[A]])
            settle(cache, lambda: cache.stats.failed_prefetches == 1)
        with pytest.raises(StorageError, match="Input/output error"):
            serve(cache, [A])
        assert store.order == [A, A]
        store.before = lambda key: None
        serve(cache, [B])


def test_damaged_record_of_a_pack_is_named_by_the_stream(tmp_path: Path) -> None:
    locations, payloads = write_shards(tmp_path, [A, B, C])
    blob = bytearray(locations[B].path.read_bytes())
    blob[locations[B].offset_bytes] ^= 255
    locations[B].path.write_bytes(blob)
    with (
        RecordStore(locations) as store,
        ExpertCache(store, SlotPool(2, store.max_record_bytes), make_policy("lookahead")) as cache,
    ):
        for key, tensor in cache.stream([A, C]):
            assert bytes(tensor.numpy())[: len(payloads[key])] == payloads[key]
        with pytest.raises(ArtifactError, match=r"target-0001.safetensors \(layer 0, expert 1\)"):
            list(cache.stream([A, B]))
        with pytest.raises(ArtifactError, match="layer 7, expert 7"):
            cache.stream([A, (7, 7)])
        assert not cache._residency.pins


def test_faulty_policy_ends_the_stream_with_its_error() -> None:
    class Broken(LruPolicy):
        def victim(self, *_: object) -> ExpertKey | None:
            raise ZeroDivisionError("policy")

    with make_cache(MemoryStore(), 1, Broken()) as cache:
        serve(cache, [A])
        with pytest.raises(ZeroDivisionError):
            serve(cache, [B])


def test_refuses_slots_that_are_too_small_and_no_readers() -> None:
    with pytest.raises(PlanError, match=str(2 * PAGE_BYTES)):
        ExpertCache(MemoryStore(2 * PAGE_BYTES), SlotPool(1, PAGE_BYTES), make_policy("lru"))
    with pytest.raises(PlanError, match="transfer"):
        make_cache(MemoryStore(), 1, readers=0)


def test_snapshot_is_plain_numbers() -> None:
    with make_cache(MemoryStore(), 2) as cache:
        assert cache.stats.snapshot()["hit_rate"] is None
        serve(cache, [A])
        serve(cache, [A])
        snapshot = cache.stats.snapshot()
    assert snapshot["hit_rate"] == 0.5 and snapshot["read_bytes"] == PAGE_BYTES and snapshot["requests"] == 2
    assert all(isinstance(value, int | float) for value in snapshot.values())


def test_hits_are_cheap() -> None:
    keys = [(0, expert) for expert in range(8)]
    with make_cache(MemoryStore(), 96) as cache:
        serve(cache, keys)
        rounds = 300
        started = time.perf_counter()
        for _ in range(rounds):
            for _key, _tensor in cache.stream(keys):
                pass
        each_us = (time.perf_counter() - started) / rounds / len(keys) * 1e6
    assert each_us < 50, f"{each_us:.1f} us a resident key"  # 1-2 us on a quiet machine
