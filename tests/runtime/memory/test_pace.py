"""The link's rate, from copies that are seen late."""

from __future__ import annotations

import random

import pytest

from runtime.memory import pace
from runtime.memory.pace import Pace
from runtime.memory.stats import CacheStats
from runtime.memory.transfer import Transfer

COPY_S = 1.0
COPY_BYTES = 100


class Host:
    """Starts copies on a link that serves one after the other, and looks for them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(pace.time, "perf_counter", lambda: self.now)
        self.stats = CacheStats()
        self.pace = Pace(self.stats)
        self._free = 0.0
        self._under_way: list[tuple[Transfer, float]] = []
        self.busy_s, self._busy_since = 0.0, 0.0  # as the queue counts them

    def start(self, copies: int) -> None:
        for _ in range(copies):
            self._free = max(self._free, self.now) + COPY_S
            if not self._under_way:
                self._busy_since = self.now
            self._under_way.append((Transfer((0, 0), 0, "prefetch", started=self.now), self._free))

    def look(self) -> bool:
        """Whether a copy was found to have arrived."""
        if not self._under_way:
            return False
        if self._under_way[0][1] > self.now:
            self.pace.busy()
            return False
        first, _ = self._under_way.pop(0)
        self.pace.arrived(first, COPY_BYTES, self._under_way[0][0] if self._under_way else None)
        self.stats.count_read("prefetch", COPY_BYTES)
        self.stats.link_busy_s += self.now - self._busy_since
        self._busy_since = self.now
        return True

    def work(self, copies: int, at_a_time: int, away: random.Random, mean_away_s: float, share_away: float) -> None:
        """Copy so many; now and then it does not look for a while."""
        while copies or self._under_way:
            if (room := min(at_a_time - len(self._under_way), copies)) > 0:
                self.start(room)
                copies -= room
            self.now += away.expovariate(1 / mean_away_s) if away.random() < share_away else 0.02
            while self.look() and copies and len(self._under_way) < at_a_time:
                self.start(1)
                copies -= 1
                self.now += 0.02


@pytest.mark.parametrize("at_a_time", [2, 3, 8])
@pytest.mark.parametrize("mean_away_s", [0.3, 1.5, 5.0])
@pytest.mark.parametrize("seed", range(4))
def test_rate_is_the_links_however_late_copies_are_seen(
    at_a_time: int, mean_away_s: float, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Host(monkeypatch)
    host.work(400, at_a_time, random.Random(seed), mean_away_s, share_away=0.02)
    assert host.stats.bytes_per_s == pytest.approx(COPY_BYTES / COPY_S, rel=0.06)


def test_time_in_which_nobody_looked_is_not_the_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the time that something seemed to be under way the link would be half as fast."""
    host = Host(monkeypatch)
    host.work(400, 3, random.Random(1), mean_away_s=8.0, share_away=0.02)
    assert host.stats.read_bytes / host.stats.link_busy_s < 0.75 * COPY_BYTES / COPY_S
    assert host.stats.bytes_per_s == pytest.approx(COPY_BYTES / COPY_S, rel=0.06)


def test_copies_seen_together_are_not_faster_than_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four that came while nobody looked are one stretch, or none, and never one in no time."""
    host = Host(monkeypatch)
    for _ in range(20):
        host.start(6)
        for step in (0.5, 0.6, 3.5, 0.01, 0.01, 0.01, 0.6, 5.0):
            host.now += step
            while host.look():
                host.now += 0.001
    assert 0.8 * COPY_BYTES / COPY_S < host.stats.bytes_per_s < 1.25 * COPY_BYTES / COPY_S


def test_a_pause_of_the_link_is_in_no_stretch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is started after the last look at a link at work may have found it standing still."""
    host = Host(monkeypatch)
    for _ in range(10):
        host.start(2)
        host.now += 10.0
        assert host.look()
        host.start(1)
        while host._under_way:
            host.look()
            host.now += 0.5
    assert host.stats.paced_bytes_per_s == 0
    assert 0 < host.stats.bytes_per_s < 0.5 * COPY_BYTES / COPY_S, "by the time with a copy under way"


def test_another_rate_is_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch)
    host.work(100, 3, random.Random(2), 1.0, 0.0)
    monkeypatch.setattr(f"{__name__}.COPY_S", 4.0)
    host.work(60, 3, random.Random(2), 1.0, 0.0)
    assert host.stats.bytes_per_s == pytest.approx(COPY_BYTES / 4.0, rel=0.05)
