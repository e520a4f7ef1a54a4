"""Residual records decoded by compiled code: the same bits as the reader in NumPy, some twenty times as fast."""

from __future__ import annotations

import ctypes
import functools
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from runtime.artifacts.record import FIELD_ALIGN_BYTES, DraftRecord, RecordLayout, TensorField, align_up
from runtime.artifacts.unit_order import BLOCK_UNITS, tiles_and_units

SOURCE = Path(__file__).with_name("residual_decode.c")
SPLIT_WEIGHTS = 1 << 20
"""Experts below this many weights are decoded by one thread: handing half to another takes as long as it saves."""
_INT = ctypes.c_int64


class Matrix(ctypes.Structure):
    """`Matrix` of residual_decode.c."""

    _fields_ = [
        (name, _INT)
        for name in (
            "rows", "columns", "paired", "bits", "group_size", "groups", "codes_at", "scales_at", "zeros_at",
            "table_at", "blocks", "out_at",
        )
    ]  # fmt: skip


class Shape(ctypes.Structure):
    """`Shape` of residual_decode.c: where everything lies in the records of a layer."""

    _fields_ = [("begin", _INT), ("gaps", _INT * 2 * 4), ("matrices", Matrix * 2)]


@dataclass(frozen=True, slots=True)
class RecordPlaces:
    """Where everything lies in the records of a layer.

    Attributes:
        shape: the same for the compiled code.
        weights: of an expert.
        biases: (place in a raw record, place in a residual one, bytes) of each.
    """

    shape: Shape
    weights: int
    biases: tuple[tuple[int, int, int], ...]


class NativeDecoder:
    """The compiled decoder of one process."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._call = library.residual_decode
        self._call.argtypes = [ctypes.c_void_p, ctypes.c_void_p, _INT, ctypes.c_void_p, ctypes.c_void_p, _INT, _INT]
        self._call.restype = ctypes.c_int
        self._helpers: ThreadPoolExecutor | None = None

    def decode(
        self, buffer: Tensor, payload_bytes: int, layout: RecordLayout, draft: DraftRecord, room: Tensor
    ) -> bool:
        """Write the raw record of an expert; False where the reader in NumPy must say what is wrong.

        Args:
            buffer: the residual record, uint8 [>= payload_bytes].
            payload_bytes: its length.
            layout: of raw records.
            draft: the expert's draft record.
            room: uint8 [>= layout.payload_bytes]; partly written if a record is refused.
        """
        places = record_places(layout, draft.layout)
        needed = ((buffer, payload_bytes), (draft.data, draft.layout.payload_bytes), (room, layout.payload_bytes))
        if places is None or not all(_is_plain(data, size_bytes) for data, size_bytes in needed):
            return False
        addresses = buffer.data_ptr(), payload_bytes, draft.data.data_ptr(), room.data_ptr()
        parts = torch.get_num_threads() if places.weights >= SPLIT_WEIGHTS else 1
        if self._refuses((ctypes.addressof(places.shape), *addresses), parts):
            return False
        for raw_at, at, size_bytes in places.biases:
            room[raw_at : raw_at + size_bytes] = buffer[at : at + size_bytes]
        return True

    def _refuses(self, arguments: tuple[int, ...], parts: int) -> bool:
        if parts == 1:
            return bool(self._call(*arguments, 0, 1))
        if self._helpers is None:
            self._helpers = ThreadPoolExecutor(thread_name_prefix="decode")
        others = [self._helpers.submit(self._call, *arguments, part, parts) for part in range(1, parts)]
        refused = [self._call(*arguments, 0, parts), *(other.result() for other in others)]
        return any(refused)


@functools.lru_cache(maxsize=64)
def record_places(layout: RecordLayout, draft: RecordLayout) -> RecordPlaces | None:
    """Where the parts of a layer's records lie; None where the draft is no coding of these matrices."""
    matrices = [field for field in layout.fields if len(field.shape) == 2]
    fields = {field.name: field for field in draft.fields}
    shape, at, gaps, biases = Shape(), 0, [], []
    for index, field in enumerate(matrices):
        coding = _coding(field, fields)
        if coding is None:
            return None
        tiles, units = tiles_and_units(*field.shape)
        blocks = tiles * -(-units // BLOCK_UNITS)
        paired = field.name == "gate_up"
        shape.matrices[index] = Matrix(*field.shape, paired, *coding, at, blocks, field.offset_bytes)
        gaps.append((at + 4 * (blocks + 1), align_up(at + 4 * (blocks + 1), FIELD_ALIGN_BYTES)))
        at = gaps[-1][1]
    for field in layout.fields[len(matrices) :]:
        biases.append((field.offset_bytes, at, field.size_bytes))
        gaps.append((at + field.size_bytes, align_up(at + field.size_bytes, FIELD_ALIGN_BYTES)))
        at = gaps[-1][1]
    for index, (first, end) in enumerate(gaps):
        shape.gaps[index][0], shape.gaps[index][1] = first, end
    shape.begin = at
    return RecordPlaces(shape, sum(math.prod(field.shape) for field in matrices), tuple(biases))


def _coding(field: TensorField, fields: dict[str, TensorField]) -> tuple[int, ...] | None:
    """(bits, group_size, groups, offsets of codes, scales and zeros) of a matrix in a draft record."""
    parts = [fields.get(f"{field.name}.{part}") for part in ("codes", "scales", "zeros")]
    codes, scales, zeros = parts
    if field.dtype != "BF16" or codes is None or scales is None or zeros is None:
        return None
    rows, columns = field.shape
    bits, groups = 8 * codes.shape[1] // columns, scales.shape[1]
    right = (
        bits in (4, 8)
        and codes.shape == (rows, columns * bits // 8)
        and scales.shape == zeros.shape == (rows, groups)
        and groups > 0
        and columns % groups == 0
        and (codes.dtype, scales.dtype, zeros.dtype) == ("U8", "F16", "U8")
    )
    if not right:
        return None
    return bits, columns // groups, groups, codes.offset_bytes, scales.offset_bytes, zeros.offset_bytes


def _is_plain(data: Tensor, size_bytes: int) -> bool:
    return (
        data.dtype == torch.uint8
        and data.dim() == 1
        and data.is_contiguous()
        and data.device.type == "cpu"
        and data.numel() >= size_bytes
    )
