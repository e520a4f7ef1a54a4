"""The draft's experts: all of them in memory, computed from their INT4 codes."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from runtime.artifacts.pack import Pack
from runtime.artifacts.record import LinearFormat, unpack_codes
from runtime.decode.draft_records import DraftRecords, read_drafts
from runtime.decode.route import RouteLog
from runtime.memory.heap import freed_at_once
from runtime.memory.location import ExpertKey
from runtime.model.experts import ExpertMath, assignments, combine, rows_of

INT4_GROUPS = (32, 64, 128, 256)
INT4_MAX_TOKENS = 4
"""Tokens that one call of the INT4 kernel takes; drafting has one, and the kernel slows down above this number."""


class Linear(Protocol):
    """A linear of the draft, in whatever form computes fastest.

    Attributes:
        num_bytes: memory that it takes.
    """

    num_bytes: int

    def __call__(self, x: Tensor) -> Tensor:
        """[m, in] to [m, out], in the type of `x`."""


class DenseLinear:
    """A linear that stayed in the source's type."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        self.num_bytes = weight.numel() * weight.element_size()

    def __call__(self, x: Tensor) -> Tensor:
        """[m, in] to [m, out]."""
        return F.linear(x, self.weight, self.bias)


class CodesLinear:
    """Codes, scales and zeros, dequantised for each call: the fallback for any bits, groups and processor."""

    def __init__(self, codes: Tensor, scales: Tensor, zeros: Tensor, columns: int, bias: Tensor | None) -> None:
        self.codes, self.scales, self.zeros, self.columns, self.bias = codes, scales, zeros, columns, bias
        self.num_bytes = sum(t.numel() * t.element_size() for t in (codes, scales, zeros))

    def __call__(self, x: Tensor) -> Tensor:
        """[m, in] to [m, out]."""
        return F.linear(x, self.weight(x.dtype), self.bias)

    def weight(self, dtype: torch.dtype) -> Tensor:
        """(code - zero) * scale, computed in float32."""
        rows, groups = self.scales.shape
        codes = unpack_codes(self.codes, self.columns).view(rows, groups, -1)
        values = (codes.float() - self.zeros[:, :, None].float()) * self.scales[:, :, None].float()
        return values.view(rows, self.columns).to(dtype)


class Int4Linear:
    """torch's CPU kernel for grouped INT4 weights; few tokens and bfloat16 activations are its case.

    In float32 runs the draft's activations pass through bfloat16 here; only proposals depend on it.
    """

    def __init__(self, codes: CodesLinear, group_size: int) -> None:
        whole = unpack_codes(codes.codes, codes.columns).to(torch.int32)
        self.packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(whole, 2)
        scales = codes.scales.float()
        offsets = (8.0 - codes.zeros.float()) * scales  # the kernel computes (code - 8) * scale + offset
        self.scales = torch.stack([scales, offsets], dim=-1).transpose(0, 1).contiguous().to(torch.bfloat16)
        self.group_size = group_size
        self.bias = codes.bias
        self.rows, self.columns = codes.scales.shape[0], codes.columns
        self.num_bytes = sum(t.numel() * t.element_size() for t in (self.packed, self.scales))

    def __call__(self, x: Tensor) -> Tensor:
        """[m, in] to [m, out]."""
        inputs = x.to(torch.bfloat16)
        parts = [self._kernel(inputs[i : i + INT4_MAX_TOKENS]) for i in range(0, len(inputs), INT4_MAX_TOKENS)]
        y = (parts[0] if len(parts) == 1 else torch.cat(parts)).to(x.dtype)
        return y if self.bias is None else y + self.bias

    def _kernel(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.packed, self.group_size, self.scales)
        return y


def make_linear(views: dict[str, Tensor], name: str, fmt: LinearFormat, dtype: torch.dtype) -> Linear:
    """One linear of a draft record in the form that computes fastest here.

    Args:
        views: the record's tensors.
        name: `gate_up` or `down`.
        fmt: its bits and group size.
        dtype: of the run's arithmetic.
    """
    bias = views.get(f"{name}_bias")
    bias = None if bias is None else bias.to(dtype).clone()
    if fmt.bits == 0:
        return DenseLinear(views[f"{name}.weight"].to(dtype).clone(), bias)
    scales = views[f"{name}.scales"].clone()
    columns = scales.shape[1] * fmt.group_size
    codes = CodesLinear(views[f"{name}.codes"].clone(), scales, views[f"{name}.zeros"].clone(), columns, bias)
    if _takes_int4_kernel(fmt, scales.shape[0]):
        return Int4Linear(codes, fmt.group_size)
    return codes


def _takes_int4_kernel(fmt: LinearFormat, rows: int) -> bool:
    known = hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu")
    return known and fmt.bits == 4 and fmt.group_size in INT4_GROUPS and rows % 16 == 0


def linear_bytes(fmt: LinearFormat, rows: int, columns: int, dtype: torch.dtype) -> int:
    """Memory of a [rows, columns] linear in the form that `make_linear` gives it."""
    if fmt.bits == 0:
        return rows * columns * dtype.itemsize
    group_bytes = 4 if _takes_int4_kernel(fmt, rows) else 3  # BF16 scale and offset, or F16 scale and a zero
    return rows * (columns * fmt.bits // 8 + columns // fmt.group_size * group_bytes)


class DraftBank:
    """Every expert of the draft.

    Attributes:
        num_bytes: memory that it takes.
        routes: experts chosen since they were last taken.
    """

    def __init__(
        self, pack: Pack, dtype: torch.dtype, direct_io: bool = True, drafts: DraftRecords | None = None
    ) -> None:
        """Bring all draft records into the form that computes fastest; they are read unless `drafts` has them.

        Raises:
            ArtifactError: a record fails its checksum or its file is cut.
        """
        self._experts: dict[ExpertKey, tuple[Linear, Linear]] = {}
        self.routes = RouteLog()
        self.num_bytes = 0
        with freed_at_once():
            for key, record in read_drafts(pack, 1, direct_io) if drafts is None else drafts.items():
                views, fmt = record.views(), pack.draft_format(key[0])
                pair = make_linear(views, "gate_up", fmt.gate_up, dtype), make_linear(views, "down", fmt.down, dtype)
                self._experts[key] = pair
                self.num_bytes += sum(linear.num_bytes for linear in pair)

    def compute(
        self, layer_id: int, math: ExpertMath, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, by_row: bool
    ) -> Tensor:
        """See `ExpertBackend.compute`; the draft's bits may depend on the batch, its routing is recorded."""
        self.routes.record(layer_id, top_k_index)
        outputs = hidden.new_empty(*top_k_index.shape, hidden.shape[-1])
        if len(top_k_index) == 1:
            for place, expert_id in enumerate(top_k_index[0].tolist()):
                gate_up, down = self._experts[layer_id, expert_id]
                outputs[0, place] = down(math.gate(gate_up(hidden)))[0]
            return combine(outputs, top_k_weights)
        for expert_id, pairs in assignments(top_k_index).items():
            gate_up, down = self._experts[layer_id, expert_id]
            tokens, choice = rows_of(pairs)
            outputs[tokens, choice] = down(math.gate(gate_up(hidden[tokens])))
        return combine(outputs, top_k_weights)
