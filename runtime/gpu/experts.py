"""The exact experts of every layer, computed from slots that the cache fills: raw records as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from runtime.gpu.accelerator import Accelerator
from runtime.gpu.slots import DevicePool
from runtime.kernels.dispatch import Backend
from runtime.memory.location import ExpertKey


class SlotExperts(Protocol):
    """What computes from slots; everything is queued on the run's stream.

    Attributes:
        pool: the slots, for the cache.
        num_bytes: of the device's memory for slots and what is kept beside them.
    """

    @property
    def pool(self) -> DevicePool: ...

    @property
    def num_bytes(self) -> int: ...

    def warm_up(self) -> None:
        """Queue the kernels that `run` of few tokens does not need once, with nothing to do."""

    def admit(self, slots: Mapping[ExpertKey, int]) -> None:
        """Make records that have arrived ready for kernels: for all that the next call reads, before it is queued."""

    def run(
        self,
        place: int,
        slot_of: Tensor,
        x: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        out: Tensor,
        *,
        pairs: Tensor | None = None,
        resume: bool = False,
    ) -> None:
        """Compute the experts of a layer that are in slots; see `ExpertKernels.run`.

        Args:
            place: the layer, counting those with experts from 0.
            slot_of: int32 [E], slots of admitted records.
        """

    def settle(self) -> None:
        """Wait for all that is queued.

        Raises:
            ArtifactError: a record admitted since the last time has faults; what was computed from it means nothing.
        """

    def release(self) -> None:
        """Give the memory of slots, and what is kept beside them, back; nothing is computed after it."""


class RawExperts:
    """See `SlotExperts`: records that are BF16 slots.

    Args:
        pool: the slots.
        kernels: compute layers from it.
        accelerator: where.
    """

    def __init__(self, pool: DevicePool, kernels: Backend, accelerator: Accelerator) -> None:
        self.pool, self._kernels, self._accelerator = pool, kernels, accelerator

    @property
    def num_bytes(self) -> int:
        """See `SlotExperts`."""
        return self.pool.whole.numel()

    def warm_up(self) -> None:
        """See `SlotExperts`; there are none."""

    def admit(self, slots: Mapping[ExpertKey, int]) -> None:
        """See `SlotExperts`; they are as they were on disk, where a checksum was compared."""

    def run(
        self,
        place: int,
        slot_of: Tensor,
        x: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        out: Tensor,
        *,
        pairs: Tensor | None = None,
        resume: bool = False,
    ) -> None:
        """See `SlotExperts`."""
        self._kernels.run(self.pool.whole, slot_of, x, top_k_index, top_k_weights, out, pairs=pairs, resume=resume)

    def settle(self) -> None:
        """See `SlotExperts`."""
        self._accelerator.mark().wait()

    def release(self) -> None:
        """See `SlotExperts`."""
        self.pool.release()
