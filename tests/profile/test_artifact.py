"""The finished folder: read back as promised, refused when it is not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

from moespeq_cli.profile.build import ProfileJob, build
from runtime.artifacts.checkpoint import Checkpoint
from runtime.artifacts.manifest import FileEntry
from runtime.artifacts.profile import ROUTING, Profile
from runtime.artifacts.quantized import Quantized
from runtime.errors import ArtifactError
from runtime.model.families import describe
from tests.profile.test_measure import texts

SEQUENCES = [*texts(9, 21, domain="prose"), *texts(30, domain="code", seed=1)]


def job_of(model: Path, quantized: Path | None, trace_tokens: int = 50, sensitivity_tokens: int = 0) -> ProfileJob:
    checkpoint = Checkpoint.open(model)
    draft = Quantized.open(quantized) if quantized is not None else None
    spec = describe(checkpoint)
    return ProfileJob(checkpoint, spec, SEQUENCES, "known", draft, "float32", trace_tokens, sensitivity_tokens)


@pytest.fixture(autouse=True)
def _no_png_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing them takes longer than all the rest; test_report looks at them."""
    monkeypatch.setattr("moespeq_cli.profile.pictures.available", lambda: False)


@pytest.fixture(scope="module")
def made(model: Path, quantized: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(job_of(model, quantized), tmp_path_factory.mktemp("made") / "profile").folder


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "profile"))


def test_reads_back_what_was_written(made: Path, model: Path) -> None:
    profile = Profile.open(made, verify=True)
    manifest = profile.manifest
    assert manifest.domain_names == ("code", "prose")
    assert manifest.domains == {"prose": 30, "code": 30} and manifest.sequences == {"prose": 2, "code": 1}
    assert manifest.model_digest == Checkpoint.open(model).digest
    assert set(profile.tensors) == set(manifest.tensor_forms())
    assert profile.tensors["counts"].sum((1, 2)).tolist() == [30 * 3 * 2, 30 * 3 * 2]
    assert profile.layer_row(2) == 2
    heat = profile.heat()
    assert len(heat) == 24 and sum(heat.values()) == pytest.approx(3 * 2)
    assert manifest.draft is not None
    for place, name in enumerate(manifest.domain_names):
        assert manifest.draft.agreement_by_layer[name] == tuple(profile.tensors["agreement"][place].tolist())
        assert manifest.draft.agreement_by_layer[name][0] == 1.0


def test_trace_replays_by_sequence_domain_and_layer(made: Path) -> None:
    profile = Profile.open(made)
    traces = list(profile.traces())
    assert [(t.domain, len(t.target)) for t in traces] == [("prose", 9), ("prose", 21), ("code", 20)]
    assert all(t.draft is not None and t.draft.shape == t.target.shape for t in traces)
    rows = profile.replay_rows()
    assert len(rows) == 50 and [key[0] for demand in rows[0] for key in demand] == [0, 0, 1, 1, 2, 2]
    assert rows[9:30] == profile.replay_rows("prose")[9:]
    assert rows[30][2] == [(2, expert) for expert in traces[2].target[0, 2].tolist()]


def test_the_same_job_gives_the_same_bytes(made: Path, model: Path, quantized: Path, tmp_path: Path) -> None:
    again = build(job_of(model, quantized), tmp_path / "again").folder
    assert {p.name: p.read_bytes() for p in again.iterdir()} == {
        p.name: p.read_bytes() for p in made.iterdir() if p.suffix != ".png"
    }


def test_a_folder_without_its_manifest_is_refused(copy: Path) -> None:
    """H11: data that is all there, but not finished."""
    (copy / "manifest.json").unlink()
    with pytest.raises(ArtifactError, match="without a finished manifest") as caught:
        Profile.open(copy)
    assert "moespeq profile" in caught.value.mend


def test_a_short_file_is_refused(copy: Path) -> None:
    data = (copy / ROUTING).read_bytes()
    (copy / ROUTING).write_bytes(data[:-100])
    with pytest.raises(ArtifactError, match=rf"{len(data)} bytes.*{len(data) - 100} bytes"):
        Profile.open(copy)


def test_a_flipped_byte_is_refused_when_verified(copy: Path) -> None:
    data = bytearray((copy / ROUTING).read_bytes())
    data[-1] ^= 1
    (copy / ROUTING).write_bytes(data)
    with pytest.raises(ArtifactError, match="sha256"):
        Profile.open(copy, verify=True)


def test_tensors_that_are_not_as_promised_are_refused(copy: Path) -> None:
    tensors = safetensors.torch.load((copy / ROUTING).read_bytes())
    damage = {
        "counts": tensors["counts"][:, :, :7].contiguous(),
        "coactivation": tensors["coactivation"].float(),
        "trace_starts": torch.tensor([0, 40, 30]),
    }
    for name, tensor in damage.items():
        rewrite(copy, {**tensors, name: tensor})
        with pytest.raises(ArtifactError, match=name):
            Profile.open(copy)
    rewrite(copy, {name: tensor for name, tensor in tensors.items() if name != "reuse_mean"})
    with pytest.raises(ArtifactError, match=r"reuse_mean .*; found none"):
        Profile.open(copy)


def test_another_version_is_refused(copy: Path) -> None:
    body = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps(body | {"format_version": 1}))
    with pytest.raises(ArtifactError, match=r"format_version 2 .*; found 1") as caught:
        Profile.open(copy)
    assert "moespeq profile --force" in caught.value.mend


def test_an_interruption_leaves_the_old_profile(
    copy: Path, model: Path, quantized: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while measuring: what was there is whole; Ctrl-C while writing: nothing passes for finished."""
    before = (copy / "manifest.json").read_bytes()

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("moespeq_cli.profile.build.measure", stop)
        with pytest.raises(KeyboardInterrupt):
            build(job_of(model, None), copy)
    assert (copy / "manifest.json").read_bytes() == before
    Profile.open(copy, verify=True)
    with monkeypatch.context() as patch:
        patch.setattr("moespeq_cli.profile.build.save_manifest", stop)
        with pytest.raises(KeyboardInterrupt):
            build(job_of(model, None), copy)
    with pytest.raises(ArtifactError, match="without a finished manifest"):
        Profile.open(copy)
    assert Profile.open(build(job_of(model, None), copy).folder).manifest.draft is None


def rewrite(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Other tensors, with a manifest that vouches for the file."""
    (folder / ROUTING).write_bytes(safetensors.torch.save(tensors))
    body = json.loads((folder / "manifest.json").read_text())
    entry = FileEntry.of(folder / ROUTING)
    body["files"][ROUTING] = {"size_bytes": entry.size_bytes, "sha256": entry.sha256}
    (folder / "manifest.json").write_text(json.dumps(body))
