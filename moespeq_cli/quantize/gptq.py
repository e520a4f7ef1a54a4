"""GPTQ for all experts of a layer at once: batched factorisation, columns in blocks, scales fixed beforehand."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moespeq_cli.quantize.scales import absmax_scales, round_to_nearest, rtn_scales, searched_scales
from runtime.artifacts.gptq_format import effective_group_size, symmetric_zero

MAX_DAMP_PERCENT = 1.0  # past this the Hessian is mostly damping and says nothing
DAMP_STEP = 2.0  # each failed factorisation doubles the damping
FACTOR_BLOCK = 256  # rows factorised at a time
NEAR_COLUMNS = 32  # columns that an error is taken from at once; those behind them get it with the errors between


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
    chosen = [expert for expert, count in enumerate(tokens) if count >= max(settings.min_tokens, 1)]
    first = [settings.first_damping(weights.shape[-1], tokens[expert]) for expert in chosen]
    factors, damping, sound = inverse_factors(_some(hessians, chosen), first)
    good = [place for place, found in enumerate(sound.tolist()) if found]
    if not good:
        return round_solution(weights, settings)
    factors, damping, chosen = _some(factors, good), [damping[place] for place in good], [chosen[p] for p in good]
    columns = _some(weights, chosen).to(torch.float32).transpose(1, 2).contiguous()  # a copy, which the sweep uses up
    size = effective_group_size(columns.shape[1], settings.group_size, bits=settings.bits)
    if settings.scale_search:
        scales = searched_scales(columns, _some(hessians, chosen), size, settings.bits)
    else:
        scales = absmax_scales(_some(weights, chosen).to(torch.float32), size, settings.bits).transpose(1, 2)
    codes = _sweep(columns, factors, scales.contiguous(), size, settings)
    stored = scales.transpose(1, 2).to(torch.float16).contiguous()
    if len(chosen) == len(tokens):
        zeros = torch.full_like(stored, symmetric_zero(settings.bits), dtype=torch.uint8)
        return Solution(codes, stored, zeros, ["gptq"] * len(tokens), damping)
    solution = round_solution(weights, settings)
    solution.codes[chosen], solution.scales[chosen] = codes, stored
    for expert, damp in zip(chosen, damping, strict=True):
        solution.methods[expert], solution.damping[expert] = "gptq", damp
    return solution


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


def _some(stack: Tensor, places: list[int]) -> Tensor:
    """The matrices at these places; the stack itself where these are all."""
    return stack if len(places) == len(stack) else stack[places]


def _factor(damped: Tensor) -> tuple[Tensor, Tensor]:
    """Upper factors U of the inverses, U^T U = H^-1, and which of them exist; the inverses themselves are not needed.

    With rows and columns in reverse order H is L L^T, and the inverse of L, turned back, is U.
    """
    inverses, good = _lower_inverses(damped.flip(1, 2))
    return inverses.flip(1, 2), good & torch.isfinite(inverses).all(-1).all(-1)


def _lower_inverses(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Inverses of the Cholesky factors L, block by block so that nearly all of it is products of matrices.

    Args:
        matrices: symmetric [E, n, n]; overwritten with L.

    Returns:
        L^-1, zeros above the diagonal; whether the factorisation came through, bool [E].
    """
    experts, size, _ = matrices.shape
    inverses = torch.zeros_like(matrices)
    good = torch.ones(experts, dtype=torch.bool, device=matrices.device)
    for start in range(0, size, FACTOR_BLOCK):
        stop = min(start + FACTOR_BLOCK, size)
        here, before = slice(start, stop), slice(0, start)
        panel = matrices[:, start:, here]
        if start:
            panel.baddbmm_(matrices[:, start:, before], matrices[:, here, before].mT, alpha=-1.0)
        diagonal, failed = torch.linalg.cholesky_ex(panel[:, : stop - start])
        good &= failed == 0
        unit = torch.eye(stop - start, dtype=matrices.dtype, device=matrices.device)
        own = torch.linalg.solve_triangular(diagonal, unit.expand_as(diagonal), upper=False)
        inverses[:, here, here] = own
        if start:
            above = torch.bmm(matrices[:, here, before], inverses[:, before, before])
            inverses[:, here, before] = torch.bmm(own, above).neg_()
        if stop < size:
            panel[:, stop - start :] = torch.bmm(panel[:, stop - start :], own.mT)
    return inverses, good


def _sweep(columns: Tensor, factors: Tensor, scales: Tensor, size: int, settings: SolverSettings) -> Tensor:
    """Round the columns from first to last, each error spread over the columns still to come.

    Args:
        columns: the weights as [E, in, out], so that a column is contiguous; used up.
        factors: upper, [E, in, in].
        scales: [E, groups, out].
        size: channels a group.
        settings: bits and block size.

    Returns:
        Codes, uint8 [E, out, in].
    """
    experts, in_features, out_features = columns.shape
    maximum, zero = (1 << settings.bits) - 1, symmetric_zero(settings.bits)
    diagonal = factors.diagonal(dim1=1, dim2=2).unsqueeze(-1)
    codes = torch.empty(experts, in_features, out_features, dtype=torch.uint8, device=columns.device)
    values = torch.empty(experts, settings.block_size, out_features, device=columns.device)
    errors = torch.empty_like(values)
    for start in range(0, in_features, settings.block_size):
        stop = min(start + settings.block_size, in_features)
        for first in range(start, stop, NEAR_COLUMNS):
            last = min(first + NEAR_COLUMNS, stop)
            for column in range(first, last):
                weight, scale = columns[:, column], scales[:, column // size]
                code, error = values[:, column - start], errors[:, column - start]
                torch.div(weight, scale, out=code).round_().clamp_(-zero, maximum - zero)
                torch.addcmul(weight, scale, code, value=-1.0, out=error).div_(diagonal[:, column])
                if column + 1 < last:
                    near = factors[:, column, column + 1 : last, None]
                    columns[:, column + 1 : last].addcmul_(near, error[:, None], value=-1.0)
            _spread(columns[:, last:stop], factors[:, first:last, last:stop], errors[:, first - start : last - start])
        codes[:, start:stop] = values[:, : stop - start].add_(zero)
        _spread(columns[:, stop:], factors[:, start:stop, stop:], errors[:, : stop - start])
    return codes.transpose(1, 2).contiguous()


def _spread(columns: Tensor, factors: Tensor, errors: Tensor) -> None:
    """Take the errors of some columns from later ones."""
    if columns.shape[1]:
        columns.baddbmm_(factors.mT, errors, alpha=-1.0)
