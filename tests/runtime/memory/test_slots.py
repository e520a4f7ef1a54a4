from __future__ import annotations

import gc

import pytest

from runtime.errors import PlanError
from runtime.memory.location import PAGE_BYTES
from runtime.memory.slots import SlotPool


def test_slots_are_page_aligned_and_apart() -> None:
    pool = SlotPool(3, PAGE_BYTES + 1)
    assert pool.slot_bytes == 2 * PAGE_BYTES and pool.total_bytes == 6 * PAGE_BYTES
    for slot in range(3):
        assert pool.tensor(slot).data_ptr() % PAGE_BYTES == 0
        pool.buffer(slot)[:] = bytes([slot + 1]) * pool.slot_bytes
    for slot in range(3):
        assert pool.tensor(slot).unique().tolist() == [slot + 1]


def test_a_tensor_outlives_its_pool() -> None:
    pool = SlotPool(2, PAGE_BYTES)
    pool.buffer(1)[:] = b"a" * PAGE_BYTES
    tensor = pool.tensor(1)
    del pool
    gc.collect()
    assert tensor.unique().tolist() == [ord("a")]


@pytest.mark.parametrize(("num_slots", "slot_bytes"), [(0, PAGE_BYTES), (1, 0), (2**40, 2**30)])
def test_refuses_what_cannot_be_had(num_slots: int, slot_bytes: int) -> None:
    with pytest.raises(PlanError, match="slot"):
        SlotPool(num_slots, slot_bytes)
