"""Launches of cuda/combine.cu: rows gathered in sorted order, activated, and summed over the top k."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from runtime.errors import ShapeError
from runtime.kernels.arguments import Argument, require_aligned
from runtime.kernels.compile import Source, load
from runtime.kernels.device import current_gpu
from runtime.kernels.launch import Kernel
from runtime.kernels.layout import Part
from runtime.kernels.route import Route
from runtime.kernels.shape import Activation

_ROWS, _SEGMENT, _TOKEN_THREADS = 8, 512, 128  # WARPS, SEGMENT and TOKEN_THREADS of the source
_SUFFIX = {torch.bfloat16: "bf16", torch.float32: "fp32"}


def source(activation: Activation) -> Source:
    """cuda/combine.cu for one activation."""
    return Source("combine.cu", (("ACTIVATION", activation.code),))


@dataclass(frozen=True, slots=True)
class BiasPlace:
    """Where the kernels find a pair's bias: a part of its expert's slot.

    Attributes:
        pool: uint8 [S, slot_bytes].
        part: `SlotLayout.gate_up_bias` or `down_bias`.
        slot_of: int32 [E].
        top_k_index: int32 [M, k].
    """

    pool: Tensor
    part: Part
    slot_of: Tensor
    top_k_index: Tensor

    def arguments(self) -> tuple[Argument, ...]:
        slot_bytes = np.int64(self.pool.stride(0))
        return self.top_k_index, self.slot_of, self.pool, slot_bytes, np.int64(self.part.offset_bytes)


_NO_BIAS: tuple[Argument, ...] = (None, None, None, np.int64(0), np.int64(0))


def gather_rows(x: Tensor, route: Route, out: Tensor, num_tokens: Tensor | None = None) -> None:
    """out[i] = x[token of sorted pair i] for the sorted pairs; BF16 [M, H] to [capacity, H], other rows left alone.

    `num_tokens` as for `Route.build`.

    Raises:
        ShapeError: x or out not at a multiple of 16 bytes.
    """
    require_aligned(x=x, out=out)
    tokens, hidden_size = x.shape
    kernel = _kernel(current_gpu().index, "gather_rows", Activation.silu)
    args = (x, route.position, num_tokens, route.top_k, hidden_size, out)
    kernel.launch((tokens, -(-hidden_size // (8 * _TOKEN_THREADS))), args)


def activate_rows(gate_up: Tensor, route: Route, activation: Activation, bias: BiasPlace | None, out: Tensor) -> None:
    """out[i] = activation of gate_up[i] for the sorted pairs: BF16 or float32 [capacity, 2I] to BF16 [capacity, I]."""
    capacity, inner = out.shape
    args = (gate_up, route.pairs, route.num_sorted, capacity, inner, *_bias(bias), out)
    kernel = _kernel(current_gpu().index, f"activate_{_SUFFIX[gate_up.dtype]}", activation)
    kernel.launch((-(-capacity // _ROWS), -(-inner // _SEGMENT)), args)


def combine_rows(
    p: Tensor,
    route: Route,
    top_k_weights: Tensor,
    bias: BiasPlace | None,
    out: Tensor,
    num_tokens: Tensor | None = None,
    *,
    pairs: Tensor | None = None,
    resume: bool = False,
) -> None:
    """out[t] = sum over j of top_k_weights[t, j] * p[position of (t, j)], in float32 and in the order of j.

    Args:
        p: BF16 or float32 [>= num_sorted, H], rows in the order of `route.pairs`.
        route: of these tokens; a pair without a key adds nothing.
        top_k_weights: float32 [M, k], contiguous.
        bias: what to add to every row of p.
        out: BF16 [M, H]; all of it is written, or its first num_tokens rows.
        num_tokens: int32 [1] on the device, when fewer than M rows count.
        pairs: float32 [M, k, H]: what each pair contributes is kept here, for a layer computed in several calls.
        resume: pairs without a key count with what `pairs` holds.

    Raises:
        ShapeError: resume without pairs, or p, out or pairs not at a multiple of 16 bytes.
    """
    if resume and pairs is None:
        raise ShapeError(expected="pairs to resume from", found="none", mend="pass the pairs of the earlier call")
    require_aligned(p=p, out=out, pairs=pairs)
    tokens, hidden_size = out.shape
    kernel = _kernel(current_gpu().index, f"combine_{_SUFFIX[p.dtype]}", Activation.silu)
    kept = (pairs, int(resume), out)
    args = (p, route.position, top_k_weights, num_tokens, route.top_k, hidden_size, *_bias(bias), *kept)
    kernel.launch((tokens, -(-hidden_size // (8 * _TOKEN_THREADS))), args)


def _bias(bias: BiasPlace | None) -> tuple[Argument, ...]:
    return _NO_BIAS if bias is None else bias.arguments()


@cache
def _kernel(gpu_index: int, name: str, activation: Activation) -> Kernel:
    """A kernel on the current GPU; `gpu_index` only keeps those of different GPUs apart."""
    return Kernel(load(source(activation)), name, 32 * _ROWS if name.startswith("activate") else _TOKEN_THREADS)
