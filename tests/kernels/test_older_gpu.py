"""`--gpu-capability` gives code for the older GPU, which no newer instruction is in."""

from __future__ import annotations

import pytest

from runtime.kernels import compile as compiling
from runtime.kernels.catalog import A100, CONSUMER
from runtime.kernels.compile import Source
from runtime.kernels.fused import plan
from runtime.kernels.fused_config import FusedConfig
from runtime.kernels.gate import SOURCE as GATE
from runtime.kernels.layout import SlotLayout
from runtime.kernels.shape import ExpertShape, WeightForm
from tests.older_gpu import SMEM_PER_BLOCK_BYTES, as_older_gpu, capability_of

LAYOUT = SlotLayout(ExpertShape(60, 4, 2048, 1408), WeightForm("int4", 128))
SOURCES = (
    plan(LAYOUT, 8, FusedConfig(), A100).source,
    GATE,
    Source("rows_next.cu"),
    Source("rows_linear.cu", (("WARPS", 8),)),
)


def test_shared_memory_is_what_plans_are_compiled_with() -> None:
    for gpu in (A100, CONSUMER):
        assert SMEM_PER_BLOCK_BYTES[gpu.capability] == gpu.smem_per_block_bytes


@pytest.mark.parametrize("source", SOURCES, ids=lambda one: one.name)
def test_code_is_that_of_the_older_gpu(nvrtc: None, source: Source) -> None:
    with as_older_gpu((8, 0)):
        cubin, path = compiling._compiled(source, compiling._arch(source, (8, 0)))
    text = path.read_text("ascii").strip("\0")
    assert ".target sm_80" in text
    assert all(f".entry {name}(" in text for name in cubin.resources)
    assert "griddepcontrol" not in text
    assert "cp.async.bulk" not in text


def test_a_capability_is_one_that_is_known() -> None:
    assert capability_of("8.6") == (8, 6)
    for text in ("7.5", "8", "8.0.1", "ampere"):
        with pytest.raises(pytest.UsageError, match=rf"--gpu-capability: expected one of 8\.0, .*, found {text}"):
            capability_of(text)
