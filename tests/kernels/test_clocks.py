"""The clocks of `tests/kernels/clocks.py` have their places, and kernels with them compile."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from runtime.kernels import compile as compiling
from runtime.kernels import residual_plan
from runtime.kernels.catalog import H200
from runtime.kernels.compile import Source, compile_cubin, kernel_folder
from runtime.kernels.fused import plan
from runtime.kernels.fused_config import FusedConfig
from runtime.kernels.layout import SlotLayout
from runtime.kernels.shape import ExpertShape, WeightForm
from tests.kernels.clocks import AHEAD, BLOCKS, CLOCKS, NUMBERS, table, with_clocks

SHAPE = ExpertShape(60, 4, 2048, 1408)


def source_of(kernel: str) -> Source:
    form = WeightForm("int4", 128) if kernel in ("moe_codes.cu", "moe_residual.cu") else WeightForm("bf16")
    layout = SlotLayout(SHAPE, form)
    if kernel == "moe_residual.cu":
        return residual_plan.plan(layout, 8, FusedConfig(), H200.smem_per_block_bytes).source
    return plan(layout, 8, FusedConfig(block_dim=512 * (kernel == "moe_small.cu")), H200).source


@pytest.mark.parametrize("kernel", CLOCKS)
def test_a_kernel_with_clocks_compiles(
    kernel: str, nvrtc: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_clocks(kernel_folder(), tmp_path)
    source = source_of(kernel)
    assert source.name == kernel
    plain = compile_cubin(source, "sm_90")
    monkeypatch.setattr(compiling, "kernel_folder", lambda: tmp_path)
    clocked = compile_cubin(source, "sm_90")
    (with_them,) = clocked.resources.values()
    assert with_them.spill_bytes == 0
    assert len(clocked.data) > len(plain.data)
    assert b"stamps" in clocked.data


def test_a_place_that_is_gone_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    shutil.copytree(kernel_folder(), folder)
    kernel = folder / "moe_small.cu"
    kernel.write_text(kernel.read_text(encoding="utf-8").replace("  rows_until(TILES2);\n", ""), encoding="utf-8")
    with pytest.raises(ValueError, match=r"moe_small\.cu has 0 times '  rows_until"):
        with_clocks(folder, tmp_path / "clocked")


def test_times_count_from_the_end_of_the_call_ahead() -> None:
    stamps = np.zeros((BLOCKS, NUMBERS), np.uint32)
    stamps[:3, AHEAD] = (2**32 - 60, 2**32 - 100, 0)  # the third block has no rows, and no end
    stamps[:3, 0] = (2**32 - 70, 2**32 - 50, 1)
    stamps[:3, 1] = (10, 20, 0)
    rows = table("moe_codes.cu", stamps, 3)
    assert rows[0] == ("begins", 10, -10, 61)
    assert rows[1] == ("kernel ahead over", 75, 70, 80)
