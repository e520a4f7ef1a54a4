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
    largest = _grouped(weights, size).abs().amax(-1)
    largest = torch.where(largest == 0, 1.0, largest)
    scales = (2.0 * largest) / ((1 << bits) - 1)
    return torch.where(scales < SMALLEST_NORMAL_FLOAT16, _float16_above(scales), scales)


def rtn_scales(weights: Tensor, size: int, bits: int) -> Tensor:
    """`absmax_scales` rounded up to float16, so that rounding to nearest stays within half of the stored scale."""
    return _float16_above(absmax_scales(weights, size, bits))


def round_to_nearest(weights: Tensor, scales: Tensor, size: int, bits: int) -> Tensor:
    """Nearest code of every weight, uint8 [E, out, in]."""
    zero = symmetric_zero(bits)
    grouped = _grouped(weights, size)
    codes = torch.clamp(torch.round(grouped / scales.unsqueeze(-1)) + zero, 0, (1 << bits) - 1)
    return codes.flatten(-2).to(torch.uint8)


def searched_scales(weights: Tensor, hessians: Tensor, size: int, bits: int) -> Tensor:
    """Scales from the clipping ratio under which a group's own rounding costs least at the output.

    The cost weighs each weight's squared error with its channel's second moment. Weighing with the whole block of the
    Hessian does no better on the embedded model and costs `size` times as much; not weighing does worse
    (docs/quantize.md has the figures).

    Args:
        weights: float32 [E, out, in].
        hessians: float32 [E, in, in].
        size: channels a group.
        bits: 4 or 8.

    Returns:
        float32 [E, out, groups], values of float16.
    """
    largest = absmax_scales(weights, size, bits)
    importance = _grouped(hessians.diagonal(dim1=1, dim2=2), size)
    rows = max(1, (CPU_BLOCK if weights.device.type == "cpu" else GPU_BLOCK) // weights.shape[-1])
    found = torch.empty_like(largest)
    for expert in range(len(weights)):
        for start in range(0, weights.shape[1], rows):
            part = slice(start, start + rows)
            found[expert, part] = _search(
                _grouped(weights[expert, part], size), largest[expert, part], importance[expert], bits
            )
    return found


def _search(grouped: Tensor, largest: Tensor, importance: Tensor, bits: int) -> Tensor:
    """Best scales of some rows: [rows, groups, size], [rows, groups], [groups, size] to [rows, groups]."""
    zero, maximum = symmetric_zero(bits), (1 << bits) - 1
    best_scales = _float16_above(largest)
    best_costs = torch.full_like(largest, torch.inf)
    errors = torch.empty_like(grouped)
    for ratio in SEARCH_RATIOS:
        scales = _float16_above(largest * ratio)
        step = scales.unsqueeze(-1)
        torch.div(grouped, step, out=errors)
        errors.round_().clamp_(-zero, maximum - zero).mul_(step).sub_(grouped).square_().mul_(importance)
        costs = errors.sum(-1)
        better = costs < best_costs
        best_costs = torch.where(better, costs, best_costs)
        best_scales = torch.where(better, scales, best_scales)
    return best_scales


def _grouped(weights: Tensor, size: int) -> Tensor:
    return weights.reshape(*weights.shape[:-1], weights.shape[-1] // size, size)


def _float16_above(scales: Tensor) -> Tensor:
    """The least float16 that is not below, as float32."""
    near = scales.to(torch.float16)
    above = (near.view(torch.int16) + 1).view(torch.float16)  # the next one, as scales are positive
    result = torch.where(near.to(torch.float32) < scales, above, near)
    return result.to(torch.float32).clamp_min(SMALLEST_FLOAT16)
