"""The kernel with roles keeps what the fused kernel's tests ask for, on a GPU of compute capability 9.0 or newer."""

from __future__ import annotations

import pytest

from runtime.kernels.device import Gpu, current_gpu
from runtime.kernels.layout import SlotLayout
from runtime.kernels.roles import RolesExperts
from runtime.kernels.roles_plan import CAPABILITY, fits
from runtime.kernels.shape import ExpertShape, WeightForm
from tests.kernels import layers, test_fused

pytestmark = pytest.mark.gpu

every_case = pytest.mark.parametrize(
    ("shape", "form"),
    [(shape, form) for shape, form in layers.CASES if form.is_coded],
    ids=lambda value: (
        f"{value.kind}g{value.group_size}"
        if isinstance(value, WeightForm)
        else f"{value.num_experts}:{value.top_k}:{value.hidden_size}x{value.moe_intermediate_size}"
    ),
)


@pytest.fixture(autouse=True)
def roles(monkeypatch: pytest.MonkeyPatch, gpu: Gpu) -> None:
    """Layers compute with the kernel with roles."""
    if gpu.capability < CAPABILITY:
        pytest.skip("needs a GPU of compute capability 9.0 or newer")
    monkeypatch.setattr(layers, "FusedExperts", lambda layout, config: RolesExperts(layout))


def needs_room(shape: ExpertShape, form: WeightForm) -> None:
    limit = current_gpu().smem_per_block_bytes
    if not fits(SlotLayout(shape, form), limit):
        pytest.skip(f"does not fit into {limit} bytes of shared memory")


@every_case
def test_probes(shape: ExpertShape, form: WeightForm) -> None:
    needs_room(shape, form)
    test_fused.test_probes(shape, form)


@every_case
def test_a_row_has_the_same_bits_in_any_batch(shape: ExpertShape, form: WeightForm) -> None:
    needs_room(shape, form)
    test_fused.test_a_row_has_the_same_bits_in_any_batch(shape, form)


@every_case
def test_repeats_have_the_same_bits(shape: ExpertShape, form: WeightForm) -> None:
    needs_room(shape, form)
    test_fused.test_repeats_have_the_same_bits(shape, form)


@every_case
def test_experts_that_are_not_here(shape: ExpertShape, form: WeightForm) -> None:
    needs_room(shape, form)
    test_fused.test_experts_that_are_not_here(shape, form)


@every_case
@pytest.mark.parametrize("parts", [2, 3])
def test_passes_over_parts_of_the_experts_have_the_bits_of_one(
    shape: ExpertShape, form: WeightForm, parts: int
) -> None:
    needs_room(shape, form)
    test_fused.test_passes_over_parts_of_the_experts_have_the_bits_of_one(shape, form, parts)
