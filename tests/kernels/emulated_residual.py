"""The kernels for residual records on the host: `residual.cu` on the emulated machine."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from moespeq_cli.bench.kernel_residual import ExactExperts
from runtime.kernels.dequant import plain_layout
from runtime.kernels.residual import DECODE_SMEM_BYTES, DIRECTORY_BYTES, source, units_per_expert
from tests.kernels import emulated
from tests.kernels.emulated import pointer


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
