"""Weights rounded to nearest, the same way for every kind of linear, so that their errors can be compared."""

from __future__ import annotations

import torch
from torch import Tensor

from moespeq_cli.quantize.scales import round_to_nearest, rtn_scales
from runtime.artifacts.gptq_format import symmetric_zero

GROUP_SIZE = 128  # as `moespeq quantize` groups by default
CPU_BLOCK = 1 << 20  # weights rounded at a time: the half dozen copies that it takes stay small, and near the cores
GPU_BLOCK = 1 << 26


def group_size(in_features: int) -> int:
    """Input channels that share a scale: 128, or all of them where 128 does not divide their number."""
    return GROUP_SIZE if in_features % GROUP_SIZE == 0 else in_features


def rounded(weights: Tensor, bits: int) -> Tensor:
    """The nearest weights that symmetric codes with a float16 scale a group can hold.

    Args:
        weights: [..., out, in].
        bits: 4 or 8.

    Returns:
        float32 of the same shape.
    """
    rows = weights.flatten(0, -2)
    result = torch.empty(rows.shape, device=weights.device)
    count = block_rows(rows)
    for start in range(0, len(rows), count):
        part = slice(start, start + count)
        result[part] = _rounded(rows[part].to(torch.float32), bits)
    return result.view(weights.shape)


def block_rows(weights: Tensor) -> int:
    """How many rows of [..., in] are worth rounding at a time."""
    block = CPU_BLOCK if weights.device.type == "cpu" else GPU_BLOCK
    return max(1, block // max(weights.shape[-1], 1))


def _rounded(values: Tensor, bits: int) -> Tensor:
    size = group_size(values.shape[-1])
    scales = rtn_scales(values, size, bits)
    codes = round_to_nearest(values, scales, size, bits).to(torch.float32) - symmetric_zero(bits)
    grouped = codes.reshape(*scales.shape, size)
    return (grouped * scales.unsqueeze(-1)).flatten(-2)
