"""Scales of symmetric groups: from the largest weight, or from a search over clipping."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.artifacts.gptq_format import symmetric_zero

SEARCH_RATIOS = tuple(1.0 - 0.025 * step for step in range(17))  # of the largest weight: 1.0 down to 0.6
CPU_BLOCK = 1 << 17  # weights searched at a time: half a MiB stays in a core's cache through all ratios
GPU_BLOCK = 1 << 26
SMALLEST_FLOAT16 = 2.0**-24
SMALLEST_NORMAL_FLOAT16 = 2.0**-14


def absmax_scales(weights: Tensor, size: int, bits: int) -> Tensor:
    """Scales under which the largest weight of a group is half a step past the last code, as auto-gptq chooses.

    Args:
        weights: float32 [E, out, in].
        size: channels a group.
        bits: 4 or 8.

    Returns:
        float32 [E, out, groups]; never 0 as float16, not even where a group is all zeros.
    """
    return _widest(_grouped(weights, size).abs().amax(-1), bits)


def _widest(largest: Tensor, bits: int) -> Tensor:
    """The scales for the groups' largest absolute values."""
    largest = torch.where(largest == 0, 1.0, largest)
    scales = (2.0 * largest) / ((1 << bits) - 1)
    return torch.where(scales < SMALLEST_NORMAL_FLOAT16, _stored_above(scales), scales)


def rtn_scales(weights: Tensor, size: int, bits: int) -> Tensor:
    """`absmax_scales` rounded up to what is stored, so that rounding to nearest stays within half of it."""
    return _stored_above(absmax_scales(weights, size, bits))


def round_to_nearest(weights: Tensor, scales: Tensor, size: int, bits: int) -> Tensor:
    """Nearest code of every weight, uint8 [E, out, in]."""
    zero = symmetric_zero(bits)
    grouped = _grouped(weights, size)
    codes = torch.clamp(torch.round(grouped / scales.unsqueeze(-1)) + zero, 0, (1 << bits) - 1)
    return codes.flatten(-2).to(torch.uint8)


def searched_scales(columns: Tensor, hessians: Tensor, size: int, bits: int) -> Tensor:
    """Scales from the clipping ratio under which a group's own rounding costs least at the output.

    The cost weighs each weight's squared error with its channel's second moment. Weighing with the whole block of the
    Hessian does no better on the embedded model and costs `size` times as much; not weighing does worse
    (docs/quantize.md has the figures).

    Args:
        columns: float32 [E, in, out], so that what shares a scale lies across and a loop runs along.
        hessians: float32 [E, in, in].
        size: channels a group.
        bits: 4 or 8.

    Returns:
        float32 [E, groups, out], values of both float16 and bfloat16.
    """
    experts, in_features, out_features = columns.shape
    groups = columns.reshape(-1, size, out_features)
    importance = hessians.diagonal(dim1=1, dim2=2).reshape(-1, 1, size)
    largest = _widest(groups.abs().amax(1), bits)
    block = CPU_BLOCK if columns.device.type == "cpu" else GPU_BLOCK
    width = min(out_features, max(1, block // size))
    count = max(1, block // (size * width))
    found = torch.empty_like(largest)
    for first in range(0, len(groups), count):
        part = slice(first, first + count)
        for start in range(0, out_features, width):
            rows = slice(start, start + width)
            found[part, rows] = _search(groups[part, :, rows], largest[part, rows], importance[part], bits)
    return found.view(experts, in_features // size, out_features)


def _search(weights: Tensor, largest: Tensor, importance: Tensor, bits: int) -> Tensor:
    """Best scales of some groups: [G, size, rows], [G, rows], [G, 1, size] to [G, rows]."""
    zero, maximum = symmetric_zero(bits), (1 << bits) - 1
    best_scales = _stored_above(largest)
    best_costs = torch.full_like(largest, torch.inf)
    steps = torch.empty(weights.shape, device=weights.device)
    errors = torch.empty_like(steps)
    for ratio in SEARCH_RATIOS:
        scales = _stored_above(largest * ratio)
        torch.div(weights, scales.unsqueeze(1), out=steps)
        torch.round(steps, out=errors).clamp_(-zero, maximum - zero).sub_(steps).square_()
        costs = torch.bmm(importance, errors).squeeze(1) * scales.square()
        better = costs < best_costs
        best_costs = torch.where(better, costs, best_costs)
        best_scales = torch.where(better, scales, best_scales)
    return best_scales


def _grouped(weights: Tensor, size: int) -> Tensor:
    return weights.reshape(*weights.shape[:-1], weights.shape[-1] // size, size)


def _stored_above(scales: Tensor) -> Tensor:
    """The least value of both float16 and bfloat16 that is not below, as float32.

    Eight significant bits move a scale by 0.8 % at most, and a kernel that rebuilds weights from residual records
    rounds a code times such a scale in one step (`cuda/residual.cuh`).
    """
    return _above(_above(scales, torch.bfloat16), torch.float16).clamp_min(SMALLEST_FLOAT16)


def _above(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The least value of a type that is not below positive ones, as float32."""
    near = values.to(dtype)
    above = (near.view(torch.int16) + 1).view(dtype)
    return torch.where(near.to(torch.float32) < values, above, near).to(torch.float32)
