"""What a user may call a model: a folder, a cached repository, an id; and what is said where there is no network."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants

from runtime.artifacts.checkpoint import Checkpoint
from runtime.artifacts.hub import find_model
from runtime.errors import InputError, StorageError
from tests.runtime.fake_hub import COMMIT, serve
from tests.tiny import save_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With files beside it that nobody needs."""
    folder = save_tiny("mixtral", tmp_path_factory.mktemp("hub") / "model")
    (folder / "pytorch_model.bin").write_bytes(b"the same weights again")
    (folder / "README.md").write_text("# A model")
    return folder


def save_cached(model: Path, cache: Path, name: str = "models--some--moe") -> Path:
    """The Hub's cache layout: blobs by digest, snapshots of links to them."""
    repository = cache / name
    snapshot = repository / "snapshots" / COMMIT
    for folder in (repository / "blobs", repository / "refs", snapshot):
        folder.mkdir(parents=True)
    for number, path in enumerate(sorted(model.iterdir())):
        shutil.copyfile(path, repository / "blobs" / f"{number:064x}")
        (snapshot / path.name).symlink_to(os.path.join("..", "..", "blobs", f"{number:064x}"))
    (repository / "refs" / "main").write_text(COMMIT)
    return snapshot


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "cache"


def test_a_cached_model_is_found_by_id_by_repository_and_by_snapshot(model: Path, cache: Path) -> None:
    snapshot = save_cached(model, cache)
    digest = Checkpoint.open(model).digest
    for name in ("some/moe", snapshot, snapshot.parents[1], str(snapshot) + "/"):
        checkpoint = Checkpoint.open(name)
        assert checkpoint.folder == snapshot and checkpoint.digest == digest
        first = next(iter(checkpoint.tensors))
        assert checkpoint.read_bytes(first) == Checkpoint.open(model).read_bytes(first)


def test_a_repository_without_main_must_have_one_revision(model: Path, cache: Path) -> None:
    snapshot = save_cached(model, cache)
    repository = snapshot.parents[1]
    (repository / "refs" / "main").unlink()
    assert find_model(repository) == snapshot
    (snapshot.parent / "other").mkdir()
    with pytest.raises(InputError, match=f"found 2 of them .*{COMMIT}"):
        find_model(repository)
    (repository / "refs" / "main").write_text(f"{COMMIT}\n")
    assert find_model(repository) == snapshot


def test_a_link_to_nothing_is_named(model: Path, cache: Path) -> None:
    snapshot = save_cached(model, cache)
    (snapshot / "model.safetensors").resolve().unlink()
    with pytest.raises(InputError, match=r"model\.safetensors"):
        Checkpoint.open("some/moe")


@pytest.mark.parametrize("name", ["some/moe", "no such/model", "a--b/..c"])
def test_without_a_network_it_says_what_to_download(name: str, cache: Path) -> None:
    with pytest.raises(InputError, match="neither, and the Hub is out of reach") as caught:
        find_model(name)
    assert f"hf download {name}" in caught.value.mend and not cache.exists()


def test_a_hub_that_does_not_answer_is_out_of_reach(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(InputError, match="out of reach") as caught:
        find_model("some/moe")
    assert "hf download some/moe" in caught.value.mend


def test_an_id_is_downloaded_and_only_what_is_needed(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with serve({"some/moe": model}) as (endpoint, asked):
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        )
        checkpoint = Checkpoint.open("some/moe")
        assert checkpoint.digest == Checkpoint.open(model).digest
        assert checkpoint.folder.is_relative_to(cache)
        names = {path.name for path in checkpoint.folder.iterdir()}
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
        assert not names & {"pytorch_model.bin", "README.md"}

        usage = shutil.disk_usage(cache)._replace(free=1000)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
        assert Checkpoint.open("some/moe").digest == checkpoint.digest, "it is there already and needs no room"
        shutil.rmtree(cache)
        asked.clear()
        with pytest.raises(StorageError, match=r"[kM]B free"):
            Checkpoint.open("some/moe")
        assert not any("GET" in line and line.endswith("model.safetensors") for line in asked)
        with pytest.raises(InputError) as caught:
            Checkpoint.open("other/moe")
        assert "check the name" in caught.value.mend
