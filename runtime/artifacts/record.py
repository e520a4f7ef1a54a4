"""One expert's bytes: the target record, exact, and the draft record, quantised; docs/format.md specifies both."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from runtime.artifacts.quantized import KeptLinear, QuantizedLinear
from runtime.artifacts.safetensors_file import DTYPES, NAMES
from runtime.errors import ArtifactError, ShapeError
from runtime.model.families import ExpertWeights, MoeSpec

ALIGN_BYTES = 4096  # direct reads want multiples of the page, in the file and in memory
FIELD_ALIGN_BYTES = 64  # a cache line, and four times the widest vector load of a GPU
DRAFT_LAYOUT = "rows"


def align_up(size_bytes: int, align_bytes: int = ALIGN_BYTES) -> int:
    """The smallest multiple of `align_bytes` that holds `size_bytes`."""
    return -(-size_bytes // align_bytes) * align_bytes


@dataclass(frozen=True, slots=True)
class TensorField:
    """One tensor in a record, row-major and little endian."""

    name: str
    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]
    offset_bytes: int  # from the start of the record

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """Where the tensors of a record lie; the fields are in order of their offsets."""

    name: str
    fields: tuple[TensorField, ...]
    payload_bytes: int  # to the last byte of the last field
    padded_bytes: int  # what one read brings

    @classmethod
    def of(cls, name: str, tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> RecordLayout:
        """Place (name, dtype, shape) tensors one after another, each at a multiple of 64 bytes."""
        fields: list[TensorField] = []
        end_bytes = 0
        for field_name, dtype, shape in tensors:
            fields.append(TensorField(field_name, dtype, shape, align_up(end_bytes, FIELD_ALIGN_BYTES)))
            end_bytes = fields[-1].offset_bytes + fields[-1].size_bytes
        return cls(name, tuple(fields), end_bytes, align_up(end_bytes))

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """The record's tensors as views of its bytes, nothing copied.

        Args:
            buffer: uint8 [>= payload_bytes], contiguous, on any device, aligned to the widest field.

        Raises:
            ShapeError: the buffer is of another kind or too short.
        """
        if buffer.dtype != torch.uint8 or buffer.dim() != 1 or buffer.numel() < self.payload_bytes:
            raise ShapeError(
                expected=f"a uint8 vector of at least {self.payload_bytes} bytes for a {self.name!r} record",
                found=f"{str(buffer.dtype).removeprefix('torch.')} {list(buffer.shape)}",
                mend="read the whole record before looking into it",
            )
        return {
            field.name: buffer[field.offset_bytes : field.offset_bytes + field.size_bytes]
            .view(DTYPES[field.dtype])
            .view(field.shape)
            for field in self.fields
        }

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The record of these tensors: uint8 [payload_bytes], the gaps between fields zero.

        Raises:
            ShapeError: a tensor is missing, surplus, or of another dtype or shape than its field.
        """
        if set(tensors) != {field.name for field in self.fields}:
            raise ShapeError(
                expected=f"the tensors {sorted(field.name for field in self.fields)} of a {self.name!r} record",
                found=f"{sorted(tensors)}",
                mend="use a layout made for this expert",
            )
        buffer = torch.zeros(self.payload_bytes, dtype=torch.uint8)
        views = self.views(buffer)
        for field in self.fields:
            tensor = tensors[field.name]
            if tensor.shape != field.shape or tensor.dtype != DTYPES[field.dtype]:
                raise ShapeError(
                    expected=f"{field.name} as {field.dtype} {list(field.shape)}",
                    found=f"{NAMES.get(tensor.dtype, str(tensor.dtype))} {list(tensor.shape)}",
                    mend="all experts of a model share one shape and dtype; check the checkpoint",
                )
            views[field.name].copy_(tensor)
        return buffer


def target_layout(spec: MoeSpec) -> RecordLayout:
    """The layout of an unencoded target record: gate rows, up rows, then down, then biases."""
    inner, hidden = spec.moe_intermediate_size, spec.hidden_size
    tensors: list[tuple[str, str, tuple[int, ...]]] = [
        ("gate_up", spec.dtype, (2 * inner, hidden)),
        ("down", spec.dtype, (hidden, inner)),
    ]
    if spec.has_bias:
        tensors += [("gate_up_bias", spec.dtype, (2 * inner,)), ("down_bias", spec.dtype, (hidden,))]
    return RecordLayout.of("raw", tensors)


@dataclass(frozen=True, slots=True)
class LinearFormat:
    """How a linear of a draft record is held: codes of some bits, or the source's weights."""

    bits: int  # 4 or 8; 0 for a kept linear
    group_size: int  # input features that share a scale; 0 for a kept linear

    def fits(self, columns: int) -> bool:
        """Whether a linear of this many input features can be held so."""
        if self.bits == 0:
            return self.group_size == 0
        whole = self.group_size > 0 and columns % self.group_size == 0
        return self.bits in (4, 8) and whole and columns * self.bits % 8 == 0

    def tensors(self, name: str, rows: int, columns: int, dtype: str) -> list[tuple[str, str, tuple[int, ...]]]:
        """The (name, dtype, shape) tensors that hold a [rows, columns] linear."""
        if self.bits == 0:
            return [(f"{name}.weight", dtype, (rows, columns))]
        groups = columns // self.group_size
        return [
            (f"{name}.codes", "U8", (rows, columns * self.bits // 8)),
            (f"{name}.scales", "F16", (rows, groups)),
            (f"{name}.zeros", "U8", (rows, groups)),
        ]


@dataclass(frozen=True, slots=True)
class DraftFormat:
    """How the experts of one layer are held in draft records."""

    gate_up: LinearFormat
    down: LinearFormat

    def fits(self, spec: MoeSpec) -> bool:
        """Whether experts of this model can be held so."""
        return self.gate_up.fits(spec.hidden_size) and self.down.fits(spec.moe_intermediate_size)

    def layout(self, spec: MoeSpec) -> RecordLayout:
        """The layout of a draft record."""
        inner, hidden = spec.moe_intermediate_size, spec.hidden_size
        tensors = self.gate_up.tensors("gate_up", 2 * inner, hidden, spec.dtype)
        tensors += self.down.tensors("down", hidden, inner, spec.dtype)
        if spec.has_bias:
            tensors += [("gate_up_bias", spec.dtype, (2 * inner,)), ("down_bias", spec.dtype, (hidden,))]
        return RecordLayout.of(DRAFT_LAYOUT, tensors)


@dataclass(frozen=True, slots=True)
class DraftRecord:
    """A draft record's bytes and how to read them."""

    layout: RecordLayout
    data: torch.Tensor  # uint8 [>= payload_bytes]

    def views(self) -> dict[str, torch.Tensor]:
        return self.layout.views(self.data)


def encode_draft(
    linears: Mapping[str, QuantizedLinear | KeptLinear], weights: ExpertWeights, layout: RecordLayout, where: str
) -> DraftRecord:
    """Lay one expert's quantised linears out as a draft record; biases are the source's.

    Raises:
        ArtifactError: the expert is not quantised as `layout`, its layer's, says.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, parts in (("gate_up", ("gate_proj", "up_proj")), ("down", ("down_proj",))):
        for part in parts:
            linear = linears[part]
            rows = {"weight": linear.weight} if isinstance(linear, KeptLinear) else _quantized_rows(linear)
            for kind, tensor in rows.items():
                key = f"{name}.{kind}"
                tensors[key] = torch.cat((tensors[key], tensor)) if key in tensors else tensor
    tensors.update(_biases(weights))
    try:
        return DraftRecord(layout, layout.fill(tensors))
    except ShapeError as error:
        raise ArtifactError(
            expected=f"{error.expected}, as in the rest of the layer, for {where}",
            found=error.found,
            mend="make the quantized artifact again with `moespeq quantize --force`",
        ) from error


def unpack_codes(codes: torch.Tensor, columns: int) -> torch.Tensor:
    """Codes of a draft record, one a byte: uint8 [rows, columns], whether stored by nibble or by byte."""
    if codes.shape[1] == columns:
        return codes
    return torch.stack((codes & 15, codes >> 4), dim=-1).reshape(codes.shape[0], columns)


def _quantized_rows(linear: QuantizedLinear) -> dict[str, torch.Tensor]:
    codes = linear.codes
    if linear.bits == 4:
        codes = codes[:, 0::2] | (codes[:, 1::2] << 4)
    return {"codes": codes, "scales": linear.scales, "zeros": linear.zeros}


def _biases(weights: ExpertWeights) -> dict[str, torch.Tensor]:
    if weights.gate_bias is None or weights.up_bias is None or weights.down_bias is None:
        return {}
    return {"gate_up_bias": torch.cat((weights.gate_bias, weights.up_bias)), "down_bias": weights.down_bias}


def target_tensors(weights: ExpertWeights) -> dict[str, torch.Tensor]:
    """The tensors of a target record, as every encoding gives them back."""
    gate_up = torch.cat((weights.gate_proj, weights.up_proj))
    return {"gate_up": gate_up, "down": weights.down_proj, **_biases(weights)}
