"""Decoding speed: what the figures are of."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moespeq_cli.bench import records
from runtime.artifacts.residual_decoder import compiled_decoder
from runtime.errors import InputError
from tests.pack.fixtures import make_pack, save_quantized
from tests.tiny import save_tiny


def test_rates_are_of_all_residual_records_and_raw_packs_are_refused(tmp_path: Path) -> None:
    model = save_tiny(
        "qwen2_moe", tmp_path / "model", dtype=torch.bfloat16, hidden_size=128, moe_intermediate_size=128,
        num_hidden_layers=1,
    )  # fmt: skip
    quantized = save_quantized(model, tmp_path / "quantized")
    calls: list[None] = []
    pack = make_pack(model, quantized, tmp_path / "residual", encoding="residual")
    before = torch.get_num_threads()
    try:
        result = records.measure(pack, 1, 2, lambda: calls.append(None))
    finally:
        torch.set_num_threads(before)
    names = ["compiled", "NumPy"] if compiled_decoder() is not None else ["NumPy"]
    assert [row["decoder"] for row in result["rows"]] == names and len(calls) == len(names)
    assert (result["records"], result["weights_per_expert"]) == (pack.spec.num_records, 3 * 128 * 128)
    for row in result["rows"]:
        bytes_per_weight = row["record_bytes_per_s"] / row["weights_per_s"]
        assert bytes_per_weight == pytest.approx(row["record_bytes_per_cpu_s"] / row["weights_per_cpu_s"])
        assert 1 < bytes_per_weight < 1.5
        assert row["us_per_expert"] * row["weights_per_s"] == pytest.approx(1e6 * 3 * 128 * 128)
    assert records.table(result).count("\n") == 1 + len(names)
    raw = make_pack(model, quantized, tmp_path / "raw")
    with pytest.raises(InputError, match="found 8 raw ones"):
        records.measure(raw, 1, 1, lambda: None)
