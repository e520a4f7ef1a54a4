"""How a stream ends: finished, left open, waiting for another, interrupted, or with the cache closed."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time

import pytest

from runtime.errors import PlanError, StorageError
from runtime.memory.location import ExpertKey

from .records import MemoryStore, make_cache, resident, serve, settle

A, B, C, D, E = ((0, expert) for expert in range(5))


@pytest.mark.parametrize("how", ["close", "break", "exception", "unstarted", "error"])
def test_an_unfinished_stream_gives_its_slots_back(how: str) -> None:
    with make_cache(MemoryStore(), 2) as cache:
        stream = cache.stream([A, B, C])
        if how == "close":
            next(stream)
            stream.close()
            stream.close()
            assert next(stream, None) is None
        elif how == "break":
            with stream:
                for _ in stream:
                    break
        elif how == "exception":
            with pytest.raises(ZeroDivisionError), stream:
                for _ in stream:
                    raise ZeroDivisionError
        elif how == "unstarted":
            with stream:
                pass
        elif how == "error":
            next(stream)
            stream._ticket.error = StorageError(expected="a record", found="none", mend="none")
            with pytest.raises(StorageError, match="a record"):
                list(stream)
        serve(cache, [D, E])
        assert not cache._residency.pins and not cache._tickets.open and not cache._queue.demands


@pytest.mark.parametrize("where", ["this thread", "a thread that has ended"])
def test_an_iterator_dropped_half_way_keeps_its_pins_and_the_next_stream_says_so(where: str) -> None:
    def drop() -> None:
        serve(cache, [A, B])
        for _ in cache.stream([A, B]):
            break

    with make_cache(MemoryStore(), 2) as cache:
        if where == "this thread":
            drop()
        else:
            thread = threading.Thread(target=drop)
            thread.start()
            thread.join(5)
        gc.collect()
        assert set(cache._residency.pins) == {A, B}
        assert serve(cache, [B, A]) == [B, A]
        with pytest.raises(PlanError, match="all 2 held by streams that were left open") as caught:
            serve(cache, [C])
        assert "in a `with`" in caught.value.mend


def test_two_streams_of_one_thread_that_block_each_other_are_refused() -> None:
    with make_cache(MemoryStore(), 1) as cache:
        held = cache.stream([A])
        next(held)
        with pytest.raises(PlanError, match="layer 0, expert 1"):
            serve(cache, [B])
        held.close()
        serve(cache, [B])


def test_a_stream_waits_for_slots_that_another_thread_holds() -> None:
    with make_cache(MemoryStore(), 1) as cache:
        asked, held = threading.Event(), []

        def hold() -> None:
            held.append(cache.stream([A]))
            settle(cache, lambda: resident(cache, A))
            asked.set()
            time.sleep(0.6)  # longer than a waiting stream takes to look for a deadlock
            list(held[0])

        other = threading.Thread(target=hold)
        other.start()
        asked.wait(5)
        serve(cache, [B])
        other.join(5)


def test_streams_of_several_threads_share_few_slots() -> None:
    keys = [(layer, expert) for layer in range(2) for expert in range(5)]
    faults: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for turn in range(15):
                serve(cache, [keys[(seed * 3 + turn * 7 + step) % 10] for step in range(4)])
        except BaseException as error:
            faults.append(error)

    with make_cache(MemoryStore(), 3, "lru") as cache:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert not any(thread.is_alive() for thread in threads) and not faults


def test_close_ends_threads_and_waiting_streams() -> None:
    before = threading.active_count()
    store = MemoryStore()
    gate = threading.Event()
    store.before = lambda key: gate.wait(5) and None
    cache = make_cache(store, 2, readers=4)
    assert threading.active_count() == before + 4
    faults: list[BaseException] = []

    def work() -> None:
        try:
            serve(cache, [A, B, C])
        except BaseException as error:
            faults.append(error)

    waiting = threading.Thread(target=work)
    waiting.start()
    settle(cache, lambda: len(store.order) == 2)
    closing = threading.Thread(target=cache.close)
    closing.start()
    waiting.join(5)
    assert isinstance(faults[0], StorageError)
    gate.set()
    closing.join(5)
    cache.close()
    assert threading.active_count() == before
    with pytest.raises(StorageError, match="closed"):
        cache.stream([A])
    with pytest.raises(StorageError, match="closed"):
        cache.announce([])


def test_an_interrupt_ends_a_wait_at_once_and_leaves_nothing_pinned() -> None:
    before = threading.active_count()
    store = MemoryStore()
    gate = threading.Event()
    store.before = lambda key: gate.wait(5) and None
    cache = make_cache(store, 1)
    main = threading.get_ident()
    timer = threading.Timer(0.1, lambda: signal.pthread_kill(main, signal.SIGINT))
    timer.start()
    try:
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            serve(cache, [A, B])
        assert time.monotonic() - started < 2
        assert not cache._residency.pins and not cache._tickets.open and not cache._queue.demands
    finally:
        gate.set()
        cache.close()
        timer.join()
    assert threading.active_count() == before


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_interrupt_while_a_wait_takes_the_lock_back_frees_no_lock_of_another() -> None:
    """With a plain Lock the wait gave up taking it, and the end of its `with` freed the lock that a reader had."""
    store = MemoryStore()
    gate = threading.Event()
    store.before = lambda key: gate.wait(5) and None
    main = threading.get_ident()

    def hold() -> None:
        settle(cache, lambda: store.order == [A])
        time.sleep(0.05)
        with cache._lock:
            cache._arrived.notify_all()  # the stream wakes, and finds the lock taken
            time.sleep(0.1)
            signal.pthread_kill(main, signal.SIGINT)
            time.sleep(0.1)

    with make_cache(store, 1) as cache:
        other = threading.Thread(target=hold)
        other.start()
        with pytest.raises(KeyboardInterrupt):
            serve(cache, [A, B])
        other.join(5)
        gate.set()
        assert not cache._residency.pins and not cache._tickets.open and not cache._queue.demands
        serve(cache, [B])


@pytest.mark.timeout(20)
def test_a_forked_child_is_told_that_it_has_no_readers() -> None:
    """Threads stay in the process that started them; waiting for them would take for ever."""
    with make_cache(MemoryStore(), 2) as cache:
        with cache._lock:  # no reader has it in the child
            child = os.fork()
        if not child:
            status = 1
            try:
                serve(cache, [A])
            except StorageError as error:
                status = 0 if "running reader threads" in str(error) else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        serve(cache, [A])


def test_streams_have_no_destructor() -> None:
    """An interrupt that arrives in one is lost."""
    with make_cache(MemoryStore(), 1) as cache:
        assert not hasattr(cache.stream([]), "__del__")


def test_an_interrupt_while_a_stream_advances_releases_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between taking a pin back and forgetting it: closing the stream must not take it back again."""
    with make_cache(MemoryStore(), 2) as cache:
        keys = [A, B, C]
        with pytest.raises(KeyboardInterrupt), cache.stream(keys) as stream:
            next(stream)
            may_start = cache._queue.may_start

            def interrupted(unpinned: list[ExpertKey]) -> bool:
                monkeypatch.setattr(cache._queue, "may_start", may_start)
                raise KeyboardInterrupt

            monkeypatch.setattr(cache._queue, "may_start", interrupted)
            next(stream)
        assert not cache._residency.pins
        assert sorted(serve(cache, keys)) == sorted(keys)
