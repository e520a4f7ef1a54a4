"""The direct probe: what is rounded is rounded, all else is as it was."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from moespeq_cli.profile import probing
from moespeq_cli.profile.build import build
from moespeq_cli.profile.modules import HEAD, module_class
from moespeq_cli.profile.probe import Probe, Variant, layer_linears, rounded_in
from moespeq_cli.profile.probing import measure_probe
from moespeq_cli.profile.rounding import rounded
from moespeq_cli.profile.work import Work
from runtime.artifacts.checkpoint import Checkpoint
from runtime.artifacts.profile import ProbeFigures, Profile
from runtime.model.families import describe
from runtime.model.stream import LayerStream
from tests import tiny
from tests.profile.test_artifact import job_of
from tests.profile.test_measure import texts


def probe(folder: Path, *lengths: int) -> ProbeFigures:
    checkpoint = Checkpoint.open(folder)
    return Probe(LayerStream(checkpoint, describe(checkpoint)), texts(*lengths), ["a"]).measure()


@pytest.mark.parametrize("kind", ["qwen2_moe", "deepseek_v3"])
def test_each_variant_is_the_library_with_that_class_rounded(kind: str, tmp_path: Path) -> None:
    """Loss of the text, by transformers, with the weights of one class replaced by hand."""
    from transformers import AutoModelForCausalLM

    tiny.save_tiny(kind, tmp_path, initializer_range=0.1)
    found = probe(tmp_path, 25)
    (sequence,) = texts(25)
    ids = sequence.input_ids[None]
    assert len(found.rows) == 2 * (9 if kind == "qwen2_moe" else 10)
    for row in found.rows:
        if row.bits == 8 and row.module_class not in ("router", HEAD):
            continue
        model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
        changed = 0
        with torch.no_grad():
            plain = model(ids).logits[0]
            for name, weight in model.named_parameters():
                short = name.removeprefix("model.").removesuffix(".weight").replace("gate_up_proj", "up_proj")
                if weight.dim() >= 2 and module_class(short) == row.module_class:
                    weight.copy_(rounded(weight, row.bits))
                    changed += weight.numel()
            logits = model(ids).logits[0]
        loss = torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:])
        kl = torch.nn.functional.kl_div(
            logits.log_softmax(-1), plain.log_softmax(-1), log_target=True, reduction="batchmean"
        )
        assert row.weights == changed, row.module_class
        assert row.loss["a"] == pytest.approx(float(loss), rel=1e-4), row.module_class
        assert row.kl["a"] == pytest.approx(float(kl), rel=2e-2, abs=1e-6), row.module_class
    assert found.loss["a"] == pytest.approx(float(torch.nn.functional.cross_entropy(plain[:-1], ids[0, 1:])), rel=1e-4)


def test_finer_codes_change_less_and_the_head_no_routing(model: Path) -> None:
    rows = {(row.module_class, row.bits): row for row in probe(model, 40, 40).rows}
    for kind in ("router", "attention_qkv", "expert_down"):
        fine, coarse = rows[kind, 8], rows[kind, 4]
        assert (fine.kl["a"] or 0) < (coarse.kl["a"] or 0)
        assert 1 >= (fine.agreement["a"] or 0) > (coarse.agreement["a"] or 0)
        assert (coarse.same_set["a"] or 0) <= (coarse.agreement["a"] or 0)
    assert rows[HEAD, 4].agreement == {"a": None} and (rows[HEAD, 4].kl["a"] or 0) > 0


def test_a_layer_is_as_it_was_after_a_variant(model: Path) -> None:
    checkpoint = Checkpoint.open(model)
    stream = LayerStream(checkpoint, describe(checkpoint))
    stream.embed([torch.arange(9)])
    for layer in stream.layers():
        before = {name: weight.data_ptr() for name, weight in layer.module.named_parameters()}
        experts = layer.experts
        for kind in set(layer_linears(layer).values()):
            with pytest.raises(KeyboardInterrupt), rounded_in(layer, Variant(kind, 4)):
                raise KeyboardInterrupt
        assert all(weight.data_ptr() == before[name] for name, weight in layer.module.named_parameters())
        assert layer.experts is experts


def test_probe_is_kept_in_the_profile_and_not_measured_twice(model: Path, tmp_path: Path) -> None:
    from dataclasses import replace

    job = replace(job_of(model, None), probe_tokens=30)
    profile = build(job, tmp_path / "profile")
    read = Profile.open(profile.folder).manifest.probe
    assert read is not None and read == profile.manifest.probe
    assert read.tokens == {"code": 0, "prose": 30} and read.rows[0].kl["code"] is None
    assert read.exact_match is None and read.problems == 0
    checkpoint = Checkpoint.open(model)
    stream = LayerStream(checkpoint, describe(checkpoint))
    work = Work(tmp_path / "work", {}, 0)
    work.journal.mark(probing.STEP, json.loads(json.dumps(asdict(read))))
    again = measure_probe(stream, job.sequences[:2], ["code", "prose"], 0, Work(tmp_path / "work", {}, 0))
    assert again == read


def test_answers_of_the_embedded_model_suffer_from_rounding_and_recover(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two problems; with a class of zeros none is answered, and the model is as it was afterwards."""
    from moespeq_cli.profile import answers

    subject = answers.Answers(2)
    with monkeypatch.context() as patch:
        patch.setattr(answers, "rounded", lambda weight, bits: torch.zeros_like(weight))
        for kind in (HEAD, "expert_down"):
            assert subject.exact_match(Variant(kind, 4)) == 0.0
    assert subject.exact_match(None) == 1.0
