"""The order of codes and scales in units of 16 rows by 128 columns, as an MMA's A fragments want them; exact both ways.

Lane `r * 4 + q` of a warp finds its registers in consecutive words: step s (16 columns of the MMA), register j, element
row = r + 8 * (j % 2), column = (s / 2) * 32 + q * 8 + (s % 2) * 4 + (j / 2) * 2 + {0, 1}; so the four lanes of a row
read 64 consecutive bytes of BF16 activations for two steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, unflatten
from torch.nn import functional as F

from runtime.kernels.shape import UNIT_COLUMNS, UNIT_ROWS, WeightForm

# A unit's axes before packing: row = rh * 8 + r, column = ch * 64 + cl * 32 + q * 8 + s * 4 + kh * 2 + lo.
_AXES = (2, 8, 2, 2, 4, 2, 2, 2)  # rh r ch cl q s kh lo
_ORDERS = {
    "int4": (2, 1, 4, 3, 5, 7, 6, 0),  # half = ch | lane = r q | word = cl s | byte = lo kh | nibble = rh
    "int8": (2, 3, 1, 4, 5, 0, 7, 6),  # piece = ch cl | lane = r q | step = s | word = rh | byte = lo kh
}


@dataclass(frozen=True, slots=True)
class Codes:
    """A quantised linear of some experts.

    Attributes:
        codes: uint8 [B, rows, columns], one code a byte, stored as value + 8 (int4) or value + 128 (int8).
        scales: float16 [B, rows, groups]; a weight is (code - 8 or 128) * scale.
    """

    codes: Tensor
    scales: Tensor


@dataclass(frozen=True, slots=True)
class UnitGrid:
    """The units of a [rows, columns] linear, tile by tile; a tile is 16 rows.

    Attributes:
        paired: tile j joins rows 8j to 8j+7 of the first half of the rows with the same of the second half (gate, up).
    """

    form: WeightForm
    rows: int
    columns: int
    paired: bool

    @property
    def tiles(self) -> int:
        return -(-self.rows // UNIT_ROWS)

    @property
    def units_per_tile(self) -> int:
        return -(-self.columns // UNIT_COLUMNS)

    @property
    def size_bytes(self) -> int:
        return self.tiles * self.units_per_tile * self.form.unit_bytes

    def pack(self, linear: Codes) -> Tensor:
        """Units, uint8 [B, size_bytes]; padding rows and columns hold the code of zero, padding units' scales are 0."""
        form, count = self.form, len(linear.codes)
        columns = self.units_per_tile * UNIT_COLUMNS
        codes = _pad(linear.codes, columns - self.columns, form.zero)
        codes = unflatten(self._to_tiles(codes, form.zero), -1, (-1, *_AXES[2:])).movedim(4, 2)
        if form.kind == "int4":
            codes = (codes[:, :, :, 0] | (codes[:, :, :, 1] << 4)).unsqueeze(3)
        codes = codes.permute(0, 1, 2, *(3 + axis for axis in _ORDERS[form.kind]))
        units = codes.new_empty(count, self.tiles, self.units_per_tile, form.unit_bytes)
        unflatten(units[..., : form.code_bytes], -1, codes.shape[3:]).copy_(codes)
        self._scales(units).copy_(self._spread(linear.scales))
        return units.view(count, -1)

    def unpack(self, data: Tensor) -> Codes:
        """The inverse of `pack`: codes and scales of units uint8 [B, size_bytes], contiguous."""
        form, count, order = self.form, len(data), _ORDERS[self.form.kind]
        units = data.view(count, self.tiles, self.units_per_tile, form.unit_bytes)
        axes = tuple(1 if form.kind == "int4" and axis == 0 else _AXES[axis] for axis in order)
        codes = unflatten(units[..., : form.code_bytes], -1, axes)
        codes = codes.permute(0, 1, 2, *(3 + order.index(axis) for axis in range(len(order))))
        if form.kind == "int4":
            codes = torch.cat((codes & 15, codes >> 4), dim=3)
        codes = codes.movedim(2, 4).flatten(4)
        begins = torch.arange(form.groups(self.columns), device=data.device) * form.group_columns(self.columns)
        scales = self._scales(units).permute(0, 1, 5, 4, 2, 3).flatten(4)  # B tiles rh r sets
        scales = scales[..., begins * form.scale_sets // UNIT_COLUMNS]
        return Codes(self._from_tiles(codes)[..., : self.columns].contiguous(), self._from_tiles(scales))

    def has_short_scales(self, data: Tensor) -> bool:
        """Whether all scales of units uint8 [B, size_bytes] are values of BF16 too."""
        scales = self._scales(unflatten(data, -1, (self.tiles, self.units_per_tile, self.form.unit_bytes)))
        return bool((scales.bfloat16() == scales).all())

    def _scales(self, units: Tensor) -> Tensor:
        """The scales inside units: a float16 view [B, tiles, units, sets, 8 r, 2 rh]."""
        halves = units.view(torch.float16)[..., self.form.code_bytes // 2 :]
        return unflatten(halves, -1, (self.form.scale_sets, 8, 2))

    def _spread(self, scales: Tensor) -> Tensor:
        """Scales [B, rows, groups] in the order of `_scales`, each repeated over the sets of its group."""
        sets = torch.arange(self.units_per_tile * self.form.scale_sets, device=scales.device)
        columns = sets * (UNIT_COLUMNS // self.form.scale_sets)
        groups = columns.clamp(max=self.columns - 1) // self.form.group_columns(self.columns)
        spread = scales[..., groups].masked_fill(columns >= self.columns, 0)
        tiles = unflatten(self._to_tiles(spread, 0), -1, (self.units_per_tile, -1))  # B tiles rh r units sets
        return tiles.permute(0, 1, 4, 5, 3, 2)

    def _to_tiles(self, values: Tensor, fill: int) -> Tensor:
        """[B, rows, n] to [B, tiles, 2 rh, 8 r, n]."""
        if self.paired:
            halves = unflatten(values, 1, (2, -1)).transpose(1, 2)  # B I 2 n
            padded = _pad(halves.flatten(2), 0, fill, 8 * self.tiles - self.rows // 2)
            return unflatten(unflatten(padded, 2, (2, -1)), 1, (self.tiles, 8)).transpose(2, 3)
        padded = _pad(values, 0, fill, UNIT_ROWS * self.tiles - self.rows)
        return unflatten(padded, 1, (self.tiles, 2, 8))

    def _from_tiles(self, tiles: Tensor) -> Tensor:
        """[B, tiles, 2 rh, 8 r, n] to [B, rows, n], contiguous."""
        if self.paired:
            halves = tiles.transpose(1, 2).flatten(2, 3)[:, :, : self.rows // 2]
            return halves.flatten(1, 2).contiguous()
        return tiles.flatten(1, 3)[:, : self.rows].contiguous()


def _pad(values: Tensor, columns: int, fill: int, rows: int = 0) -> Tensor:
    """[B, r, c] with `rows` rows and `columns` columns of `fill` added at the end."""
    return F.pad(values, (0, columns, 0, rows), value=fill) if rows or columns else values
