"""Equal slots in one block of memory."""

from __future__ import annotations

import mmap
from typing import Any, Protocol

import torch

from runtime.errors import PlanError
from runtime.memory.location import PAGE_BYTES


class Slots(Protocol):
    """Equal places for records, wherever they lie.

    Attributes:
        num_slots: how many.
        slot_bytes: of each.
    """

    num_slots: int
    slot_bytes: int

    def tensor(self, slot: int) -> torch.Tensor:
        """uint8 [slot_bytes], the slot's own memory."""
        ...

    def buffer(self, slot: int) -> Any:
        """The slot's memory as the store that fills this pool wants it."""
        ...


class SlotPool:
    """`num_slots` page-aligned slots in one anonymous mapping, reserved once; pages come with their first record.

    A slot is a record's place: readers fill `buffer(slot)`, kernels read `tensor(slot)`, both views of the same bytes.
    The memory goes back when the pool and every tensor of it are gone.

    Args:
        num_slots: at least 1.
        slot_bytes: the largest record, padding included; rounded up to a multiple of PAGE_BYTES.

    Raises:
        PlanError: no slot, or the machine refuses the memory.
    """

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        if num_slots < 1 or slot_bytes < 1:
            raise PlanError(
                expected="at least 1 slot of at least 1 byte",
                found=f"{num_slots} slots of {slot_bytes} bytes",
                mend=f"give the expert cache at least {max(slot_bytes, 1)} bytes (--expert-cache)",
            )
        self.num_slots = num_slots
        self.slot_bytes = -(-slot_bytes // PAGE_BYTES) * PAGE_BYTES
        self.total_bytes = num_slots * self.slot_bytes
        try:
            block = mmap.mmap(-1, self.total_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError, ValueError) as error:
            raise PlanError(
                expected=f"{self.total_bytes} bytes of memory for {num_slots} expert slots",
                found=str(error),
                mend="make the expert cache smaller (--expert-cache)",
            ) from error
        whole = memoryview(block)
        starts = range(0, self.total_bytes, self.slot_bytes)
        self._buffers = [whole[start : start + self.slot_bytes] for start in starts]
        self._tensors = [
            torch.frombuffer(block, dtype=torch.uint8, count=self.slot_bytes, offset=start) for start in starts
        ]

    def release(self) -> None:
        """Give the memory back, as soon as nobody holds a slot's; there are no slots after it."""
        self._buffers, self._tensors = [], []

    def tensor(self, slot: int) -> torch.Tensor:
        """uint8 [slot_bytes], the slot's own memory."""
        return self._tensors[slot]

    def buffer(self, slot: int) -> memoryview:
        """The slot's own memory, writable, at an address that is a multiple of PAGE_BYTES."""
        return self._buffers[slot]
