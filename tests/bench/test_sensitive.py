"""Mixtures of forms are what whole artifacts in those forms give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moespeq_cli.bench.sensitive import FORMS, PLAIN, Mixture, MixtureRun, curve, expert_bytes, mixtures, table
from moespeq_cli.profile import pictures
from moespeq_cli.profile.measure import measure
from runtime.artifacts.checkpoint import Checkpoint
from runtime.artifacts.quantized import Quantized
from runtime.errors import InputError
from runtime.model.families import describe
from runtime.model.stream import LayerStream
from tests.pack.fixtures import save_quantized
from tests.profile.test_measure import texts
from tests.tiny import save_tiny


def test_mixtures_equal_whole_artifacts(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model = save_tiny("qwen2_moe", tmp_path / "model", num_hidden_layers=3)
    plain = Quantized.open(save_quantized(model, tmp_path / "plain"))
    wide = Quantized.open(save_quantized(model, tmp_path / "wide", wide_layers=(0, 1, 2)))
    mixed = Quantized.open(save_quantized(model, tmp_path / "mixed", wide_layers=(1,)))
    checkpoint = Checkpoint.open(model)
    spec = describe(checkpoint)
    sequences = [*texts(30, 9, domain="a"), *texts(21, domain="b", seed=1)]
    drafts = [Mixture(PLAIN, ()), Mixture("8 bits", (0, 1, 2)), Mixture("8 bits", (1,))]
    forms = dict.fromkeys(FORMS, plain) | {"8 bits": wide}
    steps: list[int] = []
    rows = MixtureRun(LayerStream(checkpoint, spec), sequences, forms).measure(drafts, lambda: steps.append(1))
    assert len(steps) == 3
    for row, whole in zip(rows, (plain, wide, mixed), strict=True):
        measured = measure(LayerStream(checkpoint, spec), sequences, whole)
        assert measured.draft is not None
        assert row["greedy_agreement"] == measured.draft.greedy
        assert row["sampled_acceptance"] == pytest.approx(measured.draft.overlap, rel=1e-6)
        shares = measured.tensors["agreement"].mean(1).tolist()
        assert list(row["routing_agreement"].values()) == pytest.approx(shares)
        assert row["expert_bytes"] == sum(expert_bytes(whole, layer) for layer in (0, 1, 2))
    assert rows[0]["expert_bytes"] < rows[2]["expert_bytes"] < rows[1]["expert_bytes"]
    text = table({"rows": rows, "domains": ["a", "b"]})
    assert text.count("\n") == 4 and "| none | plain |" in text and "| 1 | 8 bits |" in text


def test_shares_grow_by_rank_and_every_layer_is_tried_alone() -> None:
    found = mixtures([2, 0, 1])
    grown = [draft.layers for draft in found if draft.form == "8 bits"]
    assert grown == [(2,), (2, 0), (2, 0, 1), (0,), (1,)]
    assert [draft.layers for draft in found if draft.form == "4 bits"] == [(2,), (2, 0), (2, 0, 1)]
    assert found[0] == Mixture(PLAIN, ())


def test_curves_have_the_figures_of_growing_shares() -> None:
    """Rows of single layers that are no beginning of the ranking are not on them."""
    rows: list[dict[str, Any]] = [
        {
            "form": draft.form,
            "layers": list(draft.layers),
            "expert_bytes": 10**6 * (1 + len(draft.layers)),
            "sampled_acceptance": {"a": 0.5 + 0.1 * len(draft.layers), "b": 0.9 if draft.form == "8 bits" else 0.8},
        }
        for draft in mixtures([2, 0, 1])
    ]
    chart = curve({"ranking": [[2, 9.0], [0, 2.0], [1, 1.0]], "domains": ["a", "b"], "rows": rows}, "curve")
    assert chart.x_ticks == ("0\n1.00 MB", "1\n2.00 MB", "2\n3.00 MB", "3\n4.00 MB")
    assert chart.series["a, 8 bits"] == pytest.approx([0.5, 0.6, 0.7, 0.8]) == chart.series["a, 4 bits"]
    assert chart.series["b, 8 bits"] == [0.8, 0.9, 0.9, 0.9] and chart.series["b, 4 bits"] == [0.8] * 4
    assert "a, 8 bits 50.0 % to 80.0 %" in chart.alt


def test_a_picture_that_cannot_be_drawn_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in (tmp_path, tmp_path / "curve.svg"):
        with pytest.raises(InputError, match="PNG"):
            pictures.require_file(path)
    pictures.require_file(tmp_path / "new" / "curve.png")
    monkeypatch.setattr(pictures, "available", lambda: False)
    with pytest.raises(InputError, match="matplotlib"):
        pictures.require_file(tmp_path / "curve.png")
