"""Gates: where a pass on the GPU tells the host which experts it needs, and waits for them inside its graph."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Protocol

from torch import Tensor

from runtime.kernels.compile import Source, load
from runtime.kernels.device import current_gpu
from runtime.kernels.launch import Kernel

FRESH = 1 << 30
"""Bit of a slot's number on the board: what lies in it is there, and not admitted yet."""

SOURCE = Source("gate.cu")
MOST_NEEDED = 256
"""Experts that a pass may name at one gate, an expert of several rows as often."""


@dataclass(frozen=True, slots=True)
class FreshList:
    """Records of a layer that a gate found there and not admitted; on the device.

    Attributes:
        payload_bytes: int64 [E], of each expert's record.
        slots, experts: int32 [n], -1 behind the last slot.
        bytes: int64 [n], of each record.
        faults: int32 [n], set to 0.
    """

    payload_bytes: Tensor
    slots: Tensor
    experts: Tensor
    bytes: Tensor
    faults: Tensor


class GateOps(Protocol):
    """Queued on the run's stream; `told`, `board` and `stop` are the host's memory, as the device reads it in place."""

    def open(self, index: Tensor, told: Tensor | None, board: Tensor, here: Tensor) -> None:
        """Tell the host what is needed, and see what is there.

        Args:
            index: int32 [M, k], experts, MOST_NEEDED at most.
            told: int32 [M, k], takes them; None where an operation ahead has told them.
            board: int32 [E], each expert's slot, with FRESH where it is not admitted, or -1.
            here: int32 [E], takes the slots of those needed, there and admitted; -1 for all others.
        """

    def wait(
        self, index: Tensor, board: Tensor, stop: Tensor, here: Tensor, late: Tensor, fresh: FreshList | None
    ) -> None:
        """Wait for what `open` did not find.

        Args:
            index, board, here: as in `open`.
            stop: int32 [1]; not 0 ends all waiting.
            late: int32 [E], takes the slots of those needed that `here` has not; -1 for all others.
            fresh: takes those of them that are not admitted; None where none ever is.
        """


class GateKernels:
    """See `GateOps`: cuda/gate.cu."""

    def open(self, index: Tensor, told: Tensor | None, board: Tensor, here: Tensor) -> None:
        """See `GateOps`."""
        _kernel(current_gpu().index, "gate_open").launch(
            1, (index, index.numel(), told, board, here, len(here)), programmatic=True
        )

    def wait(
        self, index: Tensor, board: Tensor, stop: Tensor, here: Tensor, late: Tensor, fresh: FreshList | None
    ) -> None:
        """See `GateOps`."""
        listed: tuple[Tensor | int | None, ...] = (None, None, None, None, None, 0)
        if fresh is not None:
            listed = (fresh.payload_bytes, fresh.slots, fresh.experts, fresh.bytes, fresh.faults, len(fresh.slots))
        args = (index, index.numel(), board, stop, here, late, len(here), *listed)
        _kernel(current_gpu().index, "gate_wait").launch(1, args, programmatic=True)


@cache
def _kernel(gpu_index: int, name: str) -> Kernel:
    """A kernel on the current GPU; `gpu_index` only keeps those of different GPUs apart."""
    return Kernel(load(SOURCE), name, MOST_NEEDED, beside_large=True)
