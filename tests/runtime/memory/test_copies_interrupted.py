"""Ctrl-C of the thread that asks for records, starts their copies and sees them arrive."""

from __future__ import annotations

import signal
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import pytest

from runtime.memory.cache import ExpertCache
from runtime.memory.copier import Copier
from runtime.memory.ranking import Ranking
from runtime.memory.residency import Residency
from runtime.memory.stream import Hold
from runtime.memory.tickets import Tickets
from runtime.memory.transfer import TransferQueue
from runtime.memory.window import Window

from .late_copies import A, B, C, D, get, make


@pytest.mark.timeout(20)
@pytest.mark.parametrize("where", ["start", "take", "settle", "loaded"])
@pytest.mark.parametrize("cause", ["demand", "prefetch"])
def test_an_interrupt_amid_a_copy_leaves_a_cache_that_goes_on(
    monkeypatch: pytest.MonkeyPatch, where: str, cause: str
) -> None:
    """The thread that polls is the one that Ctrl-C stops, and it spends its waits in there."""
    cache, copies = make(2)
    with cache:
        place = {"take": cache._queue, "settle": cache._residency, "loaded": cache._tickets._policy}
        whole = copies.start if where == "start" else getattr(place[where], where)

        def interrupted(*arguments: object) -> object:
            found = whole(*arguments)
            monkeypatch.setattr(copies if where == "start" else place[where], where, whole)
            signal.raise_signal(signal.SIGINT)
            return found

        monkeypatch.setattr(copies if where == "start" else place[where], where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            if cause == "prefetch":
                cache.announce([[A, B]])
            for _ in range(4):
                cache.poll()
            get(cache, [A, B])
        assert not cache._tickets.open and not cache._queue.demands
        for keys in ([A], [B, A], [C, D], [D, A]):
            get(cache, keys)


@pytest.mark.timeout(20)
def test_a_copy_that_an_interrupt_left_half_noted_is_not_noted_into_the_slot_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache, _ = make(2)
    with cache:
        settle = cache._residency.settle
        cache.announce([[A, B]])
        first: Any = cache._queue.in_flight[A].landing
        first._looks = -100

        def interrupted(*arguments: Any) -> None:
            settle(*arguments)
            monkeypatch.undo()
            first._looks = 1
            raise KeyboardInterrupt

        monkeypatch.setattr(cache._residency, "settle", interrupted)
        with pytest.raises(KeyboardInterrupt):
            while True:
                cache.poll()
        cache.recover()
        get(cache, [C, D])
        get(cache, [B])
        assert len(set(cache._residency.slots.values())) == cache.num_resident == 2


@dataclass
class Lines:
    """Lines of a file that are still to come before the interrupt; below 0 it has come."""

    left: int


@contextmanager
def interrupted(files: Collection[str], place: int) -> Iterator[Lines]:
    """Ctrl-C before the line of these files that comes after `place` others; it ends the block and is no error."""
    lines = Lines(place)

    def look(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in files:
            return look if event == "call" else None
        if event == "line":
            lines.left -= 1
            if lines.left == -1:
                raise KeyboardInterrupt
        return look

    traced = sys.gettrace()
    sys.settrace(look)
    try:
        yield lines
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(traced)


def test_an_interrupt_at_any_line_of_the_window_leaves_one_that_goes_on() -> None:
    """An announcement takes the host so long that Ctrl-C may well come in one."""
    file, rows = Window.announce.__code__.co_filename, [[A, B], [C, A], [B, D]]
    for place in range(1000):
        cache, _ = make(2)
        with cache:
            cache.announce(rows)
            get(cache, rows[0])
            with interrupted({file}, place) as lines:
                cache.announce([*rows[1:], [D, A]])
                get(cache, rows[1])
            for _ in range(2):
                for first in range(3):
                    cache.announce(rows[first:])
                    get(cache, rows[first])
        if lines.left >= 0:
            break
    assert 20 < place < 999


def test_an_interrupt_while_one_hold_lets_go_takes_nothing_from_another() -> None:
    file = Residency.unpin.__code__.co_filename
    for place in range(100):
        cache, _ = make(2)
        with cache:
            first, second = cache.hold([A, B]), cache.hold([B, A])
            first.wait(), second.wait()
            with interrupted(file, place) as lines:
                first.close()
            assert {A, B} <= cache._residency.pins.keys()
            second.close()
            cache.recover()
            get(cache, [C, D])
        if lines.left >= 0:
            break
    assert 4 < place < 99


@pytest.mark.timeout(60)
@pytest.mark.parametrize("policy", ["lfu", "priority"])
@pytest.mark.parametrize("num_slots", [2, 5])
def test_an_interrupt_at_any_line_of_the_ranking_leaves_all_slots_in_use(policy: str, num_slots: int) -> None:
    """One that is ranked nowhere would never give way, and one that is ranked though it is gone would go twice."""
    keys = [(layer, expert) for layer in range(2) for expert in range(5)]
    file = Ranking.put.__code__.co_filename
    for place in range(1000):
        cache, _ = make(num_slots, policy)
        with cache:
            get(cache, keys[2:4])
            get(cache, keys[:1])
            with interrupted({file}, place) as lines:
                cache.announce([keys[4:7], [keys[8], keys[1]]])
                get(cache, keys[:2])
                get(cache, [keys[8]])
            cache.rest()
            cache.recover()
            for first in [*range(10 - num_slots + 1)] * 2:
                get(cache, keys[first : first + num_slots])
            assert sorted(cache.resident_slots().values()) == list(range(num_slots))
        if lines.left >= 0:
            break
    assert 20 < place < 999


@pytest.mark.timeout(60)
@pytest.mark.parametrize("num_slots", [2, 5])
def test_an_interrupt_at_any_line_that_moves_records_leaves_all_slots_in_use(num_slots: int) -> None:
    """The thread that asks, starts the copies and sees them arrive is in one of these files most of the time."""
    moving = (ExpertCache.announce, Hold.wait, Tickets.ask, Copier.poll, TransferQueue.take, Residency.claim)
    files = {function.__code__.co_filename for function in moving}
    keys = [(layer, expert) for layer in range(2) for expert in range(4)]
    assert len(files) == len(moving)
    for place in range(3000):
        cache, copies = make(num_slots)
        with cache:
            with interrupted(files, place) as lines:
                cache.announce([[A, B], [C, D], [B, A]])
                get(cache, [A, B])
                cache.announce([[C, D], [B, A], [keys[4], A]])
                for _ in range(5):
                    cache.poll()
                with cache.stream([C, D]) as stream:
                    assert {key for key, _ in stream} == {C, D}
                cache.rest()
                get(cache, [keys[5], A])
            cache.recover()
            assert not cache._tickets.open and not cache._residency.pins
            for first in [*range(9 - num_slots)] * 2:
                get(cache, keys[first : first + num_slots])
            assert sorted(cache.resident_slots().values()) == list(range(num_slots))
            cache.announce([keys[:2], keys[2:4]])
            get(cache, keys[2:4])
            cache.announce([[keys[6]]])
        started = len(copies.started)
        cache.poll()
        assert len(copies.started) == started
        if lines.left >= 0:
            break
    assert 800 < place < 2999
