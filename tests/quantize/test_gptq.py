"""The batched solver: the same codes as auto-gptq's, less output error than rounding, and no expert left broken."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moespeq_cli.quantize.gptq import Solution, SolverSettings, inverse_factors, round_solution, solve
from moespeq_cli.quantize.hessian import hessian
from moespeq_cli.quantize.report import relative_errors
from moespeq_cli.quantize.scales import SMALLEST_FLOAT16, absmax_scales, rtn_scales, searched_scales
from moespeq_cli.quantize.solver import AutoGptqSolver, auto_gptq_available, import_auto_gptq, make_solver
from runtime.artifacts.gptq_format import dequantize, effective_group_size
from runtime.errors import InputError

needs_auto_gptq = pytest.mark.skipif(not auto_gptq_available(), reason="auto-gptq is not installed")
CASES = [(4, 128, 256, 64), (4, 32, 96, 40), (4, -1, 320, 24), (8, -1, 192, 32), (8, 64, 128, 16)]


def problem(experts: int, out_features: int, in_features: int, tokens: int = 600, seed: int = 0):
    """Weights, correlated inputs and their Hessians."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(experts, in_features, in_features, generator=generator) / in_features**0.5
    inputs = torch.randn(experts, tokens, in_features, generator=generator) @ mixing
    weights = torch.randn(experts, out_features, in_features, generator=generator) * 0.05
    return weights, inputs, torch.stack([hessian(x) for x in inputs])


def output_error(weights: Tensor, solution: Solution, hessians: Tensor, settings: SolverSettings) -> float:
    size = effective_group_size(weights.shape[-1], settings.group_size)
    quantized = dequantize(solution.codes, solution.scales, solution.zeros, size, torch.float32)
    return float(relative_errors(weights, quantized, hessians)[1].mean())


def value_before_rounding(
    weight: Tensor, factor: Tensor, scales: Tensor, codes: Tensor, column: int, size: int, zero: int
) -> float:
    """In float64, what a row's weight at `column` is in steps, given the codes chosen before it."""
    left = weight.double().clone()
    for i in range(column):
        scale = float(scales[i // size])
        error = (left[i] - scale * (float(codes[i]) - zero)) / factor[i, i].double()
        left[i:] -= error * factor[i, i:].double()
    return float(left[column] / scales[column // size])


@needs_auto_gptq
@pytest.mark.auto_gptq
@pytest.mark.parametrize(("bits", "group_size", "in_features", "out_features"), CASES)
def test_same_codes_as_auto_gptq_on_the_same_hessian(
    bits: int, group_size: int, in_features: int, out_features: int
) -> None:
    settings = SolverSettings(bits=bits, group_size=group_size, scale_search=False, token_damping=False)
    weights, inputs, hessians = problem(4, out_features, in_features)
    tokens = [inputs.shape[1]] * 4
    ours = solve(weights, hessians, tokens, settings)
    theirs = AutoGptqSolver().solve(weights, hessians, tokens, settings)
    assert ours.methods == theirs.methods == ["gptq"] * 4 and ours.damping == theirs.damping
    assert torch.equal(ours.scales, theirs.scales) and torch.equal(ours.zeros, theirs.zeros)
    # The two add in another order (one matrix, a batch of them), so a weight half-way between two codes may round the
    # other way, and the columns after it follow. Every row that differs must begin with such a tie.
    differing = (ours.codes != theirs.codes).any(-1)
    assert differing.float().mean() < 0.02
    size = effective_group_size(in_features, group_size)
    factors, _, _ = inverse_factors(hessians, [settings.damp_percent] * 4)
    scales = absmax_scales(weights, size, bits)
    for expert, row in torch.nonzero(differing).tolist():
        column = int(torch.nonzero(ours.codes[expert, row] != theirs.codes[expert, row])[0])
        steps = value_before_rounding(
            weights[expert, row],
            factors[expert],
            scales[expert, row],
            ours.codes[expert, row],
            column,
            size,
            1 << bits - 1,
        )
        assert abs(abs(steps - round(steps)) - 0.5) < 1e-3, (expert, row, column, steps)


@needs_auto_gptq
@pytest.mark.auto_gptq
def test_auto_gptq_sums_the_hessian_that_ours_is_given() -> None:
    _, inputs, hessians = problem(1, 32, 128)
    theirs = import_auto_gptq("quantization.gptq").GPTQ(torch.nn.Linear(128, 32, bias=False))
    for piece in inputs[0].split(100):
        theirs.add_batch(piece[None], None)
    # it divides by batches where we divide by tokens; GPTQ's codes do not depend on the factor
    torch.testing.assert_close(theirs.H * theirs.nsamples / 600, hessians[0], rtol=1e-5, atol=1e-5)


@needs_auto_gptq
@pytest.mark.auto_gptq
def test_channels_that_were_always_zero_are_the_one_difference_by_choice() -> None:
    weights, inputs, _ = problem(1, 16, 128)
    weights[0, :, [0, 64]] = 0.3  # the largest of its group, so that both take the scales from it
    dead = [5, 77]
    inputs[0, :, dead] = 0.0
    hessians = torch.stack([hessian(inputs[0])])
    settings = SolverSettings(group_size=64, scale_search=False, token_damping=False)
    ours = solve(weights, hessians, [600], settings)
    theirs = AutoGptqSolver().solve(weights, hessians, [600], settings)
    rounded = round_solution(weights, settings)
    assert bool((theirs.codes[0][:, dead] == 8).all())  # auto-gptq drops these weights
    assert torch.equal(ours.codes[0][:, dead], rounded.codes[0][:, dead])  # ours rounds them: other text may use them
    alive = [channel for channel in range(128) if channel not in dead]
    same = (ours.codes[0][:, alive] == theirs.codes[0][:, alive]).float().mean()
    assert same > 0.99


@needs_auto_gptq
@pytest.mark.auto_gptq
def test_singular_hessians_need_the_same_damping_from_both() -> None:
    weights, inputs, _ = problem(2, 16, 64)
    hessians = torch.stack([hessian(x[:3]) for x in inputs])
    settings = SolverSettings(group_size=64, damp_percent=1e-9, scale_search=False, token_damping=False)
    ours = solve(weights, hessians, [3, 3], settings)
    theirs = AutoGptqSolver().solve(weights, hessians, [3, 3], settings)
    assert ours.damping == theirs.damping and min(ours.damping) > 1e-9


@pytest.mark.parametrize(("bits", "group_size", "in_features", "out_features"), CASES)
def test_gptq_beats_rounding_and_the_search_beats_the_largest_weight(
    bits: int, group_size: int, in_features: int, out_features: int
) -> None:
    weights, inputs, hessians = problem(3, out_features, in_features)
    held_out = torch.stack([hessian(x[300:]) for x in inputs])
    fitted = torch.stack([hessian(x[:300]) for x in inputs])
    plain = SolverSettings(bits=bits, group_size=group_size, scale_search=False, token_damping=False)
    searched = SolverSettings(bits=bits, group_size=group_size, token_damping=False)
    rounded = output_error(weights, round_solution(weights, plain), hessians, plain)
    by_gptq = output_error(weights, solve(weights, fitted, [300] * 3, plain), held_out, plain)
    by_search = output_error(weights, solve(weights, fitted, [300] * 3, searched), held_out, searched)
    assert by_gptq < 0.95 * rounded
    assert by_search < (0.998 if bits == 4 else 1.01) * by_gptq  # eight bits clip next to nothing


@pytest.mark.parametrize("tokens", [32, 64, 128, 256])
def test_few_tokens_make_no_expert_worse_than_rounding(tokens: int) -> None:
    weights, inputs, _ = problem(4, 32, 128, tokens=2000)
    few = torch.stack([hessian(x[:tokens]) for x in inputs])
    held_out = torch.stack([hessian(x[1000:]) for x in inputs])
    trusting = SolverSettings(scale_search=False, token_damping=False)
    damped = SolverSettings(scale_search=False)
    rounded = output_error(weights, round_solution(weights, damped), held_out, damped)
    by_trust = output_error(weights, solve(weights, few, [tokens] * 4, trusting), held_out, trusting)
    by_damping = output_error(weights, solve(weights, few, [tokens] * 4, damped), held_out, damped)
    assert by_damping < rounded
    assert tokens > 128 or by_damping < by_trust


@given(
    bits=st.sampled_from([4, 8]),
    magnitude=st.sampled_from([1e-9, 1e-6, 1e-3, 1.0, 300.0]),
    kind=st.sampled_from(["normal", "positive", "zero", "outlier"]),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=60, deadline=None)
def test_rounding_is_within_half_of_the_stored_scale(bits: int, magnitude: float, kind: str, seed: int) -> None:
    weights = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(seed)) * magnitude
    if kind == "positive":
        weights = weights.abs()
    if kind == "zero":
        weights[:, :, :32] = 0.0
    if kind == "outlier":
        weights[0, 0, 0] = 100 * magnitude
    settings = SolverSettings(bits=bits, group_size=32)
    rounded = round_solution(weights, settings)
    quantized = dequantize(rounded.codes, rounded.scales, rounded.zeros, 32, torch.float32)
    steps = rounded.scales.float().repeat_interleave(32, -1)
    assert bool(torch.isfinite(quantized).all()) and bool((rounded.scales > 0).all())
    assert bool(((weights - quantized).abs() <= 0.5 * steps * (1 + 1e-6)).all())


def test_experts_with_too_few_tokens_are_rounded_and_the_others_are_not() -> None:
    weights, _, hessians = problem(3, 16, 64)
    hessians[1] = 0
    settings = SolverSettings(group_size=32, min_tokens=8, token_damping=False)
    mixed = solve(weights, hessians, [100, 0, 7], settings)
    rounded = round_solution(weights, settings)
    assert mixed.methods == ["gptq", "rtn", "rtn"] and mixed.damping == [0.01, 0.0, 0.0]
    assert torch.equal(mixed.codes[1:], rounded.codes[1:]) and torch.equal(mixed.scales[1:], rounded.scales[1:])
    assert not torch.equal(mixed.codes[0], rounded.codes[0])


@pytest.mark.parametrize("size", [64, 256, 300, 600])
def test_factors_are_those_of_the_damped_inverse(size: int) -> None:
    """Less and more channels than are factorised at once, in float64: U is upper and U H U^T is one."""
    _, _, hessians = problem(2, 8, size, tokens=2 * size)
    factors, damping, sound = inverse_factors(hessians, [0.01, 0.1])
    assert damping == [0.01, 0.1] and bool(sound.all()) and torch.equal(factors, factors.triu())
    damped = hessians.double()
    diagonal = damped.diagonal(dim1=1, dim2=2)
    diagonal += torch.tensor(damping, dtype=torch.float64)[:, None] * diagonal.mean(1, keepdim=True)
    upper = factors.double()
    unit = upper @ damped @ upper.mT
    torch.testing.assert_close(unit, torch.eye(size, dtype=torch.float64).expand_as(unit), rtol=0, atol=1e-3)


def test_errors_equal_those_of_the_outputs() -> None:
    """More channels than are multiplied at once, against float64 and the inputs themselves."""
    weights, inputs, hessians = problem(2, 8, 600)
    near = weights + 0.01 * torch.randn(weights.shape, generator=torch.Generator().manual_seed(5))
    weight_errors, output_errors = relative_errors(weights, near, hessians)
    lost = (inputs.double() @ (weights - near).double().mT).flatten(1).norm(dim=1)
    whole = (inputs.double() @ weights.double().mT).flatten(1).norm(dim=1)
    torch.testing.assert_close(output_errors.double(), lost / whole, rtol=1e-4, atol=0)
    exact = (weights - near).flatten(1).norm(dim=1) / weights.flatten(1).norm(dim=1)
    torch.testing.assert_close(weight_errors, exact, rtol=1e-4, atol=0)


def test_a_batch_gives_what_each_linear_gives_alone() -> None:
    weights, _, hessians = problem(3, 16, 192)
    settings = SolverSettings(group_size=64)
    together = solve(weights, hessians, [600] * 3, settings)
    for expert in range(3):
        alone = solve(weights[expert : expert + 1], hessians[expert : expert + 1], [600], settings)
        assert (alone.codes[0] != together.codes[expert]).float().mean() < 0.01
        assert torch.equal(alone.scales[0], together.scales[expert])


def test_damping_rises_only_where_the_factorisation_fails() -> None:
    weights, inputs, hessians = problem(2, 16, 64)
    hessians[1] = hessian(inputs[1][:1]) * 1e4
    hessians[1][0, 1] = hessians[1][1, 0] = 2 * hessians[1].diagonal().max()  # no longer positive definite
    solution = solve(
        weights, hessians, [600, 600], SolverSettings(group_size=64, damp_percent=0.001, token_damping=False)
    )
    assert solution.damping[0] == 0.001 and (solution.damping[1] > 0.001 or solution.methods[1] == "rtn")
    quantized = dequantize(solution.codes, solution.scales, solution.zeros, 64, torch.float32)
    assert bool(torch.isfinite(quantized).all())


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -1e6])
def test_a_hessian_beyond_repair_falls_back_to_rounding(poison: float) -> None:
    weights, _, hessians = problem(2, 16, 64)
    hessians[0, 3, 3] = poison
    solution = solve(weights, hessians, [600, 600], SolverSettings(group_size=64))
    assert solution.methods == ["rtn", "gptq"]


def test_without_auto_gptq_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util
    import sys

    monkeypatch.delitem(sys.modules, "auto_gptq", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError) as caught:
        make_solver("auto-gptq")
    assert "pip install --no-deps" in caught.value.mend
    with pytest.raises(InputError, match="batched or auto-gptq"):
        make_solver("exact")


@settings(max_examples=20, deadline=None)
@given(st.sampled_from((4, 8)), st.integers(-28, 10), st.integers(0, 2**31))
def test_scales_are_values_of_bf16_too(bits: int, power: int, seed: int) -> None:
    """Of eight significant bits: the kernel for residual records then rounds a weight's draft value in one step."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(1, 3, 64, generator=generator) * 2.0**power
    least, rounded = absmax_scales(weights, 32, bits), rtn_scales(weights, 32, bits)
    searched = searched_scales(weights.transpose(1, 2).contiguous(), torch.eye(64)[None], 32, bits)
    for scales in (rounded, searched):
        assert torch.equal(scales.bfloat16().float(), scales) and torch.equal(scales.half().float(), scales)
        assert (scales > 0).all()
    assert (least <= rounded).all() and (rounded <= least * (1 + 2.0**-7) + SMALLEST_FLOAT16).all()
