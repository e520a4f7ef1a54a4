"""The constants of the kernel with roles: they fit, the source agrees with them, and they keep rows alike."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moespeq_cli.bench.geometry import KNOWN, Geometry
from runtime.errors import ShapeError
from runtime.kernels import codes_plan, fused
from runtime.kernels.catalog import A100, H200
from runtime.kernels.device import Gpu
from runtime.kernels.fused_config import FusedConfig
from runtime.kernels.fused_plan import MAX_PAIRS, MAX_TOKENS
from runtime.kernels.layout import SlotLayout
from runtime.kernels.shape import ExpertShape, Kind, WeightForm
from tests.kernels.host import preprocessed
from tests.kernels.test_fused_plan import LIMITS, forms, shapes

CHECK = """#if SHARED_BYTES != EXPECTED_SHARED_BYTES
#error bytes
#endif
#if OFF_LISTS % 8 || OFF_NOTE % 8 || OFF_RED % 16 || OFF_BARRIER % 8 || OFF_RED_NOTE % 8
#error places
#endif
#if OFF_SOURCE % 4 || OFF_PAIRS % 4 || OFF_X % 16
#error places
#endif
#if COMPUTE % TEAM || STAGE_UNITS % (2 * TEAM)
#error roles
#endif
#if STAGE_BYTES >= (1 << 20)
#error more bytes than an mbarrier counts
#endif
"""


@settings(max_examples=40, deadline=None)
@given(shapes(), forms.filter(lambda form: form.is_coded), st.sampled_from(list(LIMITS.values())), st.integers(1, 16))
def test_the_source_needs_what_the_plan_says(shape: ExpertShape, form: WeightForm, limit: int, tokens: int) -> None:
    layout = SlotLayout(shape, form)
    worthwhile = max(1, min(8, MAX_PAIRS // shape.top_k))
    try:
        most = codes_plan.plan(layout, 8, 0, limit).max_tokens
    except ShapeError as error:
        assert "shared memory" in str(error)
        most = 0
    assert codes_plan.fits(layout, limit) == (most == worthwhile)
    if most == 0:
        return
    chosen, one = codes_plan.plan(layout, tokens, 0, limit), codes_plan.plan(layout, 1, 0, limit)
    assert chosen.smem_bytes <= limit and chosen.threads <= 1024 and 1 <= chosen.max_tokens <= tokens
    assert preprocessed(CHECK, chosen.source) == ""
    values, single = dict(chosen.source.defines), dict(one.source.defines)
    assert values["TEAM"] == single["TEAM"]  # with the layer's sizes, all that the order of sums depends on


@pytest.mark.parametrize(
    ("gpu", "form", "config", "wanted"),
    [
        (H200, "int4", FusedConfig(), "moe_codes.cu"),
        (H200, "int8", FusedConfig(experts_per_block=8, k_split=8), "moe_codes.cu"),
        (H200, "int4", FusedConfig(block_dim=512), "moe_small.cu"),
        (A100, "int4", FusedConfig(), "moe_small.cu"),
    ],
)
def test_codes_are_computed_by_roles_where_the_gpu_can(gpu: Gpu, form: Kind, config: FusedConfig, wanted: str) -> None:
    layout = SlotLayout(ExpertShape(60, 4, 2048, 1408), WeightForm(form))
    for tokens in (1, 8, 16):
        assert fused.plan(layout, tokens, config, gpu).source.name == wanted


@pytest.mark.parametrize("name", ["qwen1.5-moe", "deepseek-v2-lite"])
def test_a_block_leaves_room_for_the_next_kernel_and_has_the_same_order_of_sums(name: str) -> None:
    layout = SlotLayout(KNOWN[name].shape, WeightForm("int4", 128))
    alone, beside = (fused.plan(layout, 8, FusedConfig(), H200, beside=beside) for beside in (False, True))
    assert beside.smem_bytes <= codes_plan.BESIDE_SMEM_BYTES < alone.smem_bytes and beside.threads < alone.threads
    values, others = dict(beside.source.defines), dict(alone.source.defines)
    assert (values["BESIDE"], others["BESIDE"]) == (1, 0) and values["TEAM"] == others["TEAM"]


def test_a_layer_that_needs_more_leaves_no_room() -> None:
    layout = SlotLayout(KNOWN["deepseek-v3"].shape, WeightForm("int4", 128))
    beside = codes_plan.plan(layout, 8, 0, 232448, beside=True)
    assert beside == codes_plan.plan(layout, 8, 0, 232448)


def test_a_layer_that_does_not_fit_roles_takes_the_other_kernel() -> None:
    layout = SlotLayout(ExpertShape(1024, 600, 512, 2048), WeightForm("int4"))
    assert not codes_plan.fits(layout, 131072)
    with pytest.raises(ShapeError, match="at most 131072 bytes of shared memory for a block of the kernel with roles"):
        codes_plan.plan(layout, 1, 0, 131072)
    small = replace(H200, smem_per_block_bytes=131072)
    assert fused.plan(layout, 1, FusedConfig(k_split=1), small).source.name == "moe_small.cu"


@pytest.mark.parametrize("limit_bytes", [LIMITS["H200"], LIMITS["99 KiB"]], ids=["H200", "99 KiB"])
@pytest.mark.parametrize("form", ["int4", "int8"])
@pytest.mark.parametrize("geometry", KNOWN.values(), ids=KNOWN)
def test_known_layers_take_8_tokens_a_launch(geometry: Geometry, form: Kind, limit_bytes: int) -> None:
    gpu = replace(H200, smem_per_block_bytes=limit_bytes)
    chosen = fused.plan(SlotLayout(geometry.shape, WeightForm(form)), MAX_TOKENS, FusedConfig(), gpu)
    assert chosen.max_tokens >= 8
    assert chosen.source.name == "moe_codes.cu" or (limit_bytes < LIMITS["H200"] and chosen.max_tokens == MAX_TOKENS)


def test_takes_no_bf16() -> None:
    layout = SlotLayout(ExpertShape(4, 2, 64, 64), WeightForm("bf16"))
    assert not codes_plan.fits(layout, 232448)
    with pytest.raises(ShapeError, match="int4 or int8"):
        codes_plan.plan(layout, 8, 0, 232448)


def test_a_first_claim_is_a_fair_share_of_few_tiles() -> None:
    chosen = codes_plan.plan(SlotLayout(ExpertShape(60, 4, 2048, 1408), WeightForm("int4")), 8, 0, 232448)
    assert [chosen.first_claim(tokens, 132) for tokens in (1, 6)] == [2, 2]
    assert chosen.first_claim(1, 704) == 1  # of 704 tiles
