"""What a run needs of a GPU: a stream, memory that copies reach, marks in the stream, and recorded passes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from runtime.errors import PlanError

Bring = Callable[[int], None]
"""Called before the experts of a layer compute: makes them ready. The argument counts layers with experts from 0."""

Forward = Callable[[Bring], None]
"""Queues a whole pass; calls what it is given before the experts of each layer, when their routing is queued."""

Run = Callable[[Bring | None], None]
"""Queues a recorded pass."""


_STAGING_BYTES = 4 << 20


class Mark(Protocol):
    """A place in the stream."""

    def wait(self) -> None:
        """Return when everything queued before it is done."""


class Accelerator(Protocol):
    """Where a run computes. One thread queues its work; copies may come from others.

    Attributes:
        device: of all tensors.
    """

    device: torch.device

    def active(self) -> AbstractContextManager[object]:
        """Everything queued inside goes to the run's stream."""

    def host(self, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A zeroed tensor in this machine's memory that copies to and from the device may pass by."""

    def mark(self) -> Mark:
        """A mark behind all that is queued by now."""

    def copy_in(self, to: Tensor, source: Tensor, pinned: bool) -> None:
        """Copy bytes from this machine's memory to the device beside whatever it computes; returns when they are there.

        Callable from any thread; each has a stream of its own.

        Args:
            to: uint8 [n] on the device; nothing queued reads or writes it.
            source: uint8 [n].
            pinned: whether the source may be read by the device itself.
        """

    def record(self, forward: Forward, cut: bool) -> Run:
        """Record a pass, to be queued many times with what its tensors then hold.

        Args:
            forward: queues it; called once here, with nothing computed.
            cut: whether a run stops before the experts of each layer: it waits for all before them and calls `bring`.
                Otherwise it is one piece.
        """


class CudaMark:
    """An event."""

    __slots__ = ("_event",)

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def wait(self) -> None:
        """See `Mark`."""
        self._event.synchronize()


class _Lane:
    """One thread's way to the device."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._staging: Tensor | None = None

    def copy(self, to: Tensor, source: Tensor, pinned: bool) -> None:
        if pinned:
            self._queue(to, source)
            return
        if self._staging is None:
            self._staging = torch.empty(_STAGING_BYTES, dtype=torch.uint8, pin_memory=True)
        for first in range(0, len(source), _STAGING_BYTES):
            part = source[first : first + _STAGING_BYTES]
            self._staging[: len(part)].copy_(part)
            self._queue(to[first : first + len(part)], self._staging[: len(part)])

    def _queue(self, to: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)
            self._done.record(self._stream)
        self._done.synchronize()


class Cuda:
    """The current GPU.

    Args:
        graphs: record passes as CUDA graphs; otherwise every run queues its launches anew.
    """

    def __init__(self, graphs: bool = True) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._graphs = graphs
        self._memory = torch.cuda.graph_pool_handle()
        self._lanes = threading.local()

    def active(self) -> AbstractContextManager[object]:
        """See `Accelerator`."""
        return torch.cuda.stream(self._stream)

    def host(self, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See `Accelerator`."""
        return torch.zeros(*sizes, dtype=dtype, pin_memory=True)

    def mark(self) -> Mark:
        """See `Accelerator`."""
        return CudaMark(self._stream)

    def copy_in(self, to: Tensor, source: Tensor, pinned: bool) -> None:
        """See `Accelerator`."""
        lane = getattr(self._lanes, "lane", None)
        if lane is None:
            torch.cuda.set_device(self.device)
            lane = self._lanes.lane = _Lane(self.device)
        lane.copy(to, source, pinned)

    def record(self, forward: Forward, cut: bool) -> Run:
        """See `Accelerator`; graphs of one accelerator share memory, so they run one after another.

        Raises:
            PlanError: the GPU has no memory left for it.
        """
        if not self._graphs:
            return self._plain(forward, cut)
        graphs: list[torch.cuda.CUDAGraph] = []
        places: list[int] = []

        def begin() -> None:
            graph = torch.cuda.CUDAGraph()
            # Other threads copy meanwhile, which a capture of the whole process would forbid.
            graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")
            graphs.append(graph)

        def boundary(place: int) -> None:
            if cut:
                graphs[-1].capture_end()
                places.append(place)
                begin()

        torch.cuda.synchronize(self.device)
        with self.active():
            begin()
            try:
                forward(boundary)
            except torch.cuda.OutOfMemoryError as error:
                raise PlanError(
                    expected="memory of the GPU for the passes",
                    found=str(error).splitlines()[0],
                    mend="make the expert cache smaller (--expert-cache), or the context (--context)",
                ) from error
            finally:
                graphs[-1].capture_end()

        def run(bring: Bring | None) -> None:
            for graph, place in zip(graphs, places, strict=False):
                graph.replay()
                self.mark().wait()
                assert bring is not None
                bring(place)
            graphs[-1].replay()

        return run

    def _plain(self, forward: Forward, cut: bool) -> Run:
        return plain(forward, cut, self.mark)


def plain(forward: Forward, cut: bool, mark: Callable[[], Mark]) -> Run:
    """A pass that is queued anew each time."""

    def run(bring: Bring | None) -> None:
        def stop(place: int) -> None:
            if cut:
                mark().wait()
                assert bring is not None
                bring(place)

        forward(stop)

    return run
