"""The reference against itself: NumPy pair by pair, torch expert by expert, and the library's own functions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from runtime.kernels.layout import SlotLayout
from runtime.kernels.reference import (
    EXACT,
    KERNEL,
    LIBRARY,
    Rounding,
    activate,
    activate_torch,
    compute,
    compute_torch,
    dequantize,
    error_bound,
    quantize,
    round_bf16,
    slot_experts,
)
from runtime.kernels.shape import Activation, ExpertShape, WeightForm
from tests.kernels.cases import make_pool, make_tokens

FORMS = [WeightForm("bf16"), WeightForm("int4", 32), WeightForm("int4", 96), WeightForm("int8", -1)]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("activation", list(Activation))
def test_numpy_and_torch_agree(form: WeightForm, activation: Activation) -> None:
    shape = ExpertShape(5, 3, 96, 40, activation, has_bias=activation is Activation.clamped)
    layout = SlotLayout(shape, form)
    pool, slot_of = make_pool(layout, 4, missing=(2,))
    x, top_k_index, top_k_weights = make_tokens(shape, 7)
    experts = slot_experts(layout, pool, slot_of.tolist())
    arrays = x.double().numpy(), top_k_index.numpy(), top_k_weights.double().numpy()
    for rounding in (EXACT, LIBRARY):  # rounded the same even so: a tie is not within 1e-15 of these values
        plain = compute(*arrays, experts, activation, rounding)
        fast = compute_torch(x, top_k_index, top_k_weights, experts, activation, rounding)
        for name in ("h", "p", "y", "scale", "flip"):
            torch.testing.assert_close(getattr(plain, name), getattr(fast, name), rtol=1e-11, atol=1e-13)
    missing = top_k_index == 2
    assert missing.any() and not plain.p[missing].any() and plain.p[~missing].any(-1).all()


@pytest.mark.parametrize("activation", list(Activation))
def test_activations_agree(activation: Activation) -> None:
    gate, up = np.linspace(-20, 20, 401), np.linspace(9, -9, 401)
    wanted = activate_torch(torch.from_numpy(gate), torch.from_numpy(up), activation).numpy()
    np.testing.assert_allclose(activate(gate, up, activation), wanted, rtol=1e-12, atol=1e-14)


def test_rounds_as_torch_does() -> None:
    values = np.random.default_rng(0).standard_normal(10000) * np.exp2(
        np.random.default_rng(1).integers(-60, 60, 10000)
    )
    ties = np.float32(
        [1.00390625, 1.01171875, -1.00390625, 3.0, 0.0]
    )  # halfway between two BF16 values, and exact ones
    for array in (values, ties.astype(np.float64)):
        assert (round_bf16(array) == torch.from_numpy(array).float().bfloat16().double().numpy()).all()


@pytest.mark.parametrize("form", FORMS[1:], ids=str)
def test_quantisation_is_within_half_a_step(form: WeightForm) -> None:
    weight = torch.randn(2, 16, 200, dtype=torch.float64) * 0.02
    linear = quantize(weight, form)
    steps = linear.scales.double()[..., torch.arange(200) // form.group_columns(200)]
    # a scale rounded down to FP16 leaves the largest weight a little outside
    assert ((dequantize(linear, form) - weight).abs() <= steps * 0.5 * (1 + 2**-6)).all()


@pytest.mark.parametrize("rounding", [KERNEL, LIBRARY], ids=str)
def test_the_bound_sees_a_missing_expert_and_a_missing_channel(rounding: Rounding) -> None:
    shape = ExpertShape(4, 2, 128, 64)
    layout = SlotLayout(shape, WeightForm("bf16"))
    pool, slot_of = make_pool(layout, 4)
    tokens = make_tokens(shape, 5)
    experts = slot_experts(layout, pool, slot_of.tolist())
    right = compute_torch(*tokens, experts, shape.activation, rounding)
    bound = error_bound(right)
    assert ((right.y.float().bfloat16().double() - right.y).abs() <= bound).all()
    _, down, _ = layout.views_bf16(pool)
    down[:, :, 17] = 0
    wrong = compute_torch(*tokens, experts, shape.activation, rounding)
    assert ((wrong.y - right.y).abs() > bound).any()
    slot_of[int(tokens[1][0, 1])] = -1
    experts = slot_experts(layout, pool, slot_of.tolist())
    less = compute_torch(*tokens, experts, shape.activation, rounding)
    assert ((less.y - right.y).abs() > bound)[0].float().mean() > 0.5


def test_the_bound_allows_what_a_tensor_core_does() -> None:
    """Sums off by 2^-24 (2 sqrt K + K / 16) of their spread: gate, up, h and p round the other way here and there."""
    generator = torch.Generator().manual_seed(3)

    def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        total, columns = left @ right.T, left.shape[1]
        size = torch.maximum((left**2 @ right.T**2).sqrt(), total.abs())
        noise = torch.randn(total.shape, generator=generator, dtype=torch.float64)
        return (total + noise * 2**-24 * (2 * columns**0.5 + columns / 16) * size).float().bfloat16().double()

    shape = ExpertShape(6, 6, 768, 64, Activation.clamped, has_bias=True)
    layout = SlotLayout(shape, WeightForm("bf16"))
    pool, slot_of = make_pool(layout, 6)
    x, top_k_index, top_k_weights = make_tokens(shape, 60)
    experts = slot_experts(layout, pool, slot_of.tolist())
    stages = compute_torch(x, top_k_index, top_k_weights, experts, shape.activation, LIBRARY)
    y = torch.zeros_like(stages.y)
    for expert_id in range(6):
        dense = experts(expert_id)
        assert dense is not None and dense.gate_up_bias is not None and dense.down_bias is not None
        t, j = torch.nonzero(top_k_index == expert_id, as_tuple=True)
        gate, up = (product(x[t].double(), dense.gate_up) + dense.gate_up_bias).chunk(2, dim=-1)
        h = activate_torch(gate, up, shape.activation).float().bfloat16().double()
        y[t] += (product(h, dense.down) + dense.down_bias) * top_k_weights[t, j, None].double()
    assert ((y.float().bfloat16().double() - stages.y).abs() <= error_bound(stages)).all()
