"""The exact experts of every layer, computed from slots that the cache fills: raw records as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from runtime.gpu.accelerator import Accelerator
from runtime.gpu.slots import DevicePool
from runtime.kernels.dispatch import Backend
from runtime.kernels.gate import FreshList
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

    def is_fresh(self, key: ExpertKey, slot: int) -> bool:
        """Whether what lies in a slot has to be admitted before kernels read it."""

    def fresh_of(self, place: int) -> FreshList | None:
        """Where a gate lists records that a layer needs and that are not admitted; None where none ever is."""

    def admit_listed(self, place: int) -> None:
        """Queue that those are."""

    def note_listed(self) -> None:
        """Queue, behind the last layer of a pass with gates, that `settle` sees what was found."""

    def forget_listed(self) -> None:
        """After a pass that was given up: `settle` says nothing of what was found, and faults are looked for again."""

    def admitted(self, slots: Mapping[ExpertKey, int]) -> None:
        """A pass has computed a layer from these, and admitted those that it listed."""

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

    def is_fresh(self, key: ExpertKey, slot: int) -> bool:
        """See `SlotExperts`."""
        return False

    def fresh_of(self, place: int) -> FreshList | None:
        """See `SlotExperts`."""
        return None

    def admit_listed(self, place: int) -> None:
        """See `SlotExperts`; there are none."""

    def note_listed(self) -> None:
        """See `SlotExperts`; there are none."""

    def forget_listed(self) -> None:
        """See `SlotExperts`; there are none."""

    def admitted(self, slots: Mapping[ExpertKey, int]) -> None:
        """See `SlotExperts`; there are none."""

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
