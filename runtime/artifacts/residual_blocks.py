"""What the blocks of a residual record hold of a matrix, and how they are taken apart and put together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runtime.artifacts.record import TensorField, align_up, unpack_codes
from runtime.artifacts.unit_order import BLOCK_UNITS, LANES, UNIT_WEIGHTS, tiles_and_units, unit_index
from runtime.errors import ArtifactError

PIECE_BYTES = 16  # what block starts are counted in: the alignment of bulk copies
_MOST_STEPS = 7  # below the scale's high byte, in three bits of a nibble
_MEND = "make the pack again with `moespeq pack --force`"
Array = np.ndarray[Any, np.dtype[Any]]


def blocks_of(rows: int, columns: int) -> list[tuple[int, int]]:
    """(first unit, units) of each block of a matrix: at most 8 neighbouring units of one tile."""
    tiles, units = tiles_and_units(rows, columns)
    return [
        (tile * units + first, min(BLOCK_UNITS, units - first))
        for tile in range(tiles)
        for first in range(0, units, BLOCK_UNITS)
    ]


def read_starts(data: Array, at: int, blocks: int) -> Array:
    """A table of a payload: where so many blocks start and the last one ends, int64 [blocks + 1], in bytes."""
    starts: Array = data[at : at + 4 * (blocks + 1)].view("<u4").astype(np.int64) * PIECE_BYTES
    return starts


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix of an expert, and what its draft says of it.

    Attributes:
        index: of its elements in unit order, see `unit_index`; the last row-major place stands for all padding.
        draft: uint16 [rows * columns + 1], the draft value in BF16; where the code is zero, the scale.
        zero: bool, the same, codes that stand for zero; padding counts as one.
        zero_places: in unit order, of zero codes.
    """

    name: str
    rows: int
    columns: int
    index: Array
    draft: Array
    zero: Array
    zero_places: Array

    @classmethod
    def of(cls, field: TensorField, views: dict[str, Tensor]) -> Matrix:
        rows, columns = field.shape
        scales, zeros = views[f"{field.name}.scales"], views[f"{field.name}.zeros"]
        codes = unpack_codes(views[f"{field.name}.codes"], columns).view(rows, scales.shape[1], -1)
        steps = codes.to(torch.int16) - zeros[:, :, None]
        is_zero = steps == 0
        values = (steps + is_zero) * scales[:, :, None].float()
        draft = np.append(values.bfloat16().view(torch.int16).numpy().view(np.uint16), np.uint16(0))
        zero = np.append(is_zero.numpy(), True)
        index = unit_index(rows, columns, field.name == "gate_up")
        return cls(field.name, rows, columns, index, draft, zero, np.flatnonzero(zero[index]))

    @property
    def blocks(self) -> list[tuple[int, int]]:
        """See `blocks_of`."""
        return blocks_of(self.rows, self.columns)

    def zero_codes(self) -> Array:
        """How many a unit has, int64 [units]."""
        return np.bincount(self.zero_places // UNIT_WEIGHTS, minlength=len(self.index) // UNIT_WEIGHTS)

    def high(self, low: Array, nibbles: Array) -> Array:
        """The guess: uint16 [rows * columns + 1], high bytes.

        Args:
            low: uint16, the same, low bytes.
            nibbles: uint8, one for each of `zero_places`.
        """
        high = (self.draft + np.uint16(127) - low) >> 8
        at = self.index[self.zero_places]
        scale = (self.draft[at] >> 8 & 127).astype(np.int16)
        high[at] = (nibbles.astype(np.uint16) >> 3 << 7) | np.maximum(scale - (nibbles & 7), 0).astype(np.uint16)
        return high


@dataclass(frozen=True, slots=True)
class Parts:
    """What the blocks of a matrix hold, together.

    Attributes:
        low: uint8 [units * 2048], in unit order.
        nibbles: uint8, one for each zero code, in unit order.
        places: int64 [n] of exceptions, unit * 2048 + element, ascending.
        high: uint8 [n], their high bytes.
    """

    low: Array
    nibbles: Array
    places: Array
    high: Array

    @classmethod
    def of(cls, matrix: Matrix, weight: Tensor) -> Parts:
        """Of BF16 weights [rows, columns]."""
        bits = np.append(weight.contiguous().view(torch.int16).numpy().view(np.uint16), np.uint16(0))
        low, high = bits & 255, bits >> 8
        at = matrix.index[matrix.zero_places]
        steps = np.clip((matrix.draft[at] >> 8 & 127).astype(int) - (high[at] & 127), 0, _MOST_STEPS)
        nibbles = np.where(at < len(bits) - 1, (high[at] >> 7 << 3) | steps, 0).astype(np.uint8)
        missed = matrix.high(low, nibbles) != high
        missed[-1] = False  # padding is never read
        places = np.flatnonzero(missed[matrix.index])
        return cls(low.astype(np.uint8)[matrix.index], nibbles, places, high[matrix.index[places]].astype(np.uint8))

    @classmethod
    def read(cls, data: Array, starts: Array, matrix: Matrix) -> Parts:
        """Take the blocks at `starts` apart, int64 [blocks + 1], in bytes."""
        first, units = np.array(matrix.blocks).T
        zero_codes = matrix.zero_codes()
        words = _words(zero_codes)
        tables_at = starts[:-1] + units * UNIT_WEIGHTS
        words_at = starts[:-1] + _table_end(units)
        places_at = words_at + 4 * (words[first + units] - words[first])
        _require(places_at <= starts[1:], matrix, "room for low bytes, table and nibbles")
        tables = _joined(data, tables_at, 4 * (units + 1)).view("<u2").reshape(-1, 2).astype(np.int64)
        last = np.cumsum(units + 1) - 1  # row of each block's sums
        begin = last - units
        blocks = np.arange(len(units))
        row_block = np.repeat(blocks, units + 1)
        row_unit = np.arange(len(tables)) - row_block  # a block has a row more than units
        rising = np.diff(tables[:, 1]) >= 0
        rising[last[:-1]] = True  # the next block starts again
        right = tables[:, 0] == words[row_unit] - words[first[row_block]]
        _require(np.logical_and.reduceat(right, begin), matrix, "nibbles for the draft's zero codes")
        count = tables[last, 1]
        high_at = places_at + 2 * count
        ends = align_up(high_at + count, PIECE_BYTES) == starts[1:]
        ends &= (tables[begin, 1] == 0) & np.logical_and.reduceat(np.append(rising, True), begin)
        _require(ends, matrix, "exceptions that end where it ends")
        gap = _joined(data, tables_at + 4 * (units + 1), words_at - tables_at - 4 * (units + 1))
        if gap.any() or _joined(data, high_at + count, starts[1:] - high_at - count).any():
            raise wrong(f"zeros between the parts of {matrix.name}", "other bytes")
        within = _joined(data, places_at, 2 * count).view("<u2").astype(np.int64)
        keep = np.ones(len(tables), bool)
        keep[last] = False
        of_unit = np.diff(tables[:, 1], append=0)[keep]
        places = np.repeat(np.arange(len(of_unit)), of_unit) * UNIT_WEIGHTS + within
        if (within >= UNIT_WEIGHTS).any() or (np.diff(places) <= 0).any():
            raise wrong(f"exceptions of {matrix.name} at ascending places below {UNIT_WEIGHTS}", "others")
        packed = _joined(data, words_at, places_at - words_at)
        nibbles = np.stack((packed & 15, packed >> 4), axis=1).reshape(-1)[_used(zero_codes, words)]
        low = _from_pieces(_joined(data, starts[:-1], units * UNIT_WEIGHTS), len(of_unit))
        outside = matrix.index == matrix.rows * matrix.columns
        if low[outside].any() or nibbles[outside[matrix.zero_places]].any() or outside[places].any():
            raise wrong(f"nothing behind the ends of {matrix.name}", "low bytes, nibbles or exceptions there")
        return cls(low, nibbles, places, _joined(data, high_at, count))

    def write(self, matrix: Matrix) -> Iterator[Array]:
        """The bytes of each block, a multiple of 16 of them."""
        zero_codes = matrix.zero_codes()
        words = _words(zero_codes)
        nibbles = np.zeros(8 * words[-1], np.uint8)
        nibbles[_used(zero_codes, words)] = self.nibbles
        packed = nibbles[0::2] | (nibbles[1::2] << 4)
        ends = np.searchsorted(self.places, UNIT_WEIGHTS * np.arange(len(words)))
        low = _to_pieces(self.low, len(zero_codes))
        within = (self.places % UNIT_WEIGHTS).astype("<u2")
        for first, units in matrix.blocks:
            rows = slice(first, first + units + 1)
            begin, end = ends[first], ends[first + units]
            table = np.stack((words[rows] - words[first], ends[rows] - begin), axis=1).astype("<u2").view(np.uint8)
            parts = (
                low[first * UNIT_WEIGHTS : (first + units) * UNIT_WEIGHTS],
                _padded(table.reshape(-1)),
                packed[4 * words[first] : 4 * words[first + units]],
                within[begin:end].view(np.uint8),
                self.high[begin:end],
            )
            yield _padded(np.concatenate(parts))


def _words(zero_codes: Array) -> Array:
    """Where each unit's nibbles begin, in words of 8, and where the last one's end."""
    return np.append(0, np.cumsum(-(-zero_codes // 8)))


def _used(zero_codes: Array, words: Array) -> Array:
    """Which nibbles of a block's words belong to a zero code: bool [8 * words]."""
    room = 8 * np.diff(words)
    within = np.arange(8 * words[-1]) - np.repeat(8 * words[:-1], room)
    used: Array = within < np.repeat(zero_codes, room)
    return used


def _to_pieces(low: Array, units: int) -> Array:
    """Low bytes in unit order as lanes load them: [units][4 pieces of 2 steps][32 lanes][step, rh, lo, kh]."""
    axes = low.reshape(units, LANES, 4, 2, 2, 2, 2)  # unit lane piece step kh rh lo
    return np.ascontiguousarray(axes.transpose(0, 2, 1, 3, 5, 6, 4)).reshape(-1)


def _from_pieces(data: Array, units: int) -> Array:
    axes = data.reshape(units, 4, LANES, 2, 2, 2, 2)  # unit piece lane step rh lo kh
    return axes.transpose(0, 2, 1, 3, 6, 4, 5).reshape(-1)


def _table_end(units: Array) -> Array:
    """Where the nibbles begin in blocks of so many units."""
    end: Array = -(-(units * UNIT_WEIGHTS + 4 * (units + 1)) // PIECE_BYTES) * PIECE_BYTES
    return end


def _joined(data: Array, starts: Array, sizes: Array) -> Array:
    """The same part of every block, one after another."""
    return np.concatenate([data[start : start + size] for start, size in zip(starts, sizes, strict=True)])


def _padded(data: Array) -> Array:
    return np.pad(data, (0, -len(data) % PIECE_BYTES))


def _require(right: Array, matrix: Matrix, what: str) -> None:
    """Refuse a matrix whose blocks are not all right, with the number of the first."""
    if not right.all():
        raise wrong(f"{what} in block {int(np.argmin(right))} of {matrix.name}", "others")


def wrong(expected: str, found: str) -> ArtifactError:
    """The error of a record that is not what it must be."""
    return ArtifactError(expected=f"a residual record with {expected}", found=found, mend=_MEND)
