"""The dense steps of a decoding pass on at most 8 rows: few launches, each beginning before the one ahead has ended."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from runtime.kernels.codes_plan import BESIDE_SMEM_BYTES
from runtime.kernels.compile import Source, load
from runtime.kernels.device import current_gpu
from runtime.kernels.launch import Kernel

MAX_ROWS = 8
_TILE, _CHUNK = 16, 32  # weight rows of a block, columns of a step
_KEYS, _PADDING = 128, 8  # keys of a block, elements between two rows in shared memory
_MOST_SHARE, _SMEM_OF_DRIVER = 4, 1024  # blocks of an SM that are held to it, bytes of each that the driver keeps
_FIXED_SMEM_BYTES = 2048  # of attend_rows, beside what attend_smem counts
_SMEM_OF_SWIGLU = 6 << 10  # at least what it declares
_NORM_THREADS, _ROTATE_THREADS, _ROUTE_THREADS, _ATTEND_THREADS, _NEXT_THREADS = 256, 64, 32, 256, 256
_NEXT_BLOCKS = 64
_MOST_WIDTH, _MOST_EXPERTS, _MOST_CHOICES, _MOST_HEAD, _MOST_GROUPS = 16384, 1024, 32, 256, 16


@dataclass(frozen=True, slots=True)
class StepLog:
    """What the steps of a draft leave behind.

    Attributes:
        state: int64 [3]: token, position and number of the step at hand.
        chosen: int32 [layers, 1, k], the experts of the step at hand.
        tokens: int64 [steps], in the host's memory: what each step proposes.
        routes: int32 [steps, layers, k], in the host's memory: its experts.
    """

    state: Tensor
    chosen: Tensor
    tokens: Tensor
    routes: Tensor


@dataclass(frozen=True, slots=True)
class Routing:
    """Where a router writes.

    Attributes:
        index: int32 [M, k].
        weights: float32 [M, k].
        seen: int32 [M, k], `index` once more, in the host's memory; or None.
    """

    index: Tensor
    weights: Tensor
    seen: Tensor | None = None


class RowOps(Protocol):
    """Steps of a pass over M <= 8 rows. BF16; a row's bits do not depend on the other rows.

    Results are rounded where the library's modules round theirs.
    """

    def fits_linear(self, weight: Tensor) -> bool:
        """Whether products with this weight are computed here."""

    def fits_norm(self, width: int) -> bool:
        """Whether norms of this width are."""

    def fits_attention(self, size: int, groups: int) -> bool:
        """Whether attention with heads of a size is, so many of which share a key head."""

    def fits_router(self, num_experts: int, top_k: int) -> bool:
        """Whether a router of these sizes is."""

    def linear(self, weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
        """x [M, K] times weight [N, K] plus bias [N]: [M, N]."""

    def add(self, weight: Tensor, bias: Tensor | None, x: Tensor, residual: Tensor) -> Tensor:
        """The same and residual [M, N]."""

    def join(self, weight: Tensor, x: Tensor, residual: Tensor, routed: Tensor, gate: Tensor | None) -> Tensor:
        """residual + (routed + sigmoid(gate) * linear): [M, N]; gate is a column [M, 1], None counts as 1."""

    def swiglu(self, weight: Tensor, x: Tensor, beside: bool = False) -> Tensor:
        """silu(x times the first half of weight [2N, K]) times (x times the second): [M, N].

        With `beside` it may run beside the operation ahead of it, which x does not depend on: x was complete before
        that one was launched, and before the one ahead of that one ended. Both are over for whatever comes next.
        """

    def norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor | None = None) -> Tensor:
        """RMSNorm, or with a bias LayerNorm, of each len(weight) neighbours of x [M, W]: [M, W]; `out` may be x."""

    def rotate(
        self, qkv: Tensor, cosine: Tensor, sine: Tensor, positions: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Turn queries and keys by their positions and write the KV.

        Args:
            qkv: [M, (query heads + 2 * key heads) * size].
            cosine, sine: [M, rotated], rotated <= size.
            positions: int64 [M].
            keys, values: [key heads, capacity, size].

        Returns:
            The queries, [M, query heads, size].
        """

    def attend(
        self, q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, length: int, scale: float, window: int | None
    ) -> Tensor:
        """Attention of q [M, heads, size] up to each row's position, all of them below `length`: [M, heads * size].

        What wrote the positions has ended before the operation ahead of this one began.
        """

    def route(self, logits: Tensor, to: Routing, renormalise: bool, round_weights: bool) -> None:
        """The k most likely of logits [M, E]; their weights may be divided by their sum, and rounded to BF16."""

    def advance(self, logits: Tensor, log: StepLog) -> None:
        """Take the first largest of logits [1, V] as the next token: log it, and make the next step the one at hand."""


def linear_source(warps: int) -> Source:
    """cuda/rows_linear.cu with so many warps a block."""
    return Source("rows_linear.cu", (("WARPS", warps),))


def norm_source(num_experts: int = _MOST_EXPERTS, width: int = _MOST_WIDTH) -> Source:
    """cuda/rows_norm.cu; its router is for so many experts, its norms are of at most this width."""
    return Source("rows_norm.cu", (("EXPERTS", num_experts), ("WIDTH", width)))


def next_source() -> Source:
    """cuda/rows_next.cu."""
    return Source("rows_next.cu")


def attention_source(size: int, groups: int) -> Source:
    """cuda/rows_attention.cu for heads of a size, so many of which share a key head."""
    return Source("rows_attention.cu", (("SIZE", size), ("GROUPS", groups)))


class RowKernels:
    """See `RowOps`; queued on torch's current stream, and captured in CUDA graphs. One instance serves one stream.

    Whether shapes will do `fits_linear` and its like say; the launches do not ask again.
    """

    def __init__(self) -> None:
        self._gpu = current_gpu()
        self._device = torch.device("cuda", self._gpu.index)
        self._partial = torch.empty(0, device=self._device)
        self._tickets = torch.zeros(0, dtype=torch.int32, device=self._device)
        self._best = torch.zeros(2, dtype=torch.int64, device=self._device)
        self._kept: list[Tensor] = []

    def fits_linear(self, weight: Tensor) -> bool:
        """See `RowOps`."""
        return weight.dtype == torch.bfloat16 and weight.is_contiguous() and weight.shape[1] % _CHUNK == 0

    def fits_norm(self, width: int) -> bool:
        """See `RowOps`."""
        return width % 8 == 0 and width <= _MOST_WIDTH

    def fits_attention(self, size: int, groups: int) -> bool:
        """See `RowOps`."""
        small = size % _CHUNK == 0 and size <= _MOST_HEAD and 1 <= groups <= _MOST_GROUPS
        return small and attend_smem(size, groups) <= self._gpu.smem_per_block_bytes - _FIXED_SMEM_BYTES

    def fits_router(self, num_experts: int, top_k: int) -> bool:
        """See `RowOps`."""
        return num_experts <= _MOST_EXPERTS and top_k <= min(_MOST_CHOICES, num_experts)

    def linear(self, weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
        """See `RowOps`."""
        y, sizes = x.new_empty(len(x), len(weight)), self._sizes(weight, x)
        self._launch_linear("linear_rows", len(weight), (weight, bias, x, y, *sizes))
        return y

    def add(self, weight: Tensor, bias: Tensor | None, x: Tensor, residual: Tensor) -> Tensor:
        """See `RowOps`."""
        y, sizes = x.new_empty(len(x), len(weight)), self._sizes(weight, x)
        self._launch_linear("add_rows", len(weight), (weight, bias, x, y, *sizes, residual))
        return y

    def join(self, weight: Tensor, x: Tensor, residual: Tensor, routed: Tensor, gate: Tensor | None) -> Tensor:
        """See `RowOps`."""
        y, sizes = x.new_empty(len(x), len(weight)), self._sizes(weight, x)
        stride = 0 if gate is None else gate.stride(0)
        self._launch_linear("join_rows", len(weight), (weight, x, y, *sizes, residual, routed, gate, stride))
        return y

    def swiglu(self, weight: Tensor, x: Tensor, beside: bool = False) -> Tensor:
        """See `RowOps`."""
        half, name = len(weight) // 2, "swiglu_beside_rows" if beside else "swiglu_rows"
        y = x.new_empty(len(x), half)
        self._launch_linear(name, half, (weight, x, y, half, x.shape[1], x.stride(0), len(x)), beside)
        return y

    def norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor | None = None) -> Tensor:
        """See `RowOps`."""
        y, width = x.new_empty(x.shape) if out is None else out, len(weight)
        kernel = _kernel(self._gpu.index, norm_source(width=-(-width // 2048) * 2048), "norm_rows", _NORM_THREADS)
        args = (x, weight, bias, y, width, x.stride(0), y.stride(0), float(eps))
        kernel.launch((x.shape[1] // width, len(x)), args, programmatic=True)
        return y

    def rotate(
        self, qkv: Tensor, cosine: Tensor, sine: Tensor, positions: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """See `RowOps`."""
        key_heads, capacity, size = keys.shape
        heads = qkv.shape[1] // size - 2 * key_heads
        q = qkv.new_empty(len(qkv), heads, size)
        kernel = _kernel(self._gpu.index, norm_source(), "rotate_rows", _ROTATE_THREADS)
        sizes = (heads, key_heads, size, cosine.shape[-1], qkv.stride(0), capacity)
        args = (qkv, cosine, sine, positions, q, keys, values, *sizes)
        kernel.launch((heads + 2 * key_heads, len(qkv)), args, programmatic=True)
        return q

    def attend(
        self, q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, length: int, scale: float, window: int | None
    ) -> Tensor:
        """See `RowOps`."""
        (rows, heads, size), (key_heads, capacity, _) = q.shape, keys.shape
        groups, splits = heads // key_heads, -(-length // _KEYS)
        self._reserve(key_heads * -(-capacity // _KEYS) * groups * MAX_ROWS * (size + 2), key_heads)
        y = q.new_empty(rows, heads * size)
        kernel = _kernel(
            self._gpu.index, attention_source(size, groups), "attend_rows", _ATTEND_THREADS, attend_smem(size, groups)
        )
        sizes = (float(scale), window or 0, rows, heads, capacity)
        args = (q, keys, values, positions, y, self._partial, self._tickets, *sizes)
        kernel.launch((splits, key_heads), args, programmatic=True)
        return y

    def route(self, logits: Tensor, to: Routing, renormalise: bool, round_weights: bool) -> None:
        """See `RowOps`."""
        top_k = to.index.shape[-1]
        kernel = _kernel(self._gpu.index, norm_source(logits.shape[1]), "route_rows", _ROUTE_THREADS)
        flags = (int(renormalise), int(round_weights))
        args = (logits, to.index, to.weights, to.seen, logits.stride(0), top_k, *flags)
        kernel.launch(len(logits), args, programmatic=True)

    def advance(self, logits: Tensor, log: StepLog) -> None:
        """See `RowOps`."""
        kernel = _kernel(self._gpu.index, next_source(), "next_rows", _NEXT_THREADS)
        sizes = logits.shape[1], log.chosen.numel()
        args = (logits, log.state, log.chosen, log.tokens, log.routes, self._best, *sizes)
        kernel.launch(_NEXT_BLOCKS, args, programmatic=True)

    def _sizes(self, weight: Tensor, x: Tensor) -> tuple[int, int, int, int]:
        return (*weight.shape, x.stride(0), len(x))

    def _launch_linear(
        self, name: str, count: int, args: tuple[Tensor | int | None, ...], beside: bool = False
    ) -> None:
        """A block a tile; few blocks have more warps each, so that as much is under way.

        Blocks come to an SM as soon as one of the kernel ahead leaves it: left to themselves they would all go to the
        first SMs that are free. So each asks for so much shared memory that no SM takes more than its share; beside
        experts that an SM takes no more than its share and they do.
        """
        tiles = -(-count // _TILE)
        share = -(-tiles // self._gpu.num_sms)
        warps = 16 if share == 1 and not beside else 4
        smem_bytes = 0
        if beside:
            left = self._gpu.smem_per_block_bytes - BESIDE_SMEM_BYTES
            smem_bytes = max(0, left // share - _SMEM_OF_DRIVER - _SMEM_OF_SWIGLU)
        elif share <= _MOST_SHARE:
            smem_bytes = (self._gpu.smem_per_block_bytes + _SMEM_OF_DRIVER) // (share + 1) - _SMEM_OF_DRIVER
        kernel = _kernel(self._gpu.index, linear_source(warps), name, 32 * warps, smem_bytes)
        kernel.launch(tiles, args, programmatic=True)

    def _reserve(self, floats: int, heads: int) -> None:
        """Room for what blocks of attention leave to the last one; smaller ones stay, as recorded launches use them."""
        if self._partial.numel() < floats:
            self._partial = torch.empty(floats, device=self._device)
            self._kept.append(self._partial)
        if self._tickets.numel() < heads:
            self._tickets = torch.zeros(heads, dtype=torch.int32, device=self._device)
            self._kept.append(self._tickets)


def attend_smem(size: int, groups: int) -> int:
    """Shared memory of a block of attend_rows: values, scores, probabilities."""
    lines = groups * MAX_ROWS
    return _KEYS * (size + _PADDING) * 2 + lines * (_KEYS + 4) * 4 + lines * (_KEYS + _PADDING) * 2


@cache
def _kernel(gpu_index: int, source: Source, name: str, threads: int, smem_bytes: int = 0) -> Kernel:
    """A kernel on the current GPU; `gpu_index` only keeps those of different GPUs apart."""
    return Kernel(load(source), name, threads, smem_bytes, beside_large=True)
