"""Scales of symmetric groups: from the largest weight, or from a search over clipping."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.artifacts.gptq_format import symmetric_zero

SEARCH_RATIOS = tuple(1.0 - 0.025 * step for step in range(17))  # of the largest weight: 1.0 down to 0.6
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
    largest = weights.unflatten(-1, (-1, size)).abs().amax(-1)
    largest = torch.where(largest == 0, 1.0, largest)
    scales = (2.0 * largest) / ((1 << bits) - 1)
    return torch.where(scales < SMALLEST_NORMAL_FLOAT16, _float16_above(scales), scales)


def rtn_scales(weights: Tensor, size: int, bits: int) -> Tensor:
    """`absmax_scales` rounded up to float16, so that rounding to nearest stays within half of the stored scale."""
    return _float16_above(absmax_scales(weights, size, bits))


def round_to_nearest(weights: Tensor, scales: Tensor, size: int, bits: int) -> Tensor:
    """Nearest code of every weight, uint8 [E, out, in]."""
    zero = symmetric_zero(bits)
    grouped = weights.unflatten(-1, (-1, size))
    codes = torch.clamp(torch.round(grouped / scales.unsqueeze(-1)) + zero, 0, (1 << bits) - 1)
    return codes.flatten(-2).to(torch.uint8)


def searched_scales(weights: Tensor, hessians: Tensor, size: int, bits: int) -> Tensor:
    """Scales from the clipping ratio with the least output error of each group's own rounding.

    Args:
        weights: float32 [E, out, in].
        hessians: float32 [E, in, in].
        size: channels a group.
        bits: 4 or 8.

    Returns:
        float32 [E, out, groups], values of float16.
    """
    largest = absmax_scales(weights, size, bits)
    zero, maximum = symmetric_zero(bits), (1 << bits) - 1
    grouped = weights.unflatten(-1, (-1, size))
    best_scales = _float16_above(largest)
    best_errors = torch.full_like(largest, torch.inf)
    blocks = _diagonal_blocks(hessians, size)
    for ratio in SEARCH_RATIOS:
        scales = _float16_above(largest * ratio)
        step = scales.unsqueeze(-1)
        errors = grouped - step * (torch.clamp(torch.round(grouped / step) + zero, 0, maximum) - zero)
        outputs = torch.einsum("eogi,egij->eogj", errors, blocks)
        cost = (outputs * errors).sum(-1)
        better = cost < best_errors
        best_errors = torch.where(better, cost, best_errors)
        best_scales = torch.where(better, scales, best_scales)
    return best_scales


def _diagonal_blocks(hessians: Tensor, size: int) -> Tensor:
    """[E, in, in] to the blocks of channels that share a scale, [E, groups, size, size]."""
    groups = hessians.shape[-1] // size
    return torch.stack([hessians[:, g * size : (g + 1) * size, g * size : (g + 1) * size] for g in range(groups)], 1)


def _float16_above(scales: Tensor) -> Tensor:
    """The least float16 that is not below, as float32."""
    near = scales.to(torch.float16)
    above = (near.view(torch.int16) + 1).view(torch.float16)  # the next one, as scales are positive
    result = torch.where(near.to(torch.float32) < scales, above, near)
    return result.to(torch.float32).clamp_min(SMALLEST_FLOAT16)
