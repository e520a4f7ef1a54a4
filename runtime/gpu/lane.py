"""A thread's own way for bytes between this machine's memory and the GPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from runtime.kernels.device import numa_node
from runtime.memory.numa import preferred

_STAGING_BYTES = 4 << 20


class Lane:
    """A stream of one thread; copies end before they return.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._staging: Tensor | None = None

    def copy(self, to: Tensor, source: Tensor, pinned: bool) -> None:
        """See `Accelerator.copy_in`."""
        if pinned:
            self._queue(to, source)
            return
        for there, here, staging in self._staged(to, source):
            staging.copy_(here)
            self._queue(there, staging)

    def copy_back(self, to: Tensor, source: Tensor, pinned: bool) -> None:
        """See `Accelerator.copy_out`."""
        if pinned:
            self._queue(to, source)
            return
        for here, there, staging in self._staged(to, source):
            self._queue(staging, there)
            here.copy_(staging)

    def _staged(self, to: Tensor, source: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Pieces of both, and the staging memory that each passes through."""
        if self._staging is None:
            with preferred(numa_node()):
                self._staging = torch.empty(_STAGING_BYTES, dtype=torch.uint8, pin_memory=True)
        for first in range(0, len(source), _STAGING_BYTES):
            piece = source[first : first + _STAGING_BYTES]
            yield to[first : first + len(piece)], piece, self._staging[: len(piece)]

    def _queue(self, to: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)
            self._done.record(self._stream)
        self._done.synchronize()
