"""The layers and the solver on a GPU give what they give on the CPU, but for roundings."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moespeq_cli.quantize.gptq import SolverSettings, solve
from runtime.artifacts.quantized import QuantizedLinear
from tests.quantize.conftest import Quantize
from tests.quantize.test_gptq import output_error, problem
from tests.tiny import save_tiny

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


def test_same_codes_but_for_roundings() -> None:
    weights, _, hessians = problem(4, 64, 256)
    settings = SolverSettings()
    here = solve(weights, hessians, [600] * 4, settings)
    there = solve(weights.cuda(), hessians.cuda(), [600] * 4, settings)
    assert torch.equal(here.scales, there.scales.cpu())
    assert (here.codes != there.codes.cpu()).float().mean() < 0.02
    there.codes, there.scales, there.zeros = there.codes.cpu(), there.scales.cpu(), there.zeros.cpu()
    expected = output_error(weights, here, hessians, settings)
    assert output_error(weights, there, hessians, settings) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("kind", ["qwen2_moe", "gpt_oss", "deepseek_v3"])
def test_a_whole_model(kind: str, run: Quantize, tmp_path: Path) -> None:
    model = save_tiny(kind, tmp_path / "model", dtype=torch.bfloat16)
    here, there = run(model, device="cpu"), run(model, device="cuda")
    assert there.manifest.settings["--device"] == "cuda"
    assert there.manifest.mean_output_error == pytest.approx(here.manifest.mean_output_error, rel=0.02)
    linear = there.linear(1, 2, "down_proj")
    assert isinstance(linear, QuantizedLinear) and bool(torch.isfinite(linear.scales).all())
