"""The constants of the BF16 kernel with roles: they fit, the source agrees with them, sums are those of its twin."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moespeq_cli.bench.geometry import KNOWN
from runtime.errors import ShapeError
from runtime.kernels import bf16_plan, fused, fused_plan
from runtime.kernels.catalog import A100, H200
from runtime.kernels.fused_config import FusedConfig
from runtime.kernels.layout import SlotLayout
from runtime.kernels.shape import ExpertShape, WeightForm
from tests.kernels.host import preprocessed

LIMIT_BYTES, BF16, ROLES = H200.smem_per_block_bytes, WeightForm("bf16"), FusedConfig()
CHECK = """#if SHARED_BYTES != EXPECTED_SHARED_BYTES
#error bytes
#endif
#if OFF_LISTS % 8 || OFF_NOTE % 8 || OFF_RED % 16 || OFF_PART % 16 || OFF_BARRIER % 8 || OFF_RED_NOTE % 8
#error places
#endif
#if STAGE_BYTES >= (1 << 20) || ROW_PITCH % 128 != 64
#error a stage
#endif
#if TEAM % PARTS || STEPS > 3 || TILE_STAGES > 2 || STAGES < 2
#error roles
#endif
"""


@st.composite
def whole_units(draw: st.DrawFn) -> ExpertShape:
    experts = draw(st.integers(1, 300))
    top_k = draw(st.integers(1, min(experts, 12)))
    return ExpertShape(experts, top_k, 128 * draw(st.integers(6, 18)), 128 * draw(st.integers(1, 26)))


@settings(max_examples=40, deadline=None)
@given(whole_units(), st.integers(1, 8))
def test_the_source_needs_what_the_plan_says(shape: ExpertShape, tokens: int) -> None:
    layout = SlotLayout(shape, BF16)
    alike = dict(fused_plan.plan(layout, tokens, ROLES, LIMIT_BYTES).source.defines)
    if not bf16_plan.fits(layout, tokens, ROLES, LIMIT_BYTES):
        assert fused.plan(layout, tokens, ROLES, H200).source.name == fused_plan.SOURCE
        return
    chosen = fused.plan(layout, tokens, ROLES, H200)
    assert chosen.source.name == bf16_plan.SOURCE
    assert chosen.smem_bytes <= LIMIT_BYTES and chosen.threads <= 1024 and chosen.max_tokens == tokens
    values = dict(chosen.source.defines)
    assert all(values[name] == alike[name] for name in ("TEAM", "PARTS", "HIDDEN", "INTER", "TOP_K", "MAX_PAIRS"))
    assert preprocessed(CHECK, chosen.source) == ""


@pytest.mark.parametrize(
    ("geometry", "wanted"),
    [
        ("qwen1.5-moe", "moe_bf16.cu"),
        ("deepseek-v2-lite", "moe_bf16.cu"),
        ("phi-3.5-moe", "moe_small.cu"),  # no registers for the tokens of a tile
        ("mixtral-8x7b", "moe_small.cu"),
    ],
)
def test_known_layers(geometry: str, wanted: str) -> None:
    layout = SlotLayout(KNOWN[geometry].shape, BF16)
    assert fused.plan(layout, 8, ROLES, H200).source.name == wanted
    assert fused.plan(layout, 16, ROLES, H200).source.name == "moe_small.cu"
    assert fused.plan(layout, 8, ROLES, A100).source.name == "moe_small.cu"
    other_sums = FusedConfig(team=4)
    assert fused.plan(layout, 8, other_sums, H200).source.name == "moe_small.cu"
    alike = FusedConfig(block_dim=512)
    assert fused.plan(layout, 8, alike, H200).source.name == "moe_small.cu"


@pytest.mark.parametrize(
    ("shape", "form", "tokens"),
    [
        (ExpertShape(4, 2, 1024, 256), WeightForm("int4", 128), 8),
        (ExpertShape(4, 2, 1024, 256), BF16, 9),
        (ExpertShape(4, 2, 1032, 256), BF16, 8),
        (ExpertShape(4, 2, 1024, 264), BF16, 8),
        (ExpertShape(4, 2, 896, 256), BF16, 8),
        (ExpertShape(4, 2, 2176, 256), BF16, 8),
        (ExpertShape(4, 3, 1024, 1664), BF16, 8),
    ],
)
def test_refuses_what_it_cannot_compute(shape: ExpertShape, form: WeightForm, tokens: int) -> None:
    layout = SlotLayout(shape, form)
    assert not bf16_plan.fits(layout, tokens, FusedConfig(), LIMIT_BYTES)
    with pytest.raises(ShapeError, match="whole units of 128 columns"):
        bf16_plan.plan(layout, tokens, FusedConfig(), LIMIT_BYTES)


def test_needs_room_for_two_stages_of_each_team() -> None:
    layout = SlotLayout(KNOWN["qwen1.5-moe"].shape, BF16)
    least = bf16_plan.plan(layout, 8, ROLES, 160 << 10)
    assert dict(least.source.defines)["STAGES"] == 2
    assert not bf16_plan.fits(layout, 8, ROLES, least.smem_bytes - 1)
