from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moespeq_cli.bench import link
from tests.gpu.stand_in import Processor


class Clock:
    """Copies one after the other at a rate; whoever waits for one moves the time on."""

    def __init__(self, bytes_per_s: float) -> None:
        self.now, self._free, self._rate = 0.0, 0.0, bytes_per_s

    def start(self, num_bytes: int) -> Paced:
        self._free = max(self._free, self.now) + num_bytes / self._rate
        return Paced(self, self._free, num_bytes)


class Paced:
    def __init__(self, clock: Clock, end: float, num_bytes: int) -> None:
        self._clock, self._end, self.num_bytes = clock, end, num_bytes

    def done(self) -> bool:
        return self._clock.now >= self._end

    def wait(self) -> None:
        self._clock.now = max(self._clock.now, self._end)


@pytest.mark.parametrize("bytes_per_s", [1e9, 54e9])
def test_the_rate_is_that_of_copies_behind_each_other(bytes_per_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, started, waited = Clock(bytes_per_s), [], []
    sources = [torch.zeros(size, dtype=torch.uint8) for size in (1 << 12, 1 << 10, 1 << 13)]

    def start(self: Processor, to: Tensor, source: Tensor) -> Paced:
        assert len(to) == len(source)
        started.append(source)
        return clock.start(len(to))

    def catch_up(self: Processor) -> None:
        assert not started
        waited.append(self)

    monkeypatch.setattr(Processor, "start_copy", start)
    monkeypatch.setattr(Processor, "catch_up", catch_up)
    monkeypatch.setattr(link.time, "perf_counter", lambda: clock.now)
    assert link.copy_bytes_per_s(Processor(), sources) == pytest.approx(bytes_per_s)
    assert [id(source) for source in started] == [id(source) for source in (sources[0], *sources)]
    assert len(waited) == 1  # the device's memory may be what kernels still read
