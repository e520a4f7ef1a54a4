"""What a run needs of a GPU: a stream, memory that copies reach, marks in the stream, and recorded passes."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from runtime.gpu.lane import Lane
from runtime.gpu.shortage import shortage
from runtime.kernels.driver import check, driver
from runtime.memory.transfer import Landing

Bring = Callable[[int], None]
"""Called before the experts of a layer compute: makes them ready. The argument counts layers with experts from 0."""

Forward = Callable[[Bring], None]
"""Queues a whole pass; calls what it is given before the experts of each layer, when their routing is queued."""

Run = Callable[[Bring | None], None]
"""Queues a recorded pass."""

SMALLER = "make the expert cache smaller (--expert-cache), or the context (--context)"


class Mark(Protocol):
    """A place in the stream."""

    def done(self) -> bool:
        """Whether everything queued before it is done."""

    def wait(self) -> None:
        """Return when it is."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of the device.

    Attributes:
        tensors: that they take now.
        most_tensors: that they took at most.
        taken: of the whole device now, by tensors, what is kept for them, recorded passes and libraries.
        most_taken: that they took at most.
    """

    tensors: int = 0
    most_tensors: int = 0
    taken: int = 0
    most_taken: int = 0


class Accelerator(Protocol):
    """Where a run computes. One thread queues its work; copies may come from others.

    Attributes:
        device: of all tensors.
    """

    device: torch.device
    needs_pinned: bool
    """Whether copies that nobody waits for need pinned memory."""
    meanwhile: Callable[[], None] | None
    """Called again and again while the run's thread waits for a mark."""

    def active(self) -> AbstractContextManager[object]:
        """Everything queued inside goes to the run's stream."""

    def catch_up(self) -> None:
        """Wait for all that the device was ever given.

        Between making tensors outside `active` and the first use inside: streams do not wait for each other, and on a
        device that others keep busy a table would be filled after it was written.
        """

    def host(self, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A zeroed tensor in this machine's memory that copies to and from the device may pass by."""

    def seen(self, host: Tensor) -> Tensor:
        """A tensor from `host` as the device reads it in place: int32 or int64, for the few bytes of `fetch`."""

    def fetch(self, to: Tensor, seen: Tensor) -> None:
        """Queue that a few bytes of the host come to a tensor of the device.

        By a kernel that reads them, as a copy would stand in line behind the experts on their way.
        """

    def mark(self) -> Mark:
        """A mark behind all that is queued by now."""

    def start_copy(self, to: Tensor, source: Tensor) -> Landing:
        """Begin what `copy_in` does, from pinned memory; behind all copies that were started before."""

    def copy_in(self, to: Tensor, source: Tensor, pinned: bool) -> None:
        """Copy bytes from this machine's memory to the device beside whatever it computes; returns when they are there.

        Callable from any thread; each has a stream of its own.

        Args:
            to: uint8 [n] on the device; nothing queued reads or writes it.
            source: uint8 [n].
            pinned: whether the source may be read by the device itself.
        """

    def copy_out(self, to: Tensor, source: Tensor, pinned: bool) -> None:
        """The way back: from the device to this machine's memory, as `copy_in`; nothing queued writes the source."""

    def forget_peak(self) -> None:
        """Give back what is kept for later, and measure from here on."""

    def memory(self) -> DeviceMemory:
        """What is taken of the device, and was at most since `forget_peak`."""

    def let_go(self) -> None:
        """Give the memory of recorded passes back; none of them may be run again."""

    def record(self, forward: Forward, cut: bool, gated: bool = False) -> Run:
        """Record a pass, to be queued many times with what its tensors then hold.

        Args:
            forward: queues it; called once here, with nothing computed.
            cut: whether a run stops before the experts of each layer: it waits for all before them and calls `bring`.
                Otherwise it is one piece.
            gated: whether it waits for the host at gates: a run then returns while the pass is under way.
        """


class CudaMark:
    """An event."""

    __slots__ = ("_event", "_meanwhile")

    def __init__(self, stream: torch.cuda.Stream, meanwhile: Callable[[], None] | None) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(stream)
        self._meanwhile = meanwhile

    def done(self) -> bool:
        """See `Mark`."""
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """See `Mark`."""
        if self._meanwhile is None:
            self._event.synchronize()
            return
        while not self._event.query():  # type: ignore[no-untyped-call]
            self._meanwhile()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep Python's collector still: what it frees of the GPU's, an older graph say, would end a capture."""
    gc.collect()
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class _HostMemory:
    """A pinned tensor under its address, which is the same for the device."""

    def __init__(self, host: Tensor) -> None:
        assert host.is_pinned() and host.is_contiguous() and host.dtype in (torch.int32, torch.int64)
        self._host = host
        self.__cuda_array_interface__ = {
            "shape": tuple(host.shape),
            "typestr": f"<i{host.element_size()}",
            "data": (host.data_ptr(), False),
            "strides": None,
            "version": 3,
        }


class _CopyLanding:
    """A copy and the event behind it."""

    __slots__ = ("_event", "num_bytes")

    def __init__(self, stream: torch.cuda.Stream, num_bytes: int) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(stream)
        self.num_bytes = num_bytes

    def done(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self._event.synchronize()


class Cuda:
    """The current GPU.

    Args:
        graphs: record passes as CUDA graphs; otherwise every run queues its launches anew.
    """

    needs_pinned = True

    def __init__(self, graphs: bool = True) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._graphs = graphs
        self.meanwhile: Callable[[], None] | None = None
        self._memory = torch.cuda.graph_pool_handle()
        self._anchor: torch.cuda.CUDAGraph | None = None  # keeps the memory's name alive when all passes are gone
        self._lanes = threading.local()
        self._copy_stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def active(self) -> AbstractContextManager[object]:
        """See `Accelerator`."""
        return torch.cuda.stream(self._stream)

    def catch_up(self) -> None:
        """See `Accelerator`."""
        torch.cuda.synchronize(self.device)

    def host(self, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See `Accelerator`."""
        return torch.zeros(*sizes, dtype=dtype, pin_memory=True)

    def seen(self, host: Tensor) -> Tensor:
        """See `Accelerator`."""
        return torch.as_tensor(_HostMemory(host), device=self.device)

    def fetch(self, to: Tensor, seen: Tensor) -> None:
        """See `Accelerator`."""
        torch.bitwise_or(seen, 0, out=to)

    def mark(self) -> Mark:
        """See `Accelerator`."""
        return CudaMark(self._stream, self.meanwhile)

    def forget_peak(self) -> None:
        """See `Accelerator`."""
        gc.collect()
        self.catch_up()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)

    def memory(self) -> DeviceMemory:
        """See `Accelerator`; what is taken beside torch's memory counts as of now, and hardly changes."""
        free, total = torch.cuda.mem_get_info(self.device)
        taken, reserved = total - free, torch.cuda.memory_reserved(self.device)
        return DeviceMemory(
            tensors=torch.cuda.memory_allocated(self.device),
            most_tensors=torch.cuda.max_memory_allocated(self.device),
            taken=taken,
            most_taken=taken - reserved + torch.cuda.max_memory_reserved(self.device),
        )

    def let_go(self) -> None:
        """See `Accelerator`."""
        self.catch_up()  # an interrupt may have left one running
        torch._C._cuda_clearCublasWorkspaces()  # 32 MiB for every stream that ever had a product
        self._anchor, self._memory = None, torch.cuda.graph_pool_handle()

    def start_copy(self, to: Tensor, source: Tensor) -> Landing:
        """See `Accelerator`."""
        # One stream: the engine serves one as long as it has copies, so another would wait, whatever its priority.
        stream = self._copy_stream
        # Not by Tensor.copy_: with the change of stream it takes the host five times as long.
        result = driver().cuMemcpyHtoDAsync_v2(to.data_ptr(), source.data_ptr(), len(to), stream.cuda_stream)
        check(result, f"a copy of {len(to)} bytes to the GPU")
        return _CopyLanding(stream, len(to))

    def copy_in(self, to: Tensor, source: Tensor, pinned: bool) -> None:
        """See `Accelerator`."""
        self._lane().copy(to, source, pinned)

    def copy_out(self, to: Tensor, source: Tensor, pinned: bool) -> None:
        """See `Accelerator`."""
        self._lane().copy_back(to, source, pinned)

    def _lane(self) -> Lane:
        """This thread's."""
        lane: Lane | None = getattr(self._lanes, "lane", None)
        if lane is None:
            torch.cuda.set_device(self.device)
            lane = self._lanes.lane = Lane(self.device)
        return lane

    def record(self, forward: Forward, cut: bool, gated: bool = False) -> Run:
        """See `Accelerator`; graphs of one accelerator share memory, so they run one after another.

        Raises:
            PlanError: the GPU has no memory left for it.
        """
        if not self._graphs:
            assert not gated, "the host would queue behind a gate and never come to open it"
            return self._plain(forward, cut)
        graphs: list[torch.cuda.CUDAGraph] = []
        places: list[int] = []

        if self._anchor is None:
            self._anchor = torch.cuda.CUDAGraph()
            with self.active(), torch.cuda.graph(self._anchor, pool=self._memory, stream=self._stream):
                torch.zeros(1, device=self.device)

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

        self.catch_up()
        with self.active(), _no_collection():
            begin()
            try:
                with shortage("memory of the GPU for the passes", SMALLER):
                    forward(boundary)
            except BaseException:
                with suppress(RuntimeError):  # of a capture that is over or invalid already
                    graphs[-1].capture_end()
                raise
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
