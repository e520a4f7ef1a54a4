"""Target records that carry what the draft record does not tell: exact BF16 weights for about 9 bits each.

A BF16 word is a high byte (sign and upper 7 bits of the exponent) and a low byte. The low byte is stored. The high
byte is guessed, from the draft value where the code is not zero, and from the scale and a stored nibble where it is;
what the guess gets wrong is listed. docs/format.md has the bytes. That a quantised model and an exact one can share
their bits is in QStore (arXiv 2505.04081), SPEQ (2510.18525), NestedFP (2506.02024) and ZipMoE (2601.21198).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from runtime.artifacts.record import DraftRecord, RecordLayout, TensorField, align_up, target_tensors, unpack_codes
from runtime.artifacts.residual_blocks import PIECE_BYTES, Matrix, Parts, blocks_of, read_starts, wrong
from runtime.artifacts.unit_order import UNIT_WEIGHTS
from runtime.errors import ArtifactError
from runtime.model.families import ExpertWeights

WORK_BYTES = 40  # for each weight of an expert, while NumPy decodes one (37 measured); 8 stay, as places in unit order


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
        matrices = [Matrix.of(field, views) for field in layout.fields if len(field.shape) == 2]
        places = _Places.of(layout, matrices)
        parts, starts = [], [places.begin // PIECE_BYTES]
        for matrix in matrices:
            for block in Parts.of(matrix, tensors[matrix.name]).write(matrix):
                parts.append(block)
                starts.append(starts[-1] + len(block) // PIECE_BYTES)
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
            sizes = [units for _, units in blocks_of(*field.shape)]
            starts = read_starts(data, at, len(sizes))
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
class _Places:
    """Where the fixed parts of a payload lie, each at a multiple of 64 bytes."""

    tables: list[int]  # of the starts of a matrix's blocks
    biases: list[tuple[TensorField, int]]
    begin: int  # of the blocks

    @classmethod
    def of(cls, layout: RecordLayout, matrices: list[Matrix]) -> _Places:
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
            raise wrong(f"{payload_bytes} bytes", f"{buffer.numel()} of {buffer.dtype}")
        views = draft.views()
        self._data = buffer[:payload_bytes].numpy()
        self._layout = layout
        self._matrices = [Matrix.of(field, views) for field in layout.fields if len(field.shape) == 2]
        self._places = _Places.of(layout, self._matrices)
        if payload_bytes < self._places.begin:
            raise wrong(f"at least {self._places.begin} bytes", str(payload_bytes))
        head = self._data[: self._places.begin].copy()
        for matrix, at in zip(self._matrices, self._places.tables, strict=True):
            head[at : at + 4 * (len(matrix.blocks) + 1)] = 0
        for field, at in self._places.biases:
            head[at : at + field.size_bytes] = 0
        if head.any():
            raise wrong("zeros between its tables", "other bytes")

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

    def _parts(self) -> Iterator[tuple[Matrix, Parts]]:
        """Each matrix with what its blocks hold; their starts are checked."""
        end = self._places.begin
        for matrix, place in zip(self._matrices, self._places.tables, strict=True):
            table = read_starts(self._data, place, len(matrix.blocks))
            if table[0] != end or (np.diff(table) <= 0).any() or table[-1] > len(self._data):
                raise wrong(f"blocks of {matrix.name} one after the other from byte {end} on", "others")
            end = int(table[-1])
            yield matrix, Parts.read(self._data, table, matrix)
        if end != len(self._data):
            raise wrong(f"{end} bytes, where the last block ends", str(len(self._data)))


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
