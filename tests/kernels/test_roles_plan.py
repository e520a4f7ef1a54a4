"""The constants of the kernel with roles: they fit, the source agrees with them, and they keep rows alike."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.errors import ShapeError
from runtime.kernels import roles_plan
from runtime.kernels.compile import kernel_folder
from runtime.kernels.layout import SlotLayout
from runtime.kernels.shape import ExpertShape, WeightForm
from tests.kernels.host import cxx
from tests.kernels.test_fused_plan import LIMITS, forms, shapes

CHECK = """#include "moe_codes.cu"
#if SHARED_BYTES != EXPECTED_SHARED_BYTES
#error bytes
#endif
#if OFF_LIST % 8 || OFF_NOTE % 8 || OFF_RED % 16 || OFF_BARRIER % 8 || OFF_RED_NOTE % 8
#error places
#endif
#if STAGE_BYTES >= (1 << 20)
#error more bytes than an mbarrier counts
#endif
"""


@pytest.fixture(scope="module")
def check(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cxx()
    path = tmp_path_factory.mktemp("roles") / "check.cpp"
    path.write_text(CHECK, encoding="utf-8")
    return path


@settings(max_examples=40, deadline=None)
@given(shapes(), forms.filter(lambda form: form.is_coded), st.sampled_from(list(LIMITS.values())), st.integers(1, 16))
def test_the_source_needs_what_the_plan_says(
    check: Path, shape: ExpertShape, form: WeightForm, limit: int, tokens: int
) -> None:
    layout = SlotLayout(shape, form)
    if not roles_plan.fits(layout, limit):
        with pytest.raises(ShapeError, match="shared memory"):
            roles_plan.plan(layout, tokens, limit)
        return
    chosen, one = roles_plan.plan(layout, tokens, limit), roles_plan.plan(layout, 1, limit)
    assert chosen.smem_bytes <= limit and chosen.threads <= 1024 and 1 <= chosen.max_tokens <= tokens
    macros = [f"-D{name}={value}" for name, value in chosen.source.defines]
    command = [cxx(), *macros, "-E", "-P", "-nostdinc", f"-I{kernel_folder()}", "-o", "/dev/null", str(check)]
    assert subprocess.run(command, capture_output=True, text=True).stderr == ""
    values, single = dict(chosen.source.defines), dict(one.source.defines)
    assert values["TEAM"] == single["TEAM"]  # with the layer's sizes, all that the order of sums depends on


def test_takes_no_bf16() -> None:
    layout = SlotLayout(ExpertShape(4, 2, 64, 64), WeightForm("bf16"))
    assert not roles_plan.fits(layout, 232448)
    with pytest.raises(ShapeError, match="int4 or int8"):
        roles_plan.plan(layout, 8, 232448)


def test_a_first_claim_is_a_fair_share_of_few_tiles() -> None:
    chosen = roles_plan.plan(SlotLayout(ExpertShape(60, 4, 2048, 1408), WeightForm("int4")), 8, 232448)
    assert chosen.first_claim(1, 132) == 6  # 704 tiles
    assert chosen.first_claim(6, 132) == 8
