"""Residual records by the GPU kernels' own source on the host: every bit back, and hostile records go nowhere."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moespeq_cli.bench.kernel_residual import ExactExperts
from runtime.kernels.dequant import plain_layout
from runtime.kernels.layout import Biases
from runtime.kernels.residual import DECODE_SMEM_BYTES, DIRECTORY_BYTES, least_record_bytes, source, units_per_expert
from runtime.kernels.shape import ExpertShape, WeightForm
from runtime.kernels.units import Codes
from tests.kernels import emulated
from tests.kernels.emulated import pointer
from tests.kernels.host import cxx

SHAPES = {
    "one-unit": (ExpertShape(2, 1, 8, 8), WeightForm("int4", -1)),
    "odd": (ExpertShape(3, 2, 264, 40, has_bias=True), WeightForm("int4", -1)),
    "g32": (ExpertShape(2, 1, 96, 1152), WeightForm("int4", 32)),  # blocks of 8 and 1 unit
    "g64": (ExpertShape(2, 1, 192, 64), WeightForm("int4", 64)),
}


class Machine:
    """The kernels of residual.cu for a layer."""

    def __init__(self, experts: ExactExperts, folder: Path) -> None:
        self.experts, self.layout = experts, experts.layout
        self.library = emulated.library("residual.cpp", "residual.cu", dict(source(self.layout).defines), folder)
        assert self.library.decode_shared_bytes() == DECODE_SMEM_BYTES
        for run in (self.library.run_index, self.library.run_decode):
            run.restype = ctypes.c_char_p
        self.bank = experts.bank()
        self.count = len(self.bank)

    def admit(self, slots: Tensor, payload_bytes: list[int]) -> tuple[Tensor, Tensor]:
        """The directory, and faults by record."""
        size = units_per_expert(self.layout) * DIRECTORY_BYTES
        directory = torch.randint(0, 256, (self.count, size), dtype=torch.uint8)
        faults, order = torch.zeros(self.count, dtype=torch.int32), torch.arange(self.count, dtype=torch.int32)
        lengths = torch.tensor(payload_bytes)
        tensors = [pointer(tensor) for tensor in (order, order, lengths)]
        fault = self.library.run_index(2, 1, *self._pools(slots), *tensors, self.count, pointer(directory), pointer(faults))
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


def any_bits(*sizes: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(1 << 15), 1 << 15, sizes, dtype=torch.int16, generator=generator).view(torch.bfloat16)


def wild(experts: ExactExperts, share: float, seed: int) -> ExactExperts:
    """With any bits as a share of the weights, any finite scales in a share of the groups, and more zero codes."""
    generator = torch.Generator().manual_seed(seed)

    def chosen(like: Tensor, other: Tensor) -> Tensor:
        return torch.where(torch.rand(like.shape, generator=generator) < share, other, like)

    def codes(linear: Codes) -> Codes:
        bits = torch.randint(-(1 << 15), 1 << 15, linear.scales.shape, dtype=torch.int16, generator=generator)
        scales = bits.view(torch.float16)
        scales = torch.where(scales.isfinite(), scales, torch.zeros(()).half())
        scales = chosen(scales, torch.zeros_like(scales))
        return Codes(chosen(linear.codes, torch.full_like(linear.codes, 8)), chosen(linear.scales, scales))

    return ExactExperts(
        experts.layout,
        chosen(experts.gate_up, any_bits(*experts.gate_up.shape, seed=seed)),
        chosen(experts.down, any_bits(*experts.down.shape, seed=seed + 1)),
        codes(experts.gate_up_codes),
        codes(experts.down_codes),
        experts.biases,
    )


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5])
def test_every_bit_comes_back(name: str, share: float, folder: Path) -> None:
    shape, form = SHAPES[name]
    experts = ExactExperts.random(shape, form, shape.num_experts, seed=3)
    experts = wild(experts, share, seed=5) if share else experts
    machine = Machine(experts, folder)
    records = experts.records()
    slots = experts.slots(records)
    directory, faults = machine.admit(slots, [len(record) for record in records])
    assert not faults.any()
    assert torch.equal(machine.decode(slots, directory), experts.exact())


def test_every_bit_pattern_with_every_code(folder: Path) -> None:
    """All 65536 words, each under all 16 codes, with a scale of its row."""
    shape, form = ExpertShape(1, 1, 1024, 512), WeightForm("int4", 128)
    words = torch.arange(1 << 20).view(1, 1024, 1024)
    codes = (words >> 16).to(torch.uint8)
    scales = torch.rand(1, 1024, 8, generator=torch.Generator().manual_seed(1)).half()
    gate_up = (words & 0xFFFF).to(torch.int32).to(torch.int16).view(torch.bfloat16)
    half = codes[:, :, :512].contiguous()
    experts = ExactExperts(
        ExactExperts.random(shape, form, 1).layout,
        gate_up,
        gate_up[:, :, :512].contiguous(),
        Codes(codes, scales),
        Codes(half, scales[:, :, :4].contiguous()),
        None,
    )
    machine = Machine(experts, folder)
    records = experts.records()
    slots = experts.slots(records)
    directory, faults = machine.admit(slots, [len(record) for record in records])
    assert not faults.any()
    assert torch.equal(machine.decode(slots, directory), experts.exact())
