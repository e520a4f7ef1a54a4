"""Target records that carry what the draft record does not tell: exact BF16 weights for about 9 bits each.

A BF16 word is a high byte (sign and upper 7 bits of the exponent) and a low byte. The low byte is stored. The high
byte is guessed, from the draft value where the code is not zero, and from the scale and a stored nibble where it is;
what the guess gets wrong is listed. docs/format.md has the bytes. That a quantised model and an exact one can share
their bits is in QStore (arXiv 2505.04081), SPEQ (2510.18525), NestedFP (2506.02024) and ZipMoE (2601.21198).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runtime.artifacts.record import DraftRecord, RecordLayout, TensorField, align_up, target_tensors, unpack_codes
from runtime.artifacts.unit_order import BLOCK_UNITS, LANES, UNIT_WEIGHTS, tiles_and_units, unit_index
from runtime.errors import ArtifactError
from runtime.model.families import ExpertWeights

_PIECE_BYTES = 16  # what block starts are counted in: the alignment of bulk copies
WORK_BYTES = 40  # for each weight of an expert, while NumPy decodes one (37 measured); 8 stay, as places in unit order
_MOST_STEPS = 7  # below the scale's high byte, in three bits of a nibble
_MEND = "make the pack again with `moespeq pack --force`"
Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class ResidualCounts:
    """What a residual record holds of a matrix.

    Attributes:
        weights: of the matrix.
        zero_codes: weights whose code stands for zero.
        exceptions: weights whose high byte is listed.
        block_bytes: of its blocks.
    """

    weights: int
    zero_codes: int
    exceptions: int
    block_bytes: int


class ResidualEncoding:
    """Low bytes, nibbles where the draft says zero, and a sorted list of wrong guesses."""

    name = "residual"

    def max_bytes(self, layout: RecordLayout) -> int:
        """As `raw`, which a record that would become no shorter is stored as."""
        return layout.payload_bytes

    def encode(self, weights: ExpertWeights, layout: RecordLayout, draft: DraftRecord | None) -> Tensor | None:
        """The payload, uint8 [payload_bytes]; None for other weights than BF16, or a draft `decode` would refuse."""
        if draft is None or not _is_coded(layout, draft):
            return None
        tensors, views = target_tensors(weights), draft.views()
        matrices = [_Matrix.of(field, views) for field in layout.fields if len(field.shape) == 2]
        places = _Places.of(layout, matrices)
        parts, starts = [], [places.begin // _PIECE_BYTES]
        for matrix in matrices:
            for block in _encode(matrix, tensors[matrix.name]).write(matrix):
                parts.append(block)
                starts.append(starts[-1] + len(block) // _PIECE_BYTES)
        payload = np.concatenate((np.zeros(places.begin, np.uint8), *parts))
        first = 0
        for matrix, at in zip(matrices, places.tables, strict=True):
            count = len(matrix.blocks)
            payload[at : at + 4 * (count + 1)].view("<u4")[:] = starts[first : first + count + 1]
            first += count
        for field, at in places.biases:
            payload[at : at + field.size_bytes] = tensors[field.name].contiguous().view(torch.uint8).numpy()
        return torch.from_numpy(payload)

    def decode(
        self,
        buffer: Tensor,
        payload_bytes: int,
        layout: RecordLayout,
        draft: DraftRecord | None,
        room: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Exact `gate_up`, `down` and biases, in memory of their own: the reference for every other decoder.

        Raises:
            ArtifactError: no draft record, or a payload that contradicts itself or the draft record.
        """
        return _Reader(buffer, payload_bytes, layout, draft).tensors()

    def counts(self, payload: Tensor, layout: RecordLayout, draft: DraftRecord) -> dict[str, ResidualCounts]:
        """What a payload that `decode` takes holds, by matrix."""
        data, views, at, found = payload.numpy(), draft.views(), 0, {}
        for field in (field for field in layout.fields if len(field.shape) == 2):
            tiles, units = tiles_and_units(*field.shape)
            sizes = [min(BLOCK_UNITS, units - first) for first in range(0, units, BLOCK_UNITS)] * tiles
            starts = data[at : at + 4 * (len(sizes) + 1)].view("<u4").astype(np.int64) * _PIECE_BYTES
            at = align_up(at + 4 * (len(sizes) + 1), 64)
            sums = starts[:-1] + np.array(sizes) * (UNIT_WEIGHTS + 4)  # where a block's table has its last row
            codes = unpack_codes(views[f"{field.name}.codes"], field.shape[1])
            zeros = views[f"{field.name}.zeros"]
            found[field.name] = ResidualCounts(
                weights=codes.numel(),
                zero_codes=int((codes.view(*zeros.shape, -1) == zeros[:, :, None]).sum()),
                exceptions=int((data[sums + 2] + 256 * data[sums + 3].astype(np.int64)).sum()),
                block_bytes=int(starts[-1] - starts[0]),
            )
        return found

    def why_raw(self, layout: RecordLayout, draft: DraftRecord | None) -> str:
        """Why `encode` gave nothing, or nothing shorter."""
        if any(field.dtype != "BF16" for field in layout.fields):
            return f"{layout.fields[0].dtype} weights"
        if draft is None or not _is_coded(layout, draft):
            return "a draft with unquantised weights or infinite scales"
        return "no shorter"


@dataclass(frozen=True, slots=True)
class _Matrix:
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
    def of(cls, field: TensorField, views: dict[str, Tensor]) -> _Matrix:
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
        """(first unit, units) of each block: at most 8 neighbouring units of one tile."""
        tiles, units = tiles_and_units(self.rows, self.columns)
        return [
            (tile * units + first, min(BLOCK_UNITS, units - first))
            for tile in range(tiles)
            for first in range(0, units, BLOCK_UNITS)
        ]

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
class _Places:
    """Where the fixed parts of a payload lie, each at a multiple of 64 bytes."""

    tables: list[int]  # of the starts of a matrix's blocks
    biases: list[tuple[TensorField, int]]
    begin: int  # of the blocks

    @classmethod
    def of(cls, layout: RecordLayout, matrices: list[_Matrix]) -> _Places:
        at = 0
        tables, biases = [], []
        for matrix in matrices:
            tables.append(at)
            at = align_up(at + 4 * (len(matrix.blocks) + 1), 64)
        for field in layout.fields:
            if len(field.shape) == 1:
                biases.append((field, at))
                at = align_up(at + field.size_bytes, 64)
        return cls(tables, biases, at)


class _Reader:
    """A payload with its draft record; every place is checked before it is used."""

    def __init__(self, buffer: Tensor, payload_bytes: int, layout: RecordLayout, draft: DraftRecord | None) -> None:
        if draft is None or not _is_coded(layout, draft):
            raise ArtifactError(
                expected="the expert's draft record, in codes with finite scales, for a residual record",
                found="none" if draft is None else "another draft",
                mend="load the draft, or pack with --encoding raw",
            )
        if buffer.dtype != torch.uint8 or buffer.dim() != 1 or buffer.numel() < payload_bytes:
            raise _wrong(f"{payload_bytes} bytes", f"{buffer.numel()} of {buffer.dtype}")
        views = draft.views()
        self._data = buffer[:payload_bytes].numpy()
        self._layout = layout
        self._matrices = [_Matrix.of(field, views) for field in layout.fields if len(field.shape) == 2]
        self._places = _Places.of(layout, self._matrices)
        if payload_bytes < self._places.begin:
            raise _wrong(f"at least {self._places.begin} bytes", str(payload_bytes))
        head = self._data[: self._places.begin].copy()
        for matrix, at in zip(self._matrices, self._places.tables, strict=True):
            head[at : at + 4 * (len(matrix.blocks) + 1)] = 0
        for field, at in self._places.biases:
            head[at : at + field.size_bytes] = 0
        if head.any():
            raise _wrong("zeros between its tables", "other bytes")

    def tensors(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for matrix, parts in self._parts():
            count = matrix.rows * matrix.columns
            low = np.zeros(count + 1, np.uint16)
            low[matrix.index] = parts.low
            low[count] = 0
            high = matrix.high(low, parts.nibbles)
            high[matrix.index[parts.places]] = parts.high
            words = torch.from_numpy((high << 8 | low)[:count].view(np.int16))
            found[matrix.name] = words.view(torch.bfloat16).view(matrix.rows, matrix.columns)
        for field, at in self._places.biases:
            part = torch.from_numpy(self._data[at : at + field.size_bytes].copy())
            found[field.name] = part.view(torch.bfloat16).view(field.shape)
        return {field.name: found[field.name] for field in self._layout.fields}

    def _parts(self) -> Iterator[tuple[_Matrix, _Parts]]:
        """Each matrix with what its blocks hold; their starts are checked."""
        end = self._places.begin
        for matrix, place in zip(self._matrices, self._places.tables, strict=True):
            table = self._data[place : place + 4 * (len(matrix.blocks) + 1)].view("<u4").astype(np.int64) * _PIECE_BYTES
            if table[0] != end or (np.diff(table) <= 0).any() or table[-1] > len(self._data):
                raise _wrong(f"blocks of {matrix.name} one after the other from byte {end} on", "others")
            end = int(table[-1])
            yield matrix, _Parts.read(self._data, table, matrix)
        if end != len(self._data):
            raise _wrong(f"{end} bytes, where the last block ends", str(len(self._data)))


@dataclass(frozen=True, slots=True)
class _Parts:
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
    def read(cls, data: Array, starts: Array, matrix: _Matrix) -> _Parts:
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
        ends = align_up(high_at + count, _PIECE_BYTES) == starts[1:]
        ends &= (tables[begin, 1] == 0) & np.logical_and.reduceat(np.append(rising, True), begin)
        _require(ends, matrix, "exceptions that end where it ends")
        gap = _joined(data, tables_at + 4 * (units + 1), words_at - tables_at - 4 * (units + 1))
        if gap.any() or _joined(data, high_at + count, starts[1:] - high_at - count).any():
            raise _wrong(f"zeros between the parts of {matrix.name}", "other bytes")
        within = _joined(data, places_at, 2 * count).view("<u2").astype(np.int64)
        keep = np.ones(len(tables), bool)
        keep[last] = False
        of_unit = np.diff(tables[:, 1], append=0)[keep]
        places = np.repeat(np.arange(len(of_unit)), of_unit) * UNIT_WEIGHTS + within
        if (within >= UNIT_WEIGHTS).any() or (np.diff(places) <= 0).any():
            raise _wrong(f"exceptions of {matrix.name} at ascending places below {UNIT_WEIGHTS}", "others")
        packed = _joined(data, words_at, places_at - words_at)
        nibbles = np.stack((packed & 15, packed >> 4), axis=1).reshape(-1)[_used(zero_codes, words)]
        low = _from_pieces(_joined(data, starts[:-1], units * UNIT_WEIGHTS), len(of_unit))
        outside = matrix.index == matrix.rows * matrix.columns
        if low[outside].any() or nibbles[outside[matrix.zero_places]].any() or outside[places].any():
            raise _wrong(f"nothing behind the ends of {matrix.name}", "low bytes, nibbles or exceptions there")
        return cls(low, nibbles, places, _joined(data, high_at, count))

    def write(self, matrix: _Matrix) -> Iterator[Array]:
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


def _encode(matrix: _Matrix, weight: Tensor) -> _Parts:
    bits = np.append(weight.contiguous().view(torch.int16).numpy().view(np.uint16), np.uint16(0))
    low, high = bits & 255, bits >> 8
    at = matrix.index[matrix.zero_places]
    steps = np.clip((matrix.draft[at] >> 8 & 127).astype(int) - (high[at] & 127), 0, _MOST_STEPS)
    nibbles = np.where(at < len(bits) - 1, (high[at] >> 7 << 3) | steps, 0).astype(np.uint8)
    wrong = matrix.high(low, nibbles) != high
    wrong[-1] = False  # padding is never read
    places = np.flatnonzero(wrong[matrix.index])
    return _Parts(low.astype(np.uint8)[matrix.index], nibbles, places, high[matrix.index[places]].astype(np.uint8))


def _is_coded(layout: RecordLayout, draft: DraftRecord) -> bool:
    """Whether the weights are BF16 and the draft has codes for them, with scales that are numbers."""
    views = draft.views()
    matrices = [field for field in layout.fields if len(field.shape) == 2]
    return all(
        field.dtype == "BF16"
        and f"{field.name}.codes" in views
        and bool(views[f"{field.name}.scales"].isfinite().all())
        for field in matrices
    )


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
    end: Array = -(-(units * UNIT_WEIGHTS + 4 * (units + 1)) // _PIECE_BYTES) * _PIECE_BYTES
    return end


def _joined(data: Array, starts: Array, sizes: Array) -> Array:
    """The same part of every block, one after another."""
    return np.concatenate([data[start : start + size] for start, size in zip(starts, sizes, strict=True)])


def _padded(data: Array) -> Array:
    return np.pad(data, (0, -len(data) % _PIECE_BYTES))


def _require(right: Array, matrix: _Matrix, what: str) -> None:
    """Refuse a matrix whose blocks are not all right, with the number of the first."""
    if not right.all():
        raise _wrong(f"{what} in block {int(np.argmin(right))} of {matrix.name}", "others")


def _wrong(expected: str, found: str) -> ArtifactError:
    return ArtifactError(expected=f"a residual record with {expected}", found=found, mend=_MEND)
