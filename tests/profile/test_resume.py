"""A profile that is stopped goes on where it was, and ends in the same bytes; with other settings it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moespeq_cli.profile import build as stage
from moespeq_cli.profile.build import ProfileJob, build
from moespeq_cli.profile.work import Work
from runtime.artifacts.profile import SENSITIVITY, Profile
from runtime.errors import ArtifactError, StorageError
from tests.profile.test_artifact import job_of


class Stop(BaseException):
    """Stands for a kill."""


@pytest.fixture(autouse=True)
def _no_png_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moespeq_cli.profile.pictures.available", lambda: False)


@pytest.fixture(scope="module")
def job(model: Path, quantized: Path) -> ProfileJob:
    return job_of(model, quantized, sensitivity_tokens=40)


@pytest.fixture(scope="module")
def whole(job: ProfileJob, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The bytes of an uninterrupted run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moespeq_cli.profile.pictures.available", lambda: False)
        return contents(build(job, tmp_path_factory.mktemp("whole") / "profile").folder)


def contents(folder: Path) -> dict[str, bytes]:
    assert not (folder / "work").exists()
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


def stop_at(monkeypatch: pytest.MonkeyPatch, name: str, number: int, when: str) -> None:
    """Let the nth call of a method of Work be the last, before it is made or after it."""
    real, calls = getattr(Work, name), [0]

    def step(*arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == number and when == "before":
            raise Stop
        result = real(*arguments, **options)
        if calls[0] == number:
            raise Stop
        return result

    monkeypatch.setattr(Work, name, step)


@pytest.mark.parametrize("number", [1, 2, 4, 6, 7, 8, 9, 12, 15])
def test_stopped_at_any_step_it_ends_in_the_same_bytes(
    number: int, job: ProfileJob, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H11: the 15 files of unfinished work are 4 inputs, 3 of layers forward, 4 gradients and 4 of scores."""
    with monkeypatch.context() as patch, pytest.raises(Stop):
        stop_at(patch, "save", number, "after" if number % 2 else "before")
        build(job, tmp_path / "profile")
    with pytest.raises(ArtifactError, match="without a finished manifest"):
        Profile.open(tmp_path / "profile")
    counted: list[int] = []
    with monkeypatch.context() as patch:
        real = stage.LayerStream.layers

        def layers(self: Any, order: Any = None) -> Any:
            for layer in real(self, order):
                counted.append(layer.layer_id)
                yield layer

        patch.setattr(stage.LayerStream, "layers", layers)
        assert contents(build(job, tmp_path / "profile").folder) == whole
    assert len(counted) < 6 or number <= 2, "nothing was gone on with"


def test_stopped_while_it_writes_or_clears_up(
    job: ProfileJob, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise Stop

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(stage, "save_manifest", stop)
        build(job, tmp_path / "profile")
    with pytest.raises(ArtifactError):
        Profile.open(tmp_path / "profile")
    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(Work, "remove", stop)
        build(job, tmp_path / "profile")
    assert Profile.open(tmp_path / "profile", verify=True).manifest.sensitivity is not None
    assert contents(build(job, tmp_path / "profile").folder) == whole


def test_work_begun_with_other_settings_is_refused_until_forced(
    job: ProfileJob, model: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(Stop):
        stop_at(patch, "save", 3, "after")
        build(job_of(model, None), tmp_path / "profile")
    with pytest.raises(ArtifactError, match="quantized") as caught:
        build(job, tmp_path / "profile")
    assert "--force" in caught.value.mend
    assert contents(build(job, tmp_path / "profile", force=True).folder) == whole


def test_a_stopped_replacement_goes_on_without_force(
    job: ProfileJob, model: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old profile is whole until then, and still in the way of a job that was not begun."""
    old = job_of(model, None)
    folder = build(old, tmp_path / "profile").folder
    with pytest.raises(ArtifactError, match="another draft, or without"):
        stage.find_identical(folder, job, force=False)
    with monkeypatch.context() as patch, pytest.raises(Stop):
        stop_at(patch, "save", 7, "after")
        build(job, folder, force=True)
    assert Profile.open(folder, verify=True).manifest.draft is None
    assert stage.find_identical(folder, job, force=False) is None
    with pytest.raises(ArtifactError, match="trace_tokens"):
        stage.find_identical(folder, job_of(model, None, trace_tokens=9), force=False)
    assert contents(build(job, folder).folder) == whole
    assert stage.find_identical(folder, job, force=False) is not None


def test_lost_work_is_named(job: ProfileJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(Stop):
        stop_at(patch, "save", 4, "after")
        build(job, tmp_path / "profile")
    lost = max((tmp_path / "profile" / "work").glob("forward-*.safetensors"))
    lost.unlink()
    with pytest.raises(ArtifactError, match=lost.name):
        build(job, tmp_path / "profile")


def test_a_full_disk_is_told_and_gone_on_from(
    job: ProfileJob, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    from moespeq_cli.quantize import folder

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(folder, "save_file", full)
        with pytest.raises(StorageError, match="full disk"):
            build(job, tmp_path / "profile")
    assert contents(build(job, tmp_path / "profile").folder) == whole


def test_sensitivity_reads_back_and_damage_is_refused(job: ProfileJob, tmp_path: Path) -> None:
    import json

    import safetensors.torch

    from runtime.artifacts.manifest import FileEntry

    profile = build(job, tmp_path / "profile")
    found = profile.sensitivity()
    assert found.figures.tokens == {"code": 0, "prose": 28} and found.figures.loss["code"] is None
    assert found.figures.sequences == 2 and found.domains.shape == (len(found.figures.linears), 2)
    assert found.channels["layers.1.mlp.experts.down_proj"].shape == (8, 64)
    assert found.experts_of(1) == pytest.approx(found.experts_of(1, 1), rel=1e-5) and found.experts_of(1, 0) == 0
    tensors = safetensors.torch.load((profile.folder / SENSITIVITY).read_bytes())
    name = "layers.0.mlp.experts.up_proj"
    for damaged in (
        tensors[name][:7].contiguous(),
        tensors[name].double(),
        -tensors[name],
        tensors[name] * float("nan"),
    ):
        (profile.folder / SENSITIVITY).write_bytes(safetensors.torch.save({**tensors, name: damaged}))
        body = json.loads((profile.folder / "manifest.json").read_text())
        entry = FileEntry.of(profile.folder / SENSITIVITY)
        body["files"][SENSITIVITY] = {"size_bytes": entry.size_bytes, "sha256": entry.sha256}
        (profile.folder / "manifest.json").write_text(json.dumps(body))
        with pytest.raises(ArtifactError, match=name.replace(".", r"\.")):
            Profile.open(profile.folder).sensitivity()
