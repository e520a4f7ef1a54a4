"""One expert's bytes as the kernels read them: where each part lies in a slot, and packing both ways.

`bf16` is the plain target record: gate_up [2I, H] and down [H, I] row-major, then the biases. `int4` and `int8` hold
the same linears as units (`units.py`); tile j of gate_up joins gate rows 8j to 8j+7 with the up rows of the same
numbers, so that who owns a tile has both factors of its activations. Parts begin at multiples of 64 bytes, slots at
multiples of 4096.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, unflatten

from runtime.artifacts.record import ALIGN_BYTES, FIELD_ALIGN_BYTES, align_up
from runtime.errors import ShapeError
from runtime.kernels.shape import ExpertShape, WeightForm
from runtime.kernels.units import Codes, UnitGrid


@dataclass(frozen=True, slots=True)
class Biases:
    """BF16 biases of some experts: gate_up [B, 2I] and down [B, H]."""

    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes of a slot."""

    offset_bytes: int
    size_bytes: int

    @property
    def end_bytes(self) -> int:
        return self.offset_bytes + self.size_bytes

    def put(self, slots: Tensor, values: Tensor) -> None:
        """Write [B, ...] values of `size_bytes` an expert into slots uint8 [B, slot_bytes]."""
        data = values.reshape(len(slots), -1).view(torch.uint8)
        slots[:, self.offset_bytes : self.end_bytes].copy_(data)

    def get(self, slots: Tensor) -> Tensor:
        """A copy of this part: uint8 [B, size_bytes]."""
        return slots[:, self.offset_bytes : self.end_bytes].clone(memory_format=torch.contiguous_format)

    def view(self, slots: Tensor) -> Tensor:
        """This part of each slot as BF16, nothing copied: [B, size_bytes / 2]."""
        return slots[:, self.offset_bytes : self.end_bytes].view(torch.bfloat16)


class SlotLayout:
    """Where the parts of an expert lie in its slot.

    Attributes:
        gate_up, down: the linears.
        gate_up_bias, down_bias: the biases, or None.
        gate_up_grid, down_grid: the units of the linears; meaningless for bf16.
        payload_bytes: to the end of the last part.
        slot_bytes: payload rounded up to whole pages, the stride of a pool.
    """

    def __init__(self, shape: ExpertShape, form: WeightForm) -> None:
        self.shape, self.form = shape, form
        inner, hidden = shape.moe_intermediate_size, shape.hidden_size
        self.gate_up_grid = UnitGrid(form, 2 * inner, hidden, paired=True)
        self.down_grid = UnitGrid(form, hidden, inner, paired=False)
        plain_bytes = 0 if form.is_coded else 2
        self.gate_up = _after(None, self.gate_up_grid.size_bytes or plain_bytes * 2 * inner * hidden)
        self.down = _after(self.gate_up, self.down_grid.size_bytes or plain_bytes * inner * hidden)
        self.gate_up_bias = _after(self.down, 4 * inner) if shape.has_bias else None
        self.down_bias = _after(self.gate_up_bias, 2 * hidden) if shape.has_bias else None
        self.payload_bytes = (self.down_bias or self.down).end_bytes
        self.slot_bytes = align_up(self.payload_bytes, ALIGN_BYTES)

    @property
    def weight_bytes(self) -> int:
        """What a kernel must read of one expert, biases not counted."""
        return self.gate_up.size_bytes + self.down.size_bytes

    def new_pool(self, num_slots: int, device: torch.device | str) -> Tensor:
        """A zeroed pool: uint8 [num_slots, slot_bytes]."""
        return torch.zeros(num_slots, self.slot_bytes, dtype=torch.uint8, device=device)

    def pack_bf16(
        self, gate_up: Tensor, down: Tensor, biases: Biases | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Slots of some experts in BF16.

        Args:
            gate_up: bfloat16 [B, 2I, H], gate rows first.
            down: bfloat16 [B, H, I].
            biases: of the same experts; given exactly when the shape has biases.
            out: uint8 [B, >= payload_bytes] to write to, such as rows of a pool; gaps between parts are left alone.

        Returns:
            `out`, or new slots uint8 [B, slot_bytes] on the device of `gate_up`.

        Raises:
            ShapeError: a tensor is not as the layout says.
        """
        self._require(coded=False, has_bias=biases is not None)
        count, inner, hidden = len(gate_up), self.shape.moe_intermediate_size, self.shape.hidden_size
        _check("gate_up", gate_up, torch.bfloat16, (count, 2 * inner, hidden))
        _check("down", down, torch.bfloat16, (count, hidden, inner))
        slots = self._slots(count, gate_up.device, out)
        self.gate_up.put(slots, gate_up)
        self.down.put(slots, down)
        self._put_biases(slots, biases)
        return slots

    def views_bf16(self, slots: Tensor) -> tuple[Tensor, Tensor, Biases | None]:
        """gate_up [B, 2I, H], down [B, H, I] and biases as views of BF16 slots uint8 [B, >= payload_bytes]."""
        self._require(coded=False, has_bias=self.shape.has_bias)
        inner, hidden = self.shape.moe_intermediate_size, self.shape.hidden_size
        gate_up = unflatten(self.gate_up.view(slots), 1, (2 * inner, hidden))
        return gate_up, unflatten(self.down.view(slots), 1, (hidden, inner)), self.biases(slots)

    def pack_codes(
        self, gate_up: Codes, down: Codes, biases: Biases | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Slots of some experts in INT4 or INT8.

        Args:
            gate_up: codes [B, 2I, H], gate rows first, and their scales.
            down: codes [B, H, I] and their scales.
            biases, out: as for `pack_bf16`.

        Raises:
            ShapeError: a tensor is not as the layout says.
        """
        self._require(coded=True, has_bias=biases is not None)
        slots = self._slots(len(gate_up.codes), gate_up.codes.device, out)
        parts = (("gate_up", self.gate_up, self.gate_up_grid, gate_up), ("down", self.down, self.down_grid, down))
        for name, part, grid, linear in parts:
            _check(f"{name} codes", linear.codes, torch.uint8, (len(slots), grid.rows, grid.columns))
            groups = self.form.groups(grid.columns)
            _check(f"{name} scales", linear.scales, torch.float16, (len(slots), grid.rows, groups))
            part.put(slots, grid.pack(linear))
        self._put_biases(slots, biases)
        return slots

    def has_short_scales(self, slots: Tensor) -> bool:
        """Whether all scales of INT4 or INT8 slots uint8 [B, >= payload_bytes] are values of BF16 too.

        `moespeq quantize` chooses such scales; other quantisers' F16 scales have up to three bits more.
        """
        parts = ((self.gate_up, self.gate_up_grid), (self.down, self.down_grid))
        return all(grid.has_short_scales(slots[:, part.offset_bytes : part.end_bytes]) for part, grid in parts)

    def unpack_codes(self, slots: Tensor) -> tuple[Codes, Codes, Biases | None]:
        """gate_up, down and biases of INT4 or INT8 slots uint8 [B, >= payload_bytes]; the inverse of `pack_codes`."""
        self._require(coded=True, has_bias=self.shape.has_bias)
        gate_up = self.gate_up_grid.unpack(self.gate_up.get(slots))
        return gate_up, self.down_grid.unpack(self.down.get(slots)), self.biases(slots)

    def biases(self, slots: Tensor) -> Biases | None:
        """The biases as views of the slots, or None."""
        if self.gate_up_bias is None or self.down_bias is None:
            return None
        return Biases(self.gate_up_bias.view(slots), self.down_bias.view(slots))

    def _put_biases(self, slots: Tensor, biases: Biases | None) -> None:
        if biases is None or self.gate_up_bias is None or self.down_bias is None:
            return
        _check("gate_up bias", biases.gate_up, torch.bfloat16, (len(slots), 2 * self.shape.moe_intermediate_size))
        _check("down bias", biases.down, torch.bfloat16, (len(slots), self.shape.hidden_size))
        self.gate_up_bias.put(slots, biases.gate_up)
        self.down_bias.put(slots, biases.down)

    def _slots(self, count: int, device: torch.device, out: Tensor | None) -> Tensor:
        if out is None:
            return self.new_pool(count, device)
        if out.dtype != torch.uint8 or out.dim() != 2 or len(out) != count or out.shape[1] < self.payload_bytes:
            raise ShapeError(
                expected=f"out as uint8 [{count}, at least {self.payload_bytes}]",
                found=f"{str(out.dtype).removeprefix('torch.')} {list(out.shape)}",
                mend="pass rows of a pool made for this layout",
            )
        return out

    def _require(self, coded: bool, has_bias: bool) -> None:
        if self.form.is_coded != coded:
            raise ShapeError(
                expected="an int4 or int8 layout" if coded else "a bf16 layout",
                found=self.form.kind,
                mend="pack codes into int4 and int8 slots, weights into bf16 slots",
            )
        if self.shape.has_bias != has_bias:
            raise ShapeError(
                expected="biases" if self.shape.has_bias else "no biases",
                found="biases" if has_bias else "none",
                mend="make the ExpertShape with has_bias as the layer has it",
            )


def _after(part: Part | None, size_bytes: int) -> Part:
    return Part(0 if part is None else align_up(part.end_bytes, FIELD_ALIGN_BYTES), size_bytes)


def _check(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise ShapeError(
            expected=f"{name} as {str(dtype).removeprefix('torch.')} {list(shape)}",
            found=f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}",
            mend="stack the experts' tensors along a first axis, gate rows before up rows",
        )
