"""Residual records by tensor operations on any device: the bytes of `ResidualEncoding`, at the speed of a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.artifacts.record import align_up
from runtime.artifacts.unit_order import BLOCK_UNITS, LANES, UNIT_WEIGHTS, tiles_and_units, unit_index
from runtime.errors import ShapeError
from runtime.kernels.layout import SlotLayout
from runtime.kernels.units import Codes

_PIECE = 16  # bytes: what block starts are counted in
_ZERO, _WRONG = 1 << 12, 1 << 13  # of a word: low byte, nibble, these two, and from bit 16 on the high byte


class ResidualEncoder:
    """Encodes experts of one geometry, one at a time.

    Args:
        layout: of the bank's slots, int4; without biases.
        device: where the experts are.

    Raises:
        ShapeError: another form, or biases.
    """

    def __init__(self, layout: SlotLayout, device: torch.device) -> None:
        if layout.form.kind != "int4" or layout.shape.has_bias:
            raise ShapeError(
                expected="INT4 codes and no biases to encode residual records on a device",
                found=f"{layout.form.kind}, has_bias {layout.shape.has_bias}",
                mend="encode such experts with `moespeq pack --encoding residual`",
            )
        inner, hidden = layout.shape.moe_intermediate_size, layout.shape.hidden_size
        self._zero_code = layout.form.zero
        self._matrices: list[_Matrix] = []
        at = 0
        for rows, columns, paired in ((2 * inner, hidden, True), (hidden, inner, False)):
            group = torch.arange(columns, device=device) // layout.form.group_columns(columns)
            matrix = _Matrix.of(rows, columns, paired, group, at)
            self._matrices.append(matrix)
            at = align_up(at + 4 * (len(matrix.first) + 1), 64)
        self._begin = at

    def encode(self, gate_up: Tensor, down: Tensor, gate_up_codes: Codes, down_codes: Codes) -> Tensor:
        """The payload of an expert, uint8 [payload_bytes] on the device.

        Args:
            gate_up, down: bfloat16 [2I, H] and [H, I].
            gate_up_codes, down_codes: codes and scales of the same, as [1, rows, columns] and [1, rows, groups]; the
                scales are finite.
        """
        parts, end = [], torch.tensor(self._begin, device=gate_up.device)
        for matrix, weight, linear in zip(self._matrices, (gate_up, down), (gate_up_codes, down_codes), strict=True):
            parts.append(matrix.measure(self._words(matrix, weight, linear), end))
            end = parts[-1].starts[-1]
        payload = torch.zeros(int(end), dtype=torch.uint8, device=gate_up.device)
        for matrix, part in zip(self._matrices, parts, strict=True):
            matrix.write(part, payload)
        return payload

    def _words(self, matrix: _Matrix, weight: Tensor, linear: Codes) -> Tensor:
        """What must be known of each weight, int32 [units, 2048] in unit order; see docs/format.md for the guess."""
        bits = weight.view(torch.int16).int() & 0xFFFF
        steps = linear.codes[0].int() - self._zero_code
        zero = steps == 0
        values = (steps + zero.int()).float() * linear.scales[0].float()[:, matrix.group]
        draft = values.bfloat16().view(torch.int16).int() & 0xFFFF
        low, high, scale = bits & 255, bits >> 8, draft >> 8 & 127
        nibbles = high >> 7 << 3 | (scale - (high & 127)).clamp(0, 7)
        of_zero = nibbles >> 3 << 7 | (scale - (nibbles & 7)).clamp(min=0)
        wrong = torch.where(zero, of_zero, (draft + 127 - low & 0xFFFF) >> 8) != high
        words = low | torch.where(zero, nibbles << 8 | _ZERO, 0) | wrong.int() * _WRONG | high << 16
        padded = torch.nn.functional.pad(words.view(-1), (0, 1), value=_ZERO)  # places behind the ends
        return padded[matrix.index].view(-1, UNIT_WEIGHTS)


@dataclass(frozen=True, slots=True)
class _Part:
    """A matrix on its way into a payload.

    Attributes:
        words: int32 [units, 2048].
        zeros, nibble_words, exceptions: int64 [units + 1], how many units before each have; the last has the sums.
        starts: int64 [blocks + 1], bytes.
    """

    words: Tensor
    zeros: Tensor
    nibble_words: Tensor
    exceptions: Tensor
    starts: Tensor


@dataclass(frozen=True, slots=True)
class _Matrix:
    """Where the parts of a matrix go; all tensors int64 on the device.

    Attributes:
        index: of its elements in unit order; rows * columns for padding.
        group: of each column.
        table_at: byte of the payload where the table of its blocks lies.
        first, units: first unit and units, by block.
        block, within: by unit: its block, and its number there.
        words_at: by block, from its start to its nibbles, bytes.
    """

    index: Tensor
    group: Tensor
    table_at: int
    first: Tensor
    units: Tensor
    block: Tensor
    within: Tensor
    words_at: Tensor

    @classmethod
    def of(cls, rows: int, columns: int, paired: bool, group: Tensor, table_at: int) -> _Matrix:
        tiles, per_tile = tiles_and_units(rows, columns)
        unit = torch.arange(tiles * per_tile, device=group.device)
        blocks_per_tile = -(-per_tile // BLOCK_UNITS)
        block = unit // per_tile * blocks_per_tile + unit % per_tile // BLOCK_UNITS
        units = torch.bincount(block)
        first = units.cumsum(0) - units
        return cls(
            index=torch.from_numpy(unit_index(rows, columns, paired)).to(group.device),
            group=group,
            table_at=table_at,
            first=first,
            units=units,
            block=block,
            within=unit - first[block],
            words_at=_padded(units * UNIT_WEIGHTS + 4 * (units + 1)),
        )

    def measure(self, words: Tensor, begin: Tensor) -> _Part:
        """Count what the blocks hold; `begin` is where the first one starts."""
        zeros, exceptions = (words & _ZERO != 0).sum(1), (words & _WRONG != 0).sum(1)
        nibble_words, listed = _before((zeros + 7) // 8), _before(exceptions)
        sizes = _padded(self.words_at + 4 * self._of_blocks(nibble_words) + 3 * self._of_blocks(listed))
        return _Part(words, _before(zeros), nibble_words, listed, begin + _before(sizes))

    def write(self, part: _Part, payload: Tensor) -> None:
        """Fill this matrix's bytes of a payload of zeros."""
        integers, starts = payload.view(torch.int32), part.starts[:-1]
        first_word, first_exception = part.nibble_words[self.first], part.exceptions[self.first]
        end = self.table_at // 4 + len(part.starts)
        integers[self.table_at // 4 : end] = (part.starts // _PIECE).int()

        axes = (part.words & 255).to(torch.uint8).view(-1, LANES, 4, 2, 2, 2, 2)  # unit lane piece step kh rh lo
        pieces = axes.permute(0, 2, 1, 3, 5, 6, 4).reshape(-1).view(torch.int64).view(-1, 2)
        unit_at = starts[self.block] + UNIT_WEIGHTS * self.within
        rows = unit_at[:, None] // _PIECE + torch.arange(UNIT_WEIGHTS // _PIECE, device=payload.device)
        payload.view(torch.int64).view(-1, 2)[rows.view(-1)] = pieces

        table = (starts + self.units * UNIT_WEIGHTS) // 4
        entries = (
            part.nibble_words[:-1] - first_word[self.block] | part.exceptions[:-1] - first_exception[self.block] << 16
        )
        integers[table[self.block] + self.within] = entries.int()
        sums = self._of_blocks(part.nibble_words) | self._of_blocks(part.exceptions) << 16
        integers[table + self.units] = sums.int()

        flat = part.words.view(-1)
        places = (flat & _ZERO).nonzero()[:, 0]
        unit = places // UNIT_WEIGHTS
        rank = torch.arange(len(places), device=payload.device) - part.zeros[unit]
        block = self.block[unit]
        word = (starts + self.words_at)[block] // 4 + part.nibble_words[unit] - first_word[block] + rank // 8
        nibbles = (flat[places].long() >> 8 & 15) << 4 * (rank % 8)
        integers.index_add_(0, word, nibbles.int())  # each in bits of its own; the highest wraps to the sign

        places = (flat & _WRONG).nonzero()[:, 0]
        block = self.block[places // UNIT_WEIGHTS]
        rank = torch.arange(len(places), device=payload.device) - first_exception[block]
        at = (starts + self.words_at + 4 * self._of_blocks(part.nibble_words))[block]
        inside = places % UNIT_WEIGHTS
        payload[at + 2 * rank] = (inside & 255).to(torch.uint8)
        payload[at + 2 * rank + 1] = (inside >> 8).to(torch.uint8)
        payload[at + 2 * self._of_blocks(part.exceptions)[block] + rank] = (flat[places] >> 16).to(torch.uint8)

    def _of_blocks(self, before: Tensor) -> Tensor:
        """How many each block has, of how many units before have."""
        return before[self.first + self.units] - before[self.first]


def _before(counts: Tensor) -> Tensor:
    """How many there are before each, and all: int64 [n + 1]."""
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0))


def _padded(sizes: Tensor) -> Tensor:
    return (sizes + _PIECE - 1) // _PIECE * _PIECE
