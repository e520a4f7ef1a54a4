"""How fast the link moves copies that follow one another."""

from __future__ import annotations

import time
from collections import deque

from runtime.memory.stats import CacheStats
from runtime.memory.transfer import Transfer

_NEWEST = 31  # stretches


class Pace:
    """The rate of copies that the link moved without a pause, as they are seen to arrive.

    Who looks for a copy sees it arrive late, and the link may have stood still since. But copies arrive in the order of
    their start: where a look finds one still under way, those that were started by then follow it without a pause. So a
    stretch begins with a copy that may have found the link empty, at its start, or where the one before ends; it ends
    with an arrival after which the next copy was found under way. If nothing shows that the link had work all the time
    it does not count. A stretch seems too long where its end was seen later than its begin, too short where sooner; so
    the rate is that of the middle one of the newest.
    """

    def __init__(self, stats: CacheStats) -> None:
        self._stats = stats
        self._busy_at = 0.0  # when the last look found a copy under way
        self._begin: float | None = None  # of the stretch
        self._bytes = 0  # that have arrived in it
        self._seen_at: float | None = None  # the last arrival, until a look finds the next copy under way
        self._rates: deque[float] = deque(maxlen=_NEWEST)  # of stretches, bytes a second

    def busy(self) -> None:
        """A look has found the first copy still under way."""
        self._busy_at = time.perf_counter()
        if self._seen_at is None or self._begin is None:
            return
        if self._seen_at > self._begin:
            self._rates.append(self._bytes / (self._seen_at - self._begin))
            self._stats.paced_bytes_per_s = sorted(self._rates)[(len(self._rates) - 1) // 2]
        self._begin, self._bytes, self._seen_at = self._seen_at, 0, None

    def arrived(self, transfer: Transfer, num_bytes: int, following: Transfer | None) -> None:
        """A look has found the first copy arrived; `following` is the one behind it, if that has been started."""
        if following is None:
            self.pause()
        elif following.started > self._busy_at:
            self._begin, self._bytes, self._seen_at = following.started, 0, None
        else:
            if self._begin is None:
                self._begin = transfer.started
            self._bytes += num_bytes
            self._seen_at = time.perf_counter()

    def pause(self) -> None:
        """The link may have stood still."""
        self._begin, self._bytes, self._seen_at = None, 0, None
