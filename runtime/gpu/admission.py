"""Residual records that have arrived in slots are admitted: checked on the device, without a wait for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from runtime.gpu.accelerator import Accelerator, Mark
from runtime.gpu.slots import DevicePool
from runtime.kernels.residual import ResidualPool
from runtime.memory.location import ExpertKey

_BATCH = 64  # records of one launch

Arrived = tuple[ExpertKey, int]
"""An expert and its slot."""


class ResidualSlots(DevicePool):
    """Slots that know whether what lies in them was admitted.

    Attributes:
        admitted: by slot.
    """

    def __init__(self, num_slots: int, slot_bytes: int, device: torch.device) -> None:
        super().__init__(num_slots, slot_bytes, device)
        self.admitted = [False] * num_slots

    def buffer(self, slot: int) -> Tensor:
        """The slot's memory, for a record that is about to come; it may be a reader's thread that asks."""
        self.admitted[slot] = False
        return super().buffer(slot)


class Admission:
    """Queues the checks of records and keeps what they find until somebody waits for the device anyway.

    Args:
        accelerator: where.
        slots: of the records.
    """

    def __init__(self, accelerator: Accelerator, slots: ResidualSlots) -> None:
        self._accelerator, self._slots = accelerator, slots
        most = max(slots.num_slots, _BATCH)
        self._pending: list[Arrived] = []  # in the order of their faults
        self._faults = torch.zeros(most, dtype=torch.int32, device=accelerator.device)
        self._faults_host = accelerator.host((most,), torch.int32)
        self._host = accelerator.host((2 * _BATCH,), torch.int64)  # lengths, then slots and the bank's slots in halves
        self._seen = accelerator.seen(self._host)
        self._device = torch.zeros_like(self._host, device=accelerator.device)
        self._sent: Mark | None = None

    def queue(self, pool: ResidualPool, arrived: Sequence[Arrived], payload_bytes: Mapping[ExpertKey, int]) -> None:
        """Check some records of one layer; slots of the bank are its experts.

        Args:
            pool: the layer's.
            arrived: not admitted yet.
            payload_bytes: of each record.
        """
        for first in range(0, len(arrived), _BATCH):
            some = arrived[first : first + _BATCH]
            self._send([payload_bytes[key] for key, _ in some], [slot for _, slot in some], [key[1] for key, _ in some])
            begin = len(self._pending)
            self._pending.extend(some)
            lengths, halves = self._device[:_BATCH], self._device[_BATCH:].view(torch.int32)
            count = len(some)
            faults = self._faults[begin : begin + count]
            pool.admit(halves[:count], halves[_BATCH : _BATCH + count], lengths[:count], faults)
            for _, slot in some:
                self._slots.admitted[slot] = True

    def has_room(self, count: int) -> bool:
        """Whether so many more can be queued before `settle`."""
        return len(self._pending) + count <= len(self._faults)

    def settle(self) -> list[tuple[ExpertKey, int]]:
        """Wait for all that is queued on the device.

        Returns:
            Records with faults that were queued since the last time, and how many of their blocks have one; they count
            as not admitted again.
        """
        count = len(self._pending)
        if count:
            self._faults_host[:count].copy_(self._faults[:count], non_blocking=True)
        self._accelerator.mark().wait()
        faulty = []
        for (key, slot), blocks in zip(self._pending, self._faults_host[:count].tolist(), strict=True):
            if blocks:
                self._slots.admitted[slot] = False
                faulty.append((key, blocks))
        if faulty:
            self._faults.zero_()
        self._pending.clear()
        return faulty

    def _send(self, lengths: Sequence[int], slots: Sequence[int], bank_slots: Sequence[int]) -> None:
        """Queue that the numbers of a batch come to the device."""
        if self._sent is not None:
            self._sent.wait()  # it has read the numbers of the last batch
        halves = self._host[_BATCH:].view(torch.int32)
        self._host[: len(lengths)] = torch.tensor(lengths)
        halves[: len(slots)] = torch.tensor(slots, dtype=torch.int32)
        halves[_BATCH : _BATCH + len(slots)] = torch.tensor(bank_slots, dtype=torch.int32)
        self._accelerator.fetch(self._device, self._seen)
        self._sent = self._accelerator.mark()
