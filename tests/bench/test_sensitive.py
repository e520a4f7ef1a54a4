"""Mixtures of forms are what whole artifacts in those forms give."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moespeq_cli.bench.sensitive import FORMS, PLAIN, Mixture, MixtureRun, expert_bytes, mixtures, table
from moespeq_cli.profile.measure import measure
from runtime.artifacts.checkpoint import Checkpoint
from runtime.artifacts.quantized import Quantized
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
