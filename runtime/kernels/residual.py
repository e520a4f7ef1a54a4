"""Residual records on the GPU: checked when they arrive, and expanded to BF16 slots for matrix products."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from torch import Tensor

from runtime.artifacts.record import align_up
from runtime.artifacts.unit_order import BLOCK_UNITS, UNIT_WEIGHTS
from runtime.errors import ArtifactError, ShapeError
from runtime.kernels.arguments import Argument, require_aligned
from runtime.kernels.compile import Source, load
from runtime.kernels.dequant import plain_layout
from runtime.kernels.device import current_gpu
from runtime.kernels.launch import Kernel
from runtime.kernels.layout import SlotLayout
from runtime.kernels.units import UnitGrid

DIRECTORY_BYTES = 80  # of a unit
_THREADS, _WARPS = 256, 8
_CHOICES_BYTES, _NIBBLE_BYTES = 4096, 256 * 4 + 16
DECODE_SMEM_BYTES = _CHOICES_BYTES + _WARPS * _NIBBLE_BYTES
_INDEX_BLOCKS_PER_SM, _DECODE_BLOCKS_PER_SM = 8, 64


def source(layout: SlotLayout) -> Source:
    """cuda/residual.cu for a bank of INT4 slots."""
    shape = layout.shape
    return Source(
        "residual.cu",
        (
            ("HIDDEN", shape.hidden_size),
            ("INTER", shape.moe_intermediate_size),
            ("SCALE_SETS", layout.form.scale_sets),
            ("BIAS", int(shape.has_bias)),
        ),
    )


def units_per_expert(layout: SlotLayout) -> int:
    """Units of 16 x 128 weights of both linears."""
    return sum(grid.tiles * grid.units_per_tile for grid in (layout.gate_up_grid, layout.down_grid))


def least_record_bytes(layout: SlotLayout) -> int:
    """Bytes before the first block of a record, and its low bytes: no record is shorter."""
    begin = sum(align_up(4 * (_blocks(grid) + 1), 64) for grid in (layout.gate_up_grid, layout.down_grid))
    if layout.shape.has_bias:
        begin += align_up(4 * layout.shape.moe_intermediate_size, 64) + align_up(2 * layout.shape.hidden_size, 64)
    return begin + units_per_expert(layout) * UNIT_WEIGHTS


def _blocks(grid: UnitGrid) -> int:
    return grid.tiles * -(-grid.units_per_tile // BLOCK_UNITS)


@dataclass(frozen=True, slots=True)
class ResidualPool:
    """Slots of residual records beside the resident INT4 bank that they refer to.

    A record is used through its directory, which `admit` makes and checks: nothing that the bytes of a record say is
    followed before. So a record that contradicts itself or the codes is known, and even if it is used in spite of that
    no kernel reads or writes outside these tensors.

    Attributes:
        layout: of the bank's slots, int4.
        records: uint8 [S, slot_bytes], as read from a pack.
        directory: uint8 [S, units * 80], made for them.
        bank: uint8 [slots of the bank, layout.slot_bytes].
        short_scales: whether all of its scales are values of BF16 too, for which there is a faster kernel; found when
            the pool is made, so the bank must be filled by then.
    """

    layout: SlotLayout
    records: Tensor
    directory: Tensor
    bank: Tensor
    short_scales: bool = False

    @classmethod
    def of(cls, layout: SlotLayout, records: Tensor, bank: Tensor) -> ResidualPool:
        """With a directory in which no record is admitted.

        Raises:
            ShapeError: a bank of another form than INT4, or tensors that are not made for it.
        """
        least = least_record_bytes(layout) if layout.form.kind == "int4" else 0
        if not least:
            raise ShapeError(
                expected="a bank of int4 slots for residual records on the GPU",
                found=layout.form.kind,
                mend="decode the records of other drafts on the host",
            )
        for name, tensor, fewest in (("records", records, least), ("bank", bank, layout.payload_bytes)):
            sizes = tensor.shape[1] if tensor.dim() == 2 else 0
            if tensor.dtype != torch.uint8 or not tensor.is_contiguous() or sizes < fewest or sizes % 16:
                raise ShapeError(
                    expected=f"{name} as contiguous uint8 [slots, at least {fewest}] in multiples of 16 bytes",
                    found=f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}",
                    mend="make the pool for this layer",
                )
        require_aligned(records=records, bank=bank)
        size = units_per_expert(layout) * DIRECTORY_BYTES
        directory = torch.zeros(len(records), size, dtype=torch.uint8, device=records.device)
        return cls(layout, records, directory, bank, layout.has_short_scales(bank))

    def beside(self, layout: SlotLayout, bank: Tensor) -> ResidualPool:
        """The same records and directory beside the bank of another layer."""
        return replace(self, layout=layout, bank=bank, short_scales=layout.has_short_scales(bank))

    def admit(self, slots: Tensor, bank_slots: Tensor, payload_bytes: Tensor, faults: Tensor) -> None:
        """Make and check the directory of records that have arrived; queued on torch's current stream.

        Args:
            slots: int32 [n], where they are; those with -1 are left out.
            bank_slots: int32 [n], where their experts' codes are.
            payload_bytes: int64 [n].
            faults: int32 [n], to which the number of blocks that contradict themselves or the codes is added; see
                `require_admitted`.
        """
        kernel = _kernel(current_gpu().index, self.layout, "residual_index", 0)
        grid = kernel.gpu.num_sms * _INDEX_BLOCKS_PER_SM
        kernel.launch(grid, (*self._where, slots, bank_slots, payload_bytes, len(slots), self.directory, faults))

    def decode(self, slot_of: Tensor, bank_slot_of: Tensor, active: Tensor, num_active: Tensor, out: Tensor) -> None:
        """Write the exact weights and biases of active experts; queued on torch's current stream.

        Args:
            slot_of: int32 [E], slots of admitted records; experts with -1 are left out.
            bank_slot_of: int32 [E], the same of their codes.
            active: int32 [>= num_active], experts, such as `Route.active`.
            num_active: int32 [1].
            out: uint8 [E, bytes of a BF16 slot], expert e to row e; or [bytes of a BF16 slot], where one at most is
                active.
        """
        plain = plain_layout(self.layout)
        kernel = _kernel(current_gpu().index, self.layout, "residual_decode", DECODE_SMEM_BYTES)
        stride = np.int64(out.stride(0) if out.dim() == 2 else 0)
        parts = (plain.down, plain.gate_up_bias, plain.down_bias)
        offsets = tuple(np.int64(part.offset_bytes if part else 0) for part in parts)
        args = (*self._where, self.directory, active, num_active, slot_of, bank_slot_of, out, stride, *offsets)
        kernel.launch(kernel.gpu.num_sms * _DECODE_BLOCKS_PER_SM, args)

    @property
    def _where(self) -> tuple[Argument, ...]:
        """The first arguments of both kernels."""
        strides = np.int64(self.records.stride(0)), np.int64(self.bank.stride(0))
        return (self.records, strides[0], self.bank, strides[1], np.int64(self.layout.down.offset_bytes))


def require_admitted(faults: Tensor, names: list[str]) -> None:
    """Wait for `admit`, and refuse records with faults.

    Args:
        faults: int32 [n], zero before `admit`.
        names: of the records, for the message.

    Raises:
        ArtifactError: naming the first one.
    """
    found = faults.tolist()
    if any(found):
        at = next(i for i, count in enumerate(found) if count)
        raise ArtifactError(
            expected=f"a residual record that fits its draft for {names[at]}",
            found=f"{found[at]} blocks that do not",
            mend="make the pack again with `moespeq pack --force`",
        )


@cache
def _kernel(gpu_index: int, layout: SlotLayout, name: str, smem_bytes: int) -> Kernel:
    """A kernel on the current GPU; `gpu_index` only keeps those of different GPUs apart."""
    return Kernel(load(source(layout)), name, _THREADS, smem_bytes)
