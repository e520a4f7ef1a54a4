"""The constants of the kernel for residual records: they fit, and the source agrees with them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moespeq_cli.bench.geometry import KNOWN, Geometry
from runtime.errors import ShapeError
from runtime.kernels import fused_plan, residual_plan
from runtime.kernels.dequant import plain_layout
from runtime.kernels.fused_config import FusedConfig
from runtime.kernels.layout import SlotLayout
from runtime.kernels.shape import ExpertShape, WeightForm
from tests.kernels.host import preprocessed
from tests.kernels.test_fused_plan import LIMITS, forms, shapes

CHECK = """#if SHARED_BYTES != EXPECTED_SHARED_BYTES
#error bytes
#endif
#if OFF_LISTS % 8 || OFF_NOTE % 16 || OFF_BARRIER % 16 || OFF_RED % 16
#error places
#endif
#if OFF_BARRIER % 8 || OFF_RED_NOTE % 8 || OFF_SOURCE % 4
#error places
#endif
#if MOST_OUT < 8 || MOST_OUT > 32 || MOST_OUT + AHEAD > DEPTH || MOST_BATCH * STAGES1 > 32
#error stages under way, or of a batch
#endif
#if RING_BYTES % 16 || RING_BYTES < 2 * MOST_STAGE_BYTES || MOST_STAGE_BYTES >= (1 << 20)
#error the ring
#endif
"""


@settings(max_examples=30, deadline=None)
@given(
    shapes(), forms.filter(lambda form: form.kind == "int4"), st.sampled_from(list(LIMITS.values())), st.integers(1, 16)
)
def test_the_source_needs_what_the_plan_says(shape: ExpertShape, form: WeightForm, limit: int, tokens: int) -> None:
    layout = SlotLayout(shape, form)
    try:
        chosen = residual_plan.plan(layout, tokens, FusedConfig(), limit)
    except ShapeError as error:
        assert any(text in str(error) for text in ("shared memory", "columns"))
        return
    assert chosen.smem_bytes <= limit and 1 <= chosen.max_tokens <= tokens
    assert preprocessed(CHECK, chosen.source) == ""
    plain = dict(fused_plan.plan(plain_layout(layout), tokens, FusedConfig(), limit).source.defines)
    values = dict(chosen.source.defines)
    stages = -(-shape.hidden_size // 1024)
    assert -(-chosen.most_first_claim // int(values["PRODUCERS"])) * stages <= 32  # a lane has one
    assert [values[name] for name in ("TEAM", "PARTS")] == [plain[name] for name in ("TEAM", "PARTS")]


@pytest.mark.parametrize("geometry", KNOWN.values(), ids=KNOWN)
def test_known_layers_take_8_tokens_a_launch(geometry: Geometry) -> None:
    layout = SlotLayout(geometry.shape, WeightForm("int4", 128))
    assert residual_plan.plan(layout, 8, FusedConfig(), LIMITS["H200"]).max_tokens == 8


def test_a_tile_has_at_most_16_stages() -> None:
    widest = SlotLayout(ExpertShape(2, 1, 64, 16384), WeightForm("int4", 128))
    assert residual_plan.plan(widest, 1, FusedConfig(), LIMITS["H200"]).max_tokens == 1
    with pytest.raises(ShapeError, match="at most 16384 columns"):
        residual_plan.plan(SlotLayout(ExpertShape(2, 1, 64, 16392), WeightForm("int4", 128)), 1, FusedConfig(), 232448)
