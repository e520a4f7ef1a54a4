"""What the kernels must compute, from the formula in float64, stage by stage; NumPy for reading, torch for big shapes.

    h[t,j] = activation(gate_e x[t] + bias, up_e x[t] + bias)        e = top_k_index[t,j]
    p[t,j] = down_e h[t,j] + bias
    y[t]   = sum over j of top_k_weights[t,j] * p[t,j]

The kernels round h and y to BF16 and nothing else; here h is rounded too unless told otherwise, and y is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.kernels.layout import SlotLayout
from runtime.kernels.shape import CLAMP_ALPHA, CLAMP_LIMIT, Activation, WeightForm
from runtime.kernels.units import Codes

BF16_STEP = 2.0**-7  # from one BF16 number to the next, relative, at most
Float64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Dense:
    """One expert's weights as they act: float64 tensors, gate rows before up rows."""

    gate_up: Tensor  # [2I, H]
    down: Tensor  # [H, I]
    gate_up_bias: Tensor | None = None  # [2I]
    down_bias: Tensor | None = None  # [H]


Experts = Callable[[int], Dense | None]
"""An expert's weights by its number; None where it is not here, and contributes nothing."""


@dataclass(frozen=True, slots=True)
class Rounding:
    """Which results are rounded to BF16 on the way; gate_up and p before their biases, as a library's product is."""

    gate_up: bool = False
    h: bool = True
    p: bool = False


EXACT = Rounding(h=False)
KERNEL = Rounding()
LIBRARY = Rounding(gate_up=True, p=True)


@dataclass(frozen=True, slots=True)
class Stages:
    """Every intermediate result, float64; zero for pairs whose expert is not here.

    Attributes:
        h: [M, k, I], rounded to BF16 if asked.
        p: [M, k, H], computed from h.
        y: [M, H], not rounded.
        scale: [M, H], the root of the sum over j and i of (w[t,j] * down[o,i] * h[t,j,i])^2: how large the errors of
            products may grow. The clamped activation's h is taken with |up| + 1 for up + 1, as errors do not cancel.
        flip: [M, H], what y changes by if every p is rounded to its other neighbour; zero where p is not rounded.
    """

    h: Tensor
    p: Tensor
    y: Tensor
    scale: Tensor
    flip: Tensor


def round_bf16(values: Float64) -> Float64:
    """The nearest BF16 values, ties to even, by way of float32."""
    bits = values.astype(np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32).astype(np.float64)


def activate(gate: Float64, up: Float64, activation: Activation) -> Float64:
    """The activation of `Activation`, for vectors."""
    if activation is Activation.clamped:
        gate, up = np.minimum(gate, CLAMP_LIMIT), np.clip(up, -CLAMP_LIMIT, CLAMP_LIMIT) + 1
        factor = 1 / (1 + np.exp(-CLAMP_ALPHA * gate))
    elif activation is Activation.gelu:
        factor = (1 + np.array([math.erf(value) for value in gate / math.sqrt(2)])) / 2
    elif activation is Activation.gelu_tanh:
        factor = (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) / 2
    else:
        factor = 1 / (1 + np.exp(-gate))
    result: Float64 = gate * factor * up
    return result


def compute(
    x: Float64,
    top_k_index: NDArray[Any],
    top_k_weights: Float64,
    experts: Experts,
    activation: Activation,
    rounding: Rounding = KERNEL,
) -> Stages:
    """The layer for x [M, H], top_k_index and top_k_weights [M, k], pair by pair in NumPy."""
    tokens, top_k = top_k_index.shape
    stages: dict[tuple[int, int], tuple[Float64, Float64, Float64, Float64]] = {}
    inner = 0
    for t in range(tokens):
        for j in range(top_k):
            dense = experts(int(top_k_index[t, j]))
            if dense is None:
                continue
            gate_up = _rounded(dense.gate_up.numpy() @ x[t], rounding.gate_up)
            gate, up = np.split(gate_up + _or_zero(dense.gate_up_bias), 2)
            h = _rounded(activate(gate, up, activation), rounding.h)
            down = dense.down.numpy()
            product, size = _rounded(down @ h, rounding.p), activate(gate, abs(up), activation)
            stages[t, j] = h, product + _or_zero(dense.down_bias), down**2 @ size**2, abs(product)
            inner = len(h)
    h_all, p_all = np.zeros((tokens, top_k, inner)), np.zeros((tokens, top_k, x.shape[1]))
    y, scale, flip = np.zeros_like(x), np.zeros_like(x), np.zeros_like(x)
    for (t, j), (h, p, square, product) in stages.items():
        h_all[t, j], p_all[t, j] = h, p
        y[t] += top_k_weights[t, j] * p
        scale[t] += top_k_weights[t, j] ** 2 * square
        flip[t] += rounding.p * BF16_STEP * abs(top_k_weights[t, j]) * product
    return Stages(*(torch.from_numpy(array) for array in (h_all, p_all, y, np.sqrt(scale), flip)))


def _rounded(values: Float64, wanted: bool) -> Float64:
    return round_bf16(values) if wanted else values


def _or_zero(bias: Tensor | None) -> Float64 | float:
    return 0.0 if bias is None else np.asarray(bias.numpy(), dtype=np.float64)


def activate_torch(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """`activate` for tensors, in their own dtype."""
    if activation is Activation.clamped:
        gate, up = gate.clamp(max=CLAMP_LIMIT), up.clamp(-CLAMP_LIMIT, CLAMP_LIMIT)
        return gate * torch.sigmoid(CLAMP_ALPHA * gate) * (up + 1)
    if activation is Activation.silu:
        return torch.nn.functional.silu(gate) * up
    approximate = "tanh" if activation is Activation.gelu_tanh else "none"
    return torch.nn.functional.gelu(gate, approximate=approximate) * up


def compute_torch(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    experts: Experts,
    activation: Activation,
    rounding: Rounding = KERNEL,
) -> Stages:
    """`compute` expert by expert in float64 on the device of `x`."""
    tokens, top_k = top_k_index.shape
    x, weights = x.double(), top_k_weights.double()
    h_all: Tensor | None = None
    p_all = x.new_zeros(tokens, top_k, x.shape[1])
    square, product = torch.zeros_like(p_all), torch.zeros_like(p_all)
    for expert_id in torch.unique(top_k_index).tolist():
        dense = experts(expert_id)
        if dense is None:
            continue
        t, j = torch.nonzero(top_k_index == expert_id, as_tuple=True)
        gate_up = _rounded_torch(x[t] @ dense.gate_up.T, rounding.gate_up)
        gate_up = gate_up if dense.gate_up_bias is None else gate_up + dense.gate_up_bias
        gate, up = gate_up.chunk(2, dim=-1)
        h = _rounded_torch(activate_torch(gate, up, activation), rounding.h)
        h_all = x.new_zeros(tokens, top_k, h.shape[1]) if h_all is None else h_all
        p = _rounded_torch(h @ dense.down.T, rounding.p)
        size = activate_torch(gate, up.abs(), activation)
        h_all[t, j], square[t, j], product[t, j] = h, size**2 @ dense.down.T**2, p.abs()
        p_all[t, j] = p if dense.down_bias is None else p + dense.down_bias
    h_all = x.new_zeros(tokens, top_k, 0) if h_all is None else h_all
    factor = weights[:, :, None]
    scale = (square * factor**2).sum(1).sqrt()
    flip = rounding.p * BF16_STEP * (product * factor.abs()).sum(1)
    return Stages(h_all, p_all, (p_all * factor).sum(1), scale, flip)


def _rounded_torch(values: Tensor, wanted: bool) -> Tensor:
    return values.float().bfloat16().double() if wanted else values


def quantize(weight: Tensor, form: WeightForm, short_scales: bool = False) -> Codes:
    """Nearest codes and symmetric scales of weights [B, rows, columns]: a scale maps the largest weight to 7 or 127.

    `short_scales` are values of BF16 too, as `moespeq quantize` chooses them.
    """
    columns = weight.shape[-1]
    size = form.group_columns(columns)
    padded = torch.nn.functional.pad(weight.float(), (0, form.groups(columns) * size - columns))
    groups = torch.unflatten(padded, -1, (-1, size))
    scales = (groups.abs().amax(-1) / (form.zero - 1)).clamp(min=2.0**-14)
    scales = (scales.bfloat16() if short_scales else scales).half()
    codes = (groups / scales[..., None].float()).round().clamp(-form.zero, form.zero - 1) + form.zero
    return Codes(codes.to(torch.uint8).flatten(-2)[..., :columns].contiguous(), scales)


def dequantize(linear: Codes, form: WeightForm, rounded: bool = False) -> Tensor:
    """(code - zero) * scale as float64 [B, rows, columns], exact, or rounded once to BF16."""
    columns = linear.codes.shape[-1]
    groups = torch.arange(columns, device=linear.codes.device) // form.group_columns(columns)
    values = (linear.codes.double() - form.zero) * linear.scales.double()[..., groups]
    return values.float().bfloat16().double() if rounded else values


def slot_experts(layout: SlotLayout, pool: Tensor, slot_of: list[int], rounded: bool = False) -> Experts:
    """The experts of a pool uint8 [S, slot_bytes], unpacked when asked for.

    Args:
        layout: of the pool's slots.
        pool: the slots.
        slot_of: an expert's slot, -1 where it is not here.
        rounded: whether dequantised weights are rounded to BF16, as those computed with by grouped GEMM are.
    """

    def expert(expert_id: int) -> Dense | None:
        slot = slot_of[expert_id]
        if slot < 0:
            return None
        slots = pool[slot : slot + 1]
        if layout.form.is_coded:
            gate_up, down, biases = layout.unpack_codes(slots)
            weights = dequantize(gate_up, layout.form, rounded)[0], dequantize(down, layout.form, rounded)[0]
        else:
            plain_gate_up, plain_down, biases = layout.views_bf16(slots)
            weights = plain_gate_up[0].double(), plain_down[0].double()
        if biases is None:
            return Dense(*weights)
        return Dense(*weights, biases.gate_up[0].double(), biases.down[0].double())

    return expert


def error_bound(stages: Stages) -> Tensor:
    """How far a result y in BF16 may be from `stages.y`, element by element: float64 [M, H].

    Twice the rounding of the result; for each gate, up and h that lies beside a tie and may round the other way than
    here, or for those that are not rounded, a relative error of 2^-7 of random sign on each product; and a whole step
    for each p that is rounded, as one that lies beside a tie often is the greater part of its y.
    """
    return BF16_STEP / 2 * stages.y.abs() + BF16_STEP * stages.scale + stages.flip + 2.0**-24
