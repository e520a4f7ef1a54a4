"""Passes recorded as CUDA graphs, with graphs that only say what was asked of them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from runtime.errors import PlanError
from runtime.gpu.accelerator import Bring, Cuda


class Graph:
    """A capture that can be ended once, and not at all after an allocation failed in it."""

    begun = 0
    interrupt_at = 0
    broken = False

    def __init__(self) -> None:
        self._capturing = False

    def capture_begin(self, **_: Any) -> None:
        Graph.begun += 1
        if Graph.begun == Graph.interrupt_at:
            raise KeyboardInterrupt
        self._capturing = True

    def capture_end(self) -> None:
        if not self._capturing or Graph.broken:
            raise RuntimeError("operation failed due to a previous error during capture")
        self._capturing = False


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    for name, value in (("begun", 0), ("interrupt_at", 0), ("broken", False)):
        monkeypatch.setattr(Graph, name, value)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    made: Any = object.__new__(Cuda)
    made._graphs, made._memory, made._anchor, made.device = True, None, Graph(), torch.device("cpu")
    made.active = nullcontext
    found: Cuda = made
    return found


def forward(boundary: Bring) -> None:
    for place in range(3):
        boundary(place)


def test_an_interrupt_between_two_parts_of_a_pass_stays_one(cuda: Cuda) -> None:
    cuda.record(forward, cut=True)
    assert Graph.begun == 4
    Graph.interrupt_at = 6
    with pytest.raises(KeyboardInterrupt):
        cuda.record(forward, cut=True)


def test_memory_that_ends_while_a_pass_is_recorded_is_said(cuda: Cuda) -> None:
    """The capture is invalid then, and ending it is refused too."""

    def full(boundary: Bring) -> None:
        Graph.broken = True
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")

    with pytest.raises(PlanError, match="Tried to allocate"):
        cuda.record(full, cut=False)
