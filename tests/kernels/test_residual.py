"""Residual records on the GPU: every bit back, and hostile ones known."""

from __future__ import annotations

import pytest
import torch

from moespeq_cli.bench.kernel_residual import ExactExperts, resident
from runtime.errors import ArtifactError
from runtime.kernels.dequant import plain_layout
from runtime.kernels.residual import ResidualPool, require_admitted
from runtime.kernels.shape import ExpertShape, WeightForm
from tests.kernels.residual_cases import SHAPES, every_word, hostile, wild

pytestmark = pytest.mark.gpu


def decoded(pool: ResidualPool, order: torch.Tensor) -> torch.Tensor:
    """Every expert in BF16, uint8 [E, slot_bytes]."""
    count = len(order)
    out = torch.zeros(count, plain_layout(pool.layout).slot_bytes, dtype=torch.uint8, device="cuda")
    own = torch.arange(count, dtype=torch.int32, device="cuda")
    pool.decode(order.int(), own, own, torch.tensor([count], dtype=torch.int32, device="cuda"), out)
    return out


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5])
def test_every_bit_comes_back(name: str, share: float) -> None:
    shape, form = SHAPES[name]
    experts = wild(ExactExperts.random(shape, form, shape.num_experts, seed=3), share, seed=5)
    order = torch.randperm(shape.num_experts).cuda()
    pool, _ = resident(experts, order)
    assert torch.equal(decoded(pool, order).cpu(), experts.exact())


def test_every_word_under_every_code() -> None:
    experts = every_word()
    order = torch.zeros(1, dtype=torch.int64, device="cuda")
    pool, _ = resident(experts, order)
    assert torch.equal(decoded(pool, order).cpu(), experts.exact())


def test_large_experts() -> None:
    experts = ExactExperts.random(ExpertShape(2, 1, 2048, 1408), WeightForm("int4", 128), 2)
    order = torch.tensor([1, 0], device="cuda")
    pool, _ = resident(experts, order)
    assert torch.equal(decoded(pool, order).cpu(), experts.exact())


def test_hostile_records_are_known_and_lead_nowhere() -> None:
    """Random bytes in the tables and anywhere; under compute-sanitizer no access may be outside."""
    experts, slots, length, changed = hostile(trials := 64)
    pool = ResidualPool.of(experts.layout, slots.cuda(), experts.bank().cuda())
    faults = torch.zeros(trials, dtype=torch.int32, device="cuda")
    order = torch.arange(trials, dtype=torch.int32, device="cuda")
    lengths = torch.full((trials,), length, dtype=torch.int64, device="cuda")
    pool.admit(order, torch.zeros_like(order), lengths, faults)
    assert bool((faults.cpu() > 0)[changed].all())
    out = torch.zeros(trials, plain_layout(pool.layout).slot_bytes, dtype=torch.uint8, device="cuda")
    number = torch.tensor([trials], dtype=torch.int32, device="cuda")
    pool.decode(order, torch.zeros_like(order), order, number, out)
    torch.cuda.synchronize()
    with pytest.raises(ArtifactError, match="record 0"):
        require_admitted(torch.ones(1, dtype=torch.int32), ["record 0"])
