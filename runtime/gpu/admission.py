"""Residual records that have arrived in slots are admitted: checked on the device, without a wait for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from runtime.gpu.accelerator import Accelerator
from runtime.gpu.slots import DevicePool
from runtime.kernels.gate import FreshList
from runtime.kernels.residual import ResidualPool
from runtime.memory.location import ExpertKey

_BATCH = 64  # records of one launch
_LAUNCHES = 128  # whose numbers are kept until a wait

Arrived = tuple[ExpertKey, int]
"""An expert and its slot."""

Group = tuple[ResidualPool, Sequence[Arrived]]
"""Records of one layer, and its pool."""


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


class ListedAdmission:
    """What gates list of each layer, and what their admission finds.

    Args:
        accelerator: where.
        slots: of the records.
        payload_bytes: int64 [places, num_experts] on the device, of each record; what raw ones have means nothing.
        most: records of a layer that a pass may need.
    """

    def __init__(self, accelerator: Accelerator, slots: ResidualSlots, payload_bytes: Tensor, most: int) -> None:
        sizes, device = (len(payload_bytes), most), payload_bytes.device
        self._payload_bytes, self._records = payload_bytes, slots
        self._slots = torch.full(sizes, -1, dtype=torch.int32, device=device)
        self._experts, self._faults = (torch.zeros(sizes, dtype=torch.int32, device=device) for _ in range(2))
        self._bytes = torch.zeros(sizes, dtype=torch.int64, device=device)
        self._faults_host = accelerator.host(sizes, torch.int32)

    def of(self, place: int) -> FreshList:
        """The list of a layer."""
        parts = (self._payload_bytes, self._slots, self._experts, self._bytes, self._faults)
        return FreshList(*(part[place] for part in parts))

    def admit(self, place: int, pool: ResidualPool) -> None:
        """Queue that the records of a layer's list are admitted."""
        pool.admit(self._slots[place], self._experts[place], self._bytes[place], self._faults[place])

    def note(self) -> None:
        """Queue that the host sees what was found, behind the last layer."""
        self._faults_host.copy_(self._faults, non_blocking=True)

    def found(self) -> list[tuple[int, int, int]]:
        """Place, expert and blocks of records with faults, after a wait for the pass; they are not admitted."""
        if not self._faults_host.any():
            return []
        slots, experts = self._slots.tolist(), self._experts.tolist()
        faulty = []
        for place, number in self._faults_host.nonzero().tolist():
            self._records.admitted[slots[place][number]] = False
            faulty.append((place, experts[place][number], int(self._faults_host[place, number])))
        self._faults_host.zero_()
        return faulty


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
        # a row for each launch: lengths, then slots and slots of the bank in halves
        host = accelerator.host((_LAUNCHES, 2 * _BATCH), torch.int64)
        self._lengths = host.numpy()[:, :_BATCH]
        self._numbers = host.view(torch.int32).numpy()[:, 2 * _BATCH :].reshape(_LAUNCHES, 2, _BATCH)
        self._host, self._seen = host, accelerator.seen(host)
        self._device = torch.zeros_like(host, device=accelerator.device)
        self._launches = 0  # since the last wait

    def queue(self, layers: Sequence[Group], payload_bytes: Mapping[ExpertKey, int]) -> None:
        """Check some records; slots of the bank are a layer's experts.

        Args:
            layers: the pool of each and its records that are not admitted yet, as many as there is room for.
            payload_bytes: of each record.
        """
        first, launches = self._launches, list[tuple[ResidualPool, int, Sequence[Arrived]]]()
        for pool, arrived in layers:
            for begin in range(0, len(arrived), _BATCH):
                some = arrived[begin : begin + _BATCH]
                row, count = self._launches, len(some)
                self._launches += 1
                self._lengths[row, :count] = [payload_bytes[key] for key, _ in some]
                self._numbers[row, 0, :count] = [slot for _, slot in some]
                self._numbers[row, 1, :count] = [expert_id for (_, expert_id), _ in some]
                launches.append((pool, len(self._pending), some))
                self._pending.extend(some)
        self._accelerator.fetch(self._device[first : self._launches], self._seen[first : self._launches])
        meanwhile = self._accelerator.meanwhile
        for row, (pool, begin, some) in enumerate(launches, first):
            count = len(some)
            device, faults = self._device[row], self._faults[begin : begin + count]
            halves = device[_BATCH:].view(torch.int32)
            pool.admit(halves[:count], halves[_BATCH : _BATCH + count], device[:count], faults)
            for _, slot in some:  # not before: an interrupt may come
                self._slots.admitted[slot] = True
            if meanwhile is not None:
                meanwhile()

    def has_room(self, layers: Sequence[Group]) -> bool:
        """Whether all of these records can be queued before `settle`."""
        counts = [len(arrived) for _, arrived in layers]
        launches = self._launches + sum(-(-count // _BATCH) for count in counts)
        return len(self._pending) + sum(counts) <= len(self._faults) and launches <= _LAUNCHES

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
        self._launches = 0
        return faulty
