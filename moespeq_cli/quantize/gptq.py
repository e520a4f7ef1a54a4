"""GPTQ for all experts of a layer at once: batched factorisation, columns in blocks, scales fixed beforehand."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moespeq_cli.quantize.scales import absmax_scales, round_to_nearest, rtn_scales, searched_scales
from runtime.artifacts.gptq_format import effective_group_size, symmetric_zero

MAX_DAMP_PERCENT = 1.0  # past this the Hessian is mostly damping and says nothing
DAMP_STEP = 2.0  # each failed factorisation doubles the damping


@dataclass(frozen=True, slots=True)
class SolverSettings:
    """How the linears of a layer are quantised."""

    bits: int = 4
    group_size: int = 128  # as asked for; gptq_format.effective_group_size applies
    damp_percent: float = 0.01  # of the mean diagonal of the Hessian
    scale_search: bool = True  # choose each group's clipping by output error, instead of its largest weight
    token_damping: bool = True  # add in_features / tokens to the damping: few tokens make a noisy Hessian
    min_tokens: int = 1  # an expert that saw fewer is rounded to nearest
    block_size: int = 128  # columns whose updates to later columns are delayed and applied together

    def first_damping(self, in_features: int, tokens: int) -> float:
        """The damping to begin with for a Hessian of so many tokens.

        GPTQ trusts the Hessian, and one of few tokens is mostly noise: on held-out tokens its codes are then worse than
        rounding. The best damping was measured to follow in_features / tokens (docs/quantize.md).
        """
        return self.damp_percent + (in_features / tokens if self.token_damping else 0.0)


@dataclass(slots=True)
class Solution:
    """Codes of a batch of linears of one shape."""

    codes: Tensor  # uint8 [E, out, in]
    scales: Tensor  # float16 [E, out, groups]
    zeros: Tensor  # uint8 [E, out, groups]
    methods: list[str]  # "gptq" or "rtn"
    damping: list[float]  # the share of the mean diagonal that was added; 0 for rtn


def solve(weights: Tensor, hessians: Tensor, tokens: list[int], settings: SolverSettings) -> Solution:
    """Quantise a batch of linears by GPTQ, those with too few tokens by rounding to nearest.

    Args:
        weights: [E, out, in], any float dtype.
        hessians: float32 [E, in, in], 2 / n * sum of x x^T of each linear's own inputs.
        tokens: how many inputs each Hessian was made of.
        settings: bits, group size, damping and the rest.

    Source: GPTQ, arXiv 2210.17323. With scale_search and token_damping off, the codes are auto-gptq's with
    static_groups and without act-order, but for ties at float32 rounding, input channels that are always 0 (rounded,
    not zeroed) and groups with no negative weight (where its symmetric scale clips half of the range).
    """
    rounded = round_solution(weights, settings)
    enough = torch.tensor([count >= settings.min_tokens and count > 0 for count in tokens], device=weights.device)
    chosen = torch.nonzero(enough).flatten()
    if not len(chosen):
        return rounded
    first = [settings.first_damping(weights.shape[-1], tokens[expert]) for expert in chosen.tolist()]
    factors, damping, sound = inverse_factors(hessians[chosen], first)
    for expert, damp, good in zip(chosen.tolist(), damping, sound.tolist(), strict=True):
        if good:
            rounded.methods[expert], rounded.damping[expert] = "gptq", damp
    chosen, factors = chosen[sound], factors[sound]
    if not len(chosen):
        return rounded
    values = weights[chosen].to(torch.float32)
    size = effective_group_size(values.shape[-1], settings.group_size, bits=settings.bits)
    scales = (
        searched_scales(values, hessians[chosen], size, settings.bits)
        if settings.scale_search
        else absmax_scales(values, size, settings.bits)
    )
    rounded.codes[chosen] = _sweep(values, factors, scales, size, settings)
    rounded.scales[chosen] = scales.to(torch.float16)
    return rounded


def round_solution(weights: Tensor, settings: SolverSettings) -> Solution:
    """Round a batch of linears to nearest; no weight is off by more than half of its scale."""
    values = weights.to(torch.float32)
    size = effective_group_size(values.shape[-1], settings.group_size, bits=settings.bits)
    scales = rtn_scales(values, size, settings.bits)
    return Solution(
        codes=round_to_nearest(values, scales, size, settings.bits),
        scales=scales.to(torch.float16),
        zeros=torch.full_like(scales, symmetric_zero(settings.bits), dtype=torch.uint8),
        methods=["rtn"] * len(values),
        damping=[0.0] * len(values),
    )


def inverse_factors(hessians: Tensor, damp_percents: list[float]) -> tuple[Tensor, list[float], Tensor]:
    """Upper Cholesky factor of each damped Hessian's inverse, with the damping raised until it exists.

    Args:
        hessians: float32 [E, in, in].
        damp_percents: the first damping to try for each, as a share of its mean diagonal.

    Returns:
        The factors [E, in, in]; the damping that each needed; whether one was found at all, bool [E].
    """
    factors = torch.zeros_like(hessians)
    percents = torch.tensor(damp_percents, dtype=torch.float32, device=hessians.device)
    sound = torch.zeros(len(hessians), dtype=torch.bool, device=hessians.device)
    left = torch.nonzero(torch.isfinite(hessians).all(-1).all(-1)).flatten()
    while len(left):
        damped = hessians[left]
        diagonal = damped.diagonal(dim1=1, dim2=2)
        diagonal[diagonal == 0] = 1.0  # a channel that was always 0: any value will do, its row holds nothing else
        diagonal += percents[left, None] * diagonal.mean(1, keepdim=True)
        factor, good = _factor(damped)
        factors[left[good]], sound[left[good]] = factor[good], True
        left = left[~good & (percents[left] < MAX_DAMP_PERCENT)]
        percents[left] = (percents[left] * DAMP_STEP).clamp_max(MAX_DAMP_PERCENT)
    return factors, [round(percent, 6) for percent in percents.tolist()], sound


def _factor(damped: Tensor) -> tuple[Tensor, Tensor]:
    lower, failed = torch.linalg.cholesky_ex(damped)
    good = failed == 0
    if not good.all():  # a failed factor may hold anything; the inverse of the identity is harmless
        lower[~good] = torch.eye(damped.shape[-1], device=damped.device)
    upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
    return upper, good & (failed == 0) & torch.isfinite(upper).all(-1).all(-1)


def _sweep(values: Tensor, factors: Tensor, scales: Tensor, size: int, settings: SolverSettings) -> Tensor:
    """Round the columns from first to last, each error spread over the columns still to come.

    The work is done on [E, in, out], so that a column is contiguous.
    """
    experts, out_features, in_features = values.shape
    maximum, zero = (1 << settings.bits) - 1, symmetric_zero(settings.bits)
    left = values.transpose(1, 2).contiguous()
    steps = scales.transpose(1, 2).contiguous()
    codes = torch.empty(experts, in_features, out_features, dtype=torch.uint8, device=values.device)
    for start in range(0, in_features, settings.block_size):
        stop = min(start + settings.block_size, in_features)
        block = left[:, start:stop].clone()
        errors = torch.empty_like(block)
        for column in range(start, stop):
            place = column - start
            weight, scale = block[:, place], steps[:, column // size]
            code = torch.clamp(torch.round(weight / scale) + zero, 0, maximum)
            codes[:, column] = code.to(torch.uint8)
            error = (weight - scale * (code - zero)) / factors[:, column, column, None]
            errors[:, place] = error
            if column + 1 < stop:
                block[:, place + 1 :] -= factors[:, column, column + 1 : stop, None] * error[:, None]
        if stop < in_features:
            left[:, stop:].baddbmm_(factors[:, start:stop, stop:].transpose(1, 2), errors, alpha=-1.0)
    return codes.transpose(1, 2).contiguous()
