"""Residual records by the GPU kernels' own source on the host: every bit back, and hostile records go nowhere."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moespeq_cli.bench.kernel_residual import ExactExperts
from runtime.kernels.dequant import plain_layout
from runtime.kernels.residual import DECODE_SMEM_BYTES, DIRECTORY_BYTES, source, units_per_expert
from tests.kernels import emulated
from tests.kernels.emulated import pointer
from tests.kernels.host import cxx
from tests.kernels.residual_cases import SHAPES, every_word, hostile, wild


class Machine:
    """The kernels of residual.cu for a layer."""

    def __init__(self, experts: ExactExperts, folder: Path, count: int = 0) -> None:
        self.experts, self.layout = experts, experts.layout
        self.library = emulated.library("residual.cpp", "residual.cu", dict(source(self.layout).defines), folder)
        assert self.library.decode_shared_bytes() == DECODE_SMEM_BYTES
        for run in (self.library.run_index, self.library.run_decode):
            run.restype = ctypes.c_char_p
        self.bank = experts.bank()
        self.bank = self.bank.expand(count, -1).contiguous() if count else self.bank
        self.count = len(self.bank)

    def admit(self, slots: Tensor, payload_bytes: list[int]) -> tuple[Tensor, Tensor]:
        """The directory, and faults by record."""
        size = units_per_expert(self.layout) * DIRECTORY_BYTES
        directory = torch.randint(0, 256, (self.count, size), dtype=torch.uint8)
        faults, order = torch.zeros(self.count, dtype=torch.int32), torch.arange(self.count, dtype=torch.int32)
        lengths = torch.tensor(payload_bytes)
        tensors = [pointer(tensor) for tensor in (order, order, lengths)]
        fault = self.library.run_index(
            2, 1, *self._pools(slots), *tensors, self.count, pointer(directory), pointer(faults)
        )
        assert fault is None, fault
        return directory, faults

    def decode(self, slots: Tensor, directory: Tensor) -> Tensor:
        plain = plain_layout(self.layout)
        out = torch.zeros(self.count, plain.slot_bytes, dtype=torch.uint8)
        order, number = torch.arange(self.count, dtype=torch.int32), torch.tensor([self.count], dtype=torch.int32)
        parts = (plain.down, plain.gate_up_bias, plain.down_bias)
        offsets = [ctypes.c_longlong(part.offset_bytes if part else 0) for part in parts]
        tensors = [pointer(tensor) for tensor in (directory, order, number, order, order, out)]
        strides = [ctypes.c_longlong(plain.slot_bytes), *offsets]
        fault = self.library.run_decode(3, 2, *self._pools(slots), *tensors, *strides)
        assert fault is None, fault
        return out

    def _pools(self, slots: Tensor) -> list[ctypes.c_void_p | ctypes.c_longlong]:
        return [
            pointer(slots),
            ctypes.c_longlong(slots.shape[1]),
            pointer(self.bank),
            ctypes.c_longlong(self.bank.shape[1]),
            ctypes.c_longlong(self.layout.down.offset_bytes),
        ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cxx()
    own = tmp_path_factory.getbasetemp()
    shared = (own.parent if own.name.startswith("popen-") else own) / "emulated"
    shared.mkdir(exist_ok=True)
    return shared


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5])
def test_every_bit_comes_back(name: str, share: float, folder: Path) -> None:
    shape, form = SHAPES[name]
    require_exact(wild(ExactExperts.random(shape, form, shape.num_experts, seed=3), share, seed=5), folder)


def test_every_word_under_every_code(folder: Path) -> None:
    require_exact(every_word(), folder)


def require_exact(experts: ExactExperts, folder: Path) -> None:
    machine = Machine(experts, folder)
    records = experts.records()
    slots = experts.slots(records)
    directory, faults = machine.admit(slots, [len(record) for record in records])
    assert not faults.any()
    assert torch.equal(machine.decode(slots, directory), experts.exact())


def test_hostile_records_are_known_and_lead_nowhere(folder: Path) -> None:
    """Each in memory of its own whose neighbours cannot be touched, in a process that may die."""
    experts, slots, length, changed = hostile(24)
    machine = Machine(experts, folder, count=1)
    for slot, known in zip(slots, changed.tolist(), strict=True):
        child = os.fork()
        if child == 0:
            directory, faults = machine.admit(fenced(slot[None]), [length])
            machine.decode(fenced(slot[None]), directory)
            os._exit(10 + int(faults[0] > 0))
        status = os.waitpid(child, 0)[1]
        assert os.waitstatus_to_exitcode(status) in ((11,) if known else (10, 11))


def fenced(tensor: Tensor) -> Tensor:
    """A copy of whole pages between two pages that cannot be read or written."""
    page, size = mmap.PAGESIZE, tensor.numel()
    assert size % page == 0
    area = mmap.mmap(-1, size + 2 * page)
    copy = torch.frombuffer(area, dtype=torch.uint8)[page : page + size].view(tensor.shape)
    copy.copy_(tensor)
    protect = ctypes.CDLL(None).mprotect
    for fence in (copy.data_ptr() - page, copy.data_ptr() + size):
        assert protect(ctypes.c_void_p(fence), page, 0) == 0
    return copy
