"""Two tiers of memory over a disk: what the device holds, what the host holds beside it, and what is read."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch

from runtime.errors import StorageError
from runtime.gpu.host_tier import DISK_READS, HostCache, HostRecords
from runtime.gpu.slots import DevicePool
from runtime.memory.cache import ExpertCache
from runtime.memory.eviction import make_policy
from runtime.memory.location import PAGE_BYTES, ExpertKey
from runtime.memory.residency import Residency

from ..runtime.memory.records import MemoryStore, content, settle
from .stand_in import Processor

LAYERS, EXPERTS, TOP_K = 4, 12, 3
KEYS = [(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)]


@dataclass
class Tiers:
    """Both caches, and the disk below them."""

    device: ExpertCache
    host: HostCache
    disk: MemoryStore

    def ask(self, keys: Sequence[ExpertKey]) -> None:
        """Have experts on the device, and look whether they are themselves."""
        for key, record in self.device.stream(keys):
            assert record[:2].tolist() == record[-2:].tolist() == list(content(key))

    def on_device(self) -> set[ExpertKey]:
        return set(self.device.resident_slots())

    def in_host(self) -> set[ExpertKey]:
        return set(self.host.cache.resident_slots())

    @property
    def reads(self) -> int:
        return self.host.stats.demand_reads + self.host.stats.prefetch_reads


@contextmanager
def tiers(
    device_slots: int, host_slots: int, readers: int = 1, accelerator: Processor | None = None
) -> Iterator[Tiers]:
    disk, accelerator = MemoryStore(), accelerator or Processor()
    host = HostCache(disk, host_slots)
    try:
        records = HostRecords(disk, host, accelerator)
        pool = DevicePool(device_slots, PAGE_BYTES, accelerator.device)
        with ExpertCache(records, pool, make_policy("lookahead"), readers) as device:
            yield Tiers(device, host, disk)
    finally:
        host.close()


def rows(count: int, seed: int = 1) -> list[list[ExpertKey]]:
    """A quarter of each layer's experts come again in the next row."""
    rng, found = random.Random(seed), []
    chosen = [rng.sample(range(EXPERTS), TOP_K) for _ in range(LAYERS)]
    for _ in range(count):
        for layer in range(LAYERS):
            kept = [expert for expert in chosen[layer] if rng.random() < 0.25]
            others = [expert for expert in range(EXPERTS) if expert not in kept]
            chosen[layer] = kept + rng.sample(others, TOP_K - len(kept))
        found.append([(layer, expert) for layer in range(LAYERS) for expert in chosen[layer]])
    return found


def by_layer(row: Sequence[ExpertKey]) -> list[list[ExpertKey]]:
    return [[key for key in row if key[0] == layer] for layer in range(LAYERS)]


@pytest.mark.parametrize(("window", "prompts"), [(0, False), (4, False), (4, True)])
def test_the_tiers_come_to_hold_different_records(window: int, prompts: bool) -> None:
    """All but what fits in neither tier is somewhere in memory, so the disk is asked for the share of that."""
    trace, (device_slots, host_slots) = rows(160), (18, 24)
    with tiers(device_slots, host_slots) as both:
        for index, row in enumerate(trace):
            if index == 40:
                requests, reads = both.host.stats.requests, both.reads
            if prompts and index % 40 == 39:
                for layer in by_layer(KEYS):
                    both.ask(layer)
            if window:
                both.device.announce(trace[index : index + window], 2)
                both.host.announce(trace[index : index + window], 1, fetch=False)
            for layer in by_layer(row):
                both.ask(layer)
        share = (both.reads - reads) / (both.host.stats.requests - requests)
        bound = 1 - host_slots / (len(KEYS) - device_slots)
        assert 0.5 * bound < share < bound + 0.12  # two copies of each would be 0.5 and more
        twice = both.on_device() & both.in_host()
        assert len(twice) <= 4
        assert both.host.stats.returned > 0


def test_with_room_for_every_record_in_both_tiers_each_is_read_once() -> None:
    with tiers(20, len(KEYS) - 20 + 1) as both:
        for row in [KEYS, *rows(60)]:
            for layer in by_layer(row):
                both.ask(layer)
        assert sorted(both.disk.order) == KEYS


def test_what_the_device_lacks_stays_while_a_copy_of_what_it_has_could_go(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    inner = Residency._evict

    with tiers(10, 14) as both:
        host, device = both.host.cache._residency, both.device._residency

        def evict(residency: Residency, victim: ExpertKey) -> int | None:
            if residency is host:
                copies = [key for key in host.slots if key in device.slots and key not in host.pins]
                seen.append(victim in device.slots)
                assert victim in device.slots or not copies
            return inner(residency, victim)

        monkeypatch.setattr(Residency, "_evict", evict)
        for row in rows(80):
            for layer in by_layer(row):
                for key in layer:
                    both.ask([key])
    assert any(seen) and not all(seen)


def test_a_record_that_the_device_let_go_is_one_among_others_again() -> None:
    first, second = KEYS[:2]
    with tiers(1, 2) as both:
        for key in (first, second, first):
            both.ask([key])
            assert both.host.cache._residency.elsewhere == both.on_device() == {key}
        assert both.in_host() == {first, second} and both.reads == 2


def test_nothing_that_the_device_has_is_read_ahead() -> None:
    with tiers(6, 3) as both:
        both.ask(KEYS[:6])
        absent = KEYS[6:8]
        read = len(both.disk.order)
        both.host.announce([KEYS[:4], KEYS[2:8]], 1, fetch=True)
        settle(both.host.cache, lambda: both.host.stats.prefetch_reads == 2)
        assert set(both.disk.order[read:]) == set(absent) <= both.in_host()
        both.host.announce([KEYS[:6]], 1, fetch=True)
        assert both.host.cache._queue.num_queued == 0


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("device_slots", "host_slots"), [(1, 1), (3, 1), (12, 1), (12, 3), (5, 40), (30, 30)])
@pytest.mark.parametrize("readers", [1, 8])
def test_any_split_serves_the_same_records(device_slots: int, host_slots: int, readers: int) -> None:
    before = threading.active_count()
    trace, jitter = rows(25, seed=device_slots + host_slots), random.Random(3)
    with tiers(device_slots, host_slots, readers) as both:
        both.disk.before = lambda key: threading.Event().wait(jitter.choice((0, 0, 0.0005)))
        for index, row in enumerate(trace):
            both.device.announce(trace[index : index + 4], 2)
            both.host.announce(trace[index : index + 4], 1, fetch=True)
            for layer in by_layer(row):
                both.ask(layer)
    assert threading.active_count() == before


@pytest.mark.timeout(60)
def test_a_layers_misses_are_read_from_disk_together() -> None:
    together = threading.Barrier(DISK_READS)
    with tiers(12, 24, readers=8) as both:
        both.disk.before = lambda key: together.wait(10) and None
        both.ask(KEYS[:DISK_READS])
    assert both.disk.most_parallel == DISK_READS


class LostCopies(Processor):
    """Nothing comes back from the device."""

    def copy_out(self, to: torch.Tensor, source: torch.Tensor, pinned: bool) -> None:
        raise RuntimeError("the device is gone")


def test_a_copy_back_that_fails_is_an_error_and_leaves_nothing_half_here() -> None:
    first, second, *others = KEYS[:5]
    with tiers(1, 3, accelerator=LostCopies()) as both:
        host = both.host.cache
        both.ask([first])
        for key in others:  # the last one in the place of the copy of what the device has
            with host.hold([key]) as hold:
                hold.wait()
        assert both.in_host() == set(others)
        for key in others[:2]:
            host.passed_on(key)
        with pytest.raises(StorageError, match="the device is gone"):
            both.ask([second])
        assert first not in both.in_host() and first not in host._queue.in_flight
        both.ask([first, second])
        assert both.disk.order.count(first) == 2


class HalfCopies(Processor):
    """Copies to the device that break off half way, while told to."""

    broken = False

    def copy_in(self, to: torch.Tensor, source: torch.Tensor, pinned: bool) -> None:
        if self.broken:
            to[: len(to) // 2] = 0xFF
            raise RuntimeError("broke off")
        super().copy_in(to, source, pinned)


def test_a_slot_that_was_half_overwritten_gives_nothing_back() -> None:
    first, second, third, *others = KEYS[:7]
    accelerator = HalfCopies()
    with tiers(1, 4, accelerator=accelerator) as both:
        host = both.host.cache
        both.ask([first])
        accelerator.broken = True
        with pytest.raises(StorageError, match="broke off"):
            both.ask([second])
        accelerator.broken = False
        for key in others:
            with host.hold([key]) as hold:
                hold.wait()
        assert both.in_host() == set(others)  # the first one is nowhere but on disk
        for key in others[:3]:
            host.passed_on(key)
        both.ask([third])
        both.ask([first])


def test_what_is_asked_for_while_it_comes_back_is_not_read_again() -> None:
    wanted, other, busy = KEYS[0], KEYS[1], KEYS[2 : 2 + DISK_READS]
    gate = threading.Event()
    with tiers(1, 2 + DISK_READS) as both:
        host, disk = both.host.cache, both.disk
        disk.before = lambda key: gate.wait(10) and None
        with host.hold(busy) as first, host.hold([wanted, other]) as second:  # no reader is left for the second
            settle(host, lambda: len(host._queue.in_flight) == DISK_READS)

            def fill(slot: int) -> int:
                both.host._pool.buffer(slot)[:PAGE_BYTES] = content(wanted) * (PAGE_BYTES // 2)
                return PAGE_BYTES

            assert host.take_back(wanted, fill) and wanted in second.here()
            gate.set()
            first.wait()
            slots = second.wait()
            for key in (wanted, other):
                record = both.host._pool.tensor(slots[key])
                assert record[:2].tolist() == record[-2:].tolist() == list(content(key))
        assert sorted(disk.order) == sorted([other, *busy])
        assert host.stats.returned == 1 and not host._residency.pins


def test_after_the_end_nothing_is_taken_back() -> None:
    with tiers(1, 2) as both:
        both.ask(KEYS[:1])
    assert both.host.cache.take_back(KEYS[5], lambda slot: 1 // 0) is False


def test_a_record_that_could_not_be_read_leaves_the_one_before_it_known() -> None:
    def fail(key: ExpertKey) -> None:
        if key == KEYS[1]:
            raise OSError("bad sector")

    with tiers(1, 2) as both:
        both.ask([KEYS[0]])
        both.disk.before = fail
        with pytest.raises(StorageError, match="bad sector"):
            both.ask([KEYS[1]])
        both.disk.before = lambda key: None
        both.ask([KEYS[0], KEYS[1]])
        assert both.disk.order.count(KEYS[0]) == 1
