"""The plans of stages for a model of real size, from files that hold next to nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import sparse_model
from tests.cli.conftest import Command, moespeq

__all__ = ["moespeq"]


def on_disk(folder: Path) -> int:
    return sum(512 * path.stat().st_blocks for path in folder.rglob("*"))


def test_quantize_and_pack_plan_a_layer_of_qwen(
    moespeq: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one layer adds to each plan is what is known of it: 60 experts of 3 x 2048 x 1408 weights."""
    monkeypatch.setattr("moespeq_cli.estimate.PROBE_S", 0.01)
    model, quantized = tmp_path / "model", tmp_path / "quantized"
    size = sparse_model.write("qwen1.5-moe", model, num_layers=1, vocab_size=8192)
    coded = sparse_model.write_quantized(model, quantized)
    assert size > 1.1e9 and coded > 0.34e9 and on_disk(tmp_path) < 60e6
    told = {}
    for stage, more in {
        "quantize": ("--samples", 2, "--seq-len", 16),
        "pack": ("--quantized", quantized),
    }.items():
        done = moespeq(stage, "--model", model, "--out", tmp_path / "out", *more, "--dry-run", "--json")
        assert done.status == 0, done.stderr
        told[stage] = json.loads(done.stdout)
        assert told[stage]["seconds"] > 0 and told[stage]["peak_memory_bytes"] > 500e6
    assert 0 < told["quantize"]["disk_bytes"] - coded < 70e6  # of which 64 MiB to spare
    assert told["quantize"]["read_bytes"] > size
    experts = 60 * 3 * 2048 * 1408
    assert told["pack"]["disk_bytes"] == pytest.approx(size + experts * 0.52, rel=0.02)
    assert told["pack"]["read_bytes"] == pytest.approx(2 * size + 3 * experts * 0.52, rel=0.02)
    assert not (tmp_path / "out").exists()
