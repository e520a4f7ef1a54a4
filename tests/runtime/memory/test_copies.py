"""A cache whose copies are started and seen by the thread that uses it: order, refusals, pauses."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from runtime.errors import StorageError
from runtime.memory.cache import ExpertCache
from runtime.memory.eviction import make_policy
from runtime.memory.location import PAGE_BYTES, ExpertKey
from runtime.memory.slots import SlotPool

from .late_copies import A, B, C, D, get, make
from .records import MemoryStore, content, settle

E, F, G, X = ((0, expert) for expert in range(4, 8))


@pytest.mark.timeout(20)
@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_a_stream_of_more_experts_than_slots_comes_in_waves(num_slots: int) -> None:
    """One whose last copy under way has just arrived waits for no slot, even if it holds them all."""
    cache, copies = make(num_slots)
    with cache:
        for _ in range(2):
            with cache.stream([A, B, C, D]) as stream:
                came = [key for key, tensor in stream if bytes(tensor[:2].tolist()) == content(key)]
            assert sorted(came) == [A, B, C, D]
        assert copies.started[:4] == [A, B, C, D]


@pytest.mark.timeout(20)
def test_a_copy_that_cannot_start_is_an_error_of_those_who_wait() -> None:
    cache, copies = make(2)
    with cache:

        def refuse(key: ExpertKey) -> None:
            if key == B:
                raise RuntimeError("no way to the device")

        copies.after = refuse
        cache.announce([[B]])
        assert cache.stats.failed_prefetches == 1
        with pytest.raises(StorageError, match="no way to the device"):
            get(cache, [A, B])
        get(cache, [A, C])
        assert not cache._residency.pins and not cache._tickets.open


def test_a_pause_is_no_time_on_the_link() -> None:
    """Between two texts nobody polls; what arrives meanwhile was not under way for so long."""
    cache, _ = make(2)
    with cache:
        cache.announce([[A]])
        cache.rest()
        time.sleep(0.2)
        get(cache, [A])
        assert cache.stats.prefetch_reads == 1 and cache.stats.hits == 1
        assert cache.stats.link_busy_s < 0.1 and cache.stats.read_s < 0.1


@pytest.mark.timeout(20)
@pytest.mark.parametrize("late", [False, True], ids=["miss", "late"])
def test_one_prefetch_goes_behind_what_somebody_waits_for(late: bool) -> None:
    """Copies arrive in the order of their start; so what is asked for next stands behind one at most."""
    cache, copies = make(6)
    with cache:
        cache.announce([[A, B, C, D]])
        assert copies.started == [A, B]
        wanted = B if late else (9, 9)
        with cache.hold([wanted]) as hold:
            while not hold.complete:
                ahead = [A, B] if late else [A, B, wanted]
                assert copies.started in (ahead, [*ahead, C])
                cache.poll()
            assert C in copies.started  # the link was not left idle meanwhile
        while cache._queue.in_flight:
            cache.poll()
        assert set(copies.started) == {A, B, C, D, wanted}


def test_a_prefetch_whose_victim_went_to_a_demand_takes_the_place_of_what_nobody_needs() -> None:
    """Nothing else may be under way by then, and the next announcement long in coming."""
    cache, copies = make(2)
    with cache:
        get(cache, [A, B])
        cache.announce([[A, B], [C]])
        assert [fetch.victim for fetch in cache._queue._fetches.values()] == [A]
        with cache.hold([B]):
            get(cache, [D])
            for _ in range(4):
                cache.poll()
            assert copies.started == [A, B, D, C]


def look(cache: ExpertCache) -> None:
    """Until whatever may start has arrived."""
    for _ in range(12):
        cache.poll()


@pytest.mark.timeout(20)
def test_an_empty_link_brings_what_a_pass_that_waits_lacks_in_place_of_what_is_needed_last() -> None:
    """E and F would cost no read in place of A and B, which the pass has yet to use."""
    cache, copies = make(5)
    with cache:
        get(cache, [A, B, C, D, G])
        cache.announce([[A, B, E, F], [C, E], [D], [G], [B], [A]], fetch_rows=1)
        assert [(fetch.key, fetch.victim) for fetch in cache._queue._fetches.values()] == [(E, A), (F, B)]
        look(cache)
        assert copies.started == [A, B, C, D, G]  # nobody has had to wait
        under_way: list[int] = []
        copies.after = lambda key: under_way.append(len(cache._queue.in_flight))
        with cache.hold([X]) as hold:  # in place of G
            hold.wait()
            look(cache)
            assert copies.started[5:] == [X, E, F] and under_way == [1, 1, 1]
            assert cache.resident_slots().keys() == {A, B, X, E, F}
        get(cache, [A, B, E, F])
        assert cache.stats.misses == 6 and cache.stats.prefetched_used == 2


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "rows",
    [[[A], [E], [B], [C], [A]], [[A, B, E], [C], [B], [A]]],
    ids=["a later row lacks it", "the pass needs all there is"],
)
def test_nothing_else_is_displaced_by_what_is_needed_sooner(rows: list[list[ExpertKey]]) -> None:
    cache, copies = make(3)
    with cache:
        get(cache, [A, B, C])
        cache.announce(rows, fetch_rows=2)
        assert [(fetch.key, fetch.victim) for fetch in cache._queue._fetches.values()] == [(E, A)]
        with cache.hold([X]) as hold:  # in place of C
            hold.wait()
            look(cache)
            assert copies.started == [A, B, C, X]
            cache.announce(rows, fetch_rows=2)
            assert not cache._queue.lacking


def test_rest_starts_nothing_and_the_next_poll_does() -> None:
    cache, copies = make(4)
    with cache:
        cache.announce([[A, B, C]])
        assert copies.started == [A, B]
        cache.rest()
        assert copies.started == [A, B] and cache.num_resident == 2
        cache.poll()
        assert copies.started == [A, B, C]
    cache.rest()


def test_a_closed_cache_waits_for_what_is_under_way_and_starts_nothing() -> None:
    cache, copies = make(1)
    cache.announce([[A, B]])
    cache.close()
    assert copies.started == [A]
    assert bytes(cache._pool.tensor(0)[:2].tolist()) == content(A)
    cache.poll()
    cache.close()
    assert copies.started == [A]
    assert torch.all(cache._pool.tensor(0)[2:] != 0)


def test_fetches_beyond_those_of_one_schedule_come_too(monkeypatch: pytest.MonkeyPatch) -> None:
    unneeded, wanted = [(1, expert) for expert in range(10)], [(0, expert) for expert in range(12)]

    def started(most: int) -> list[ExpertKey]:
        for module in ("schedule", "transfer"):
            monkeypatch.setattr(f"runtime.memory.{module}.MOST_FETCHES", most)
        cache, copies = make(10)
        with cache:
            get(cache, unneeded)
            cache.announce([[key] for key in wanted])  # more than can give way, so that a play finds the fetches
            for _ in range(60):
                cache.poll()
        return copies.started

    assert started(100) == started(3) == [*unneeded, *wanted[:10]]


def test_fetches_that_failed_do_not_hold_up_what_is_behind_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("schedule", "transfer"):
        monkeypatch.setattr(f"runtime.memory.{module}.MOST_FETCHES", 2)
    cache, copies = make(2)
    with cache:

        def refuse(key: ExpertKey) -> None:
            if key in (A, B) and copies.started.count(key) == 1:
                raise RuntimeError("no way to the device")

        copies.after = refuse
        for _ in range(3):
            cache.announce([[A, B, C, D]])
            while cache._queue.in_flight:
                cache.poll()
        assert copies.started == [A, B, C, D] and cache.stats.failed_prefetches == 2
        get(cache, [A])  # which works this time
        get(cache, [C, D])
        cache.announce([[A]])
        assert copies.started[4:] == [A, D, A]


@pytest.mark.parametrize("known", [True, False])
def test_the_link_has_work_while_an_announcement_is_worked_through(
    monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    """What is started beforehand is what the link moves meanwhile; an announcement of something else starts nothing."""
    row = [(0, expert) for expert in range(20)]
    cache, copies = make(20)
    with cache:
        get(cache, [row[19]])
        cache.announce([row[:10]])
        assert len(copies.started) == 3, "two at a time beside the one that was asked for"
        cache.stats.link_busy_s = cache.stats.read_bytes / (PAGE_BYTES / 0.01)  # one record in 10 ms
        cache._plan_s = 0.05
        under_way: list[int] = []
        plan = cache._queue.plan

        def planned() -> None:
            under_way.append(len(cache._queue.in_flight))
            plan()

        monkeypatch.setattr(cache._queue, "plan", planned)
        cache.announce([row[:10], row[10:15]] if known else [row[10:15]])
        assert under_way == [2 + 5 if known else 2]


def test_an_empty_link_counts_as_idle_only_while_something_is_to_be_read() -> None:
    cache, _ = make(2)
    with cache:
        get(cache, [A, B])
        time.sleep(0.05)
        assert cache.stats.link_idle_s == 0
        cache.announce([[A, B], [C]])
        with cache.hold([A, B]):
            time.sleep(0.05)  # C waits for a slot
        for _ in range(6):
            cache.poll()
        idle_s = cache.stats.link_idle_s
        assert 0.05 <= idle_s < 0.1
        time.sleep(0.02)
        get(cache, [C, D])
        assert cache.stats.link_idle_s - idle_s < 0.01


def test_a_pause_between_two_texts_is_no_time_in_which_the_link_is_idle() -> None:
    """At the end of a text prefetches may be queued still, and nobody waits for them."""
    cache, _ = make(4)
    with cache:
        cache.announce([[A, B, C]])
        cache.rest()
        time.sleep(0.1)
        cache.recover()
        assert cache.stats.link_idle_s < 0.05
        cache.announce([[A, B, C], [D]])
        cache.rest()
        idle_s = cache.stats.link_idle_s
        time.sleep(0.1)
    assert cache.stats.link_idle_s - idle_s < 0.05


def test_a_prefetch_that_a_demand_overtook_is_nothing_to_be_read() -> None:
    store, begun = MemoryStore(), threading.Event()
    store.before = lambda key: key == A and begun.wait(10) and None
    with ExpertCache(store, SlotPool(4, PAGE_BYTES), make_policy("lookahead"), 1) as cache:
        cache.announce([[A, C]])
        settle(cache, lambda: A in cache._queue.in_flight)
        with cache.hold([C]) as hold:
            begun.set()
            hold.wait()
        settle(cache, lambda: not cache._queue.num_queued)
        idle_s = cache.stats.link_idle_s
        time.sleep(0.1)
        cache.announce([[A, C]])
        assert cache.stats.link_idle_s - idle_s < 0.05
