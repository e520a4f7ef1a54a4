"""Slots on the device, and the table by which kernels find an expert."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from runtime.gpu.accelerator import Accelerator
from runtime.gpu.shortage import shortage
from runtime.memory.location import ExpertKey
from runtime.memory.sizes import format_size


class DevicePool:
    """Equal slots in one block of the device's memory, reserved once.

    Attributes:
        whole: uint8 [num_slots, slot_bytes].

    Raises:
        PlanError: the device has not that much memory.
    """

    def __init__(self, num_slots: int, slot_bytes: int, device: torch.device) -> None:
        self.num_slots, self.slot_bytes = num_slots, slot_bytes
        with shortage(
            f"{format_size(num_slots * slot_bytes)} of device memory for {num_slots} expert slots",
            "make the expert cache smaller (--expert-cache), or free the GPU's memory",
        ):
            self.whole = torch.empty(num_slots, slot_bytes, dtype=torch.uint8, device=device)

    def release(self) -> None:
        """Give the memory back; nothing may read or write a slot again."""
        self.whole = self.whole.new_empty(0, self.slot_bytes)

    def tensor(self, slot: int) -> Tensor:
        """uint8 [slot_bytes], the slot's own memory."""
        return self.whole[slot]

    def buffer(self, slot: int) -> Tensor:
        """The same: records come by copies between devices."""
        return self.whole[slot]


class SlotTable:
    """Where each expert of each layer lies, in the host's copy and in the device's, for one pass at a time.

    Attributes:
        device: int32 [places, num_experts].
    """

    def __init__(self, accelerator: Accelerator, moe_layers: tuple[int, ...], num_experts: int) -> None:
        self._host = accelerator.host((len(moe_layers), num_experts), torch.int32)
        self._rows, self._seen, self._accelerator = self._host.numpy(), accelerator.seen(self._host), accelerator
        self.device = torch.full((len(moe_layers), num_experts), -1, dtype=torch.int32, device=accelerator.device)

    def write(self, place: int, slots: Mapping[ExpertKey, int]) -> None:
        """Say which experts of a layer are there; no upload of the row may be under way."""
        row = self._rows[place]
        row.fill(-1)
        for (_, expert_id), slot in slots.items():
            row[expert_id] = slot

    def upload(self, place: int) -> None:
        """Queue that a row comes to the device."""
        self._accelerator.fetch(self.device[place], self._seen[place])
