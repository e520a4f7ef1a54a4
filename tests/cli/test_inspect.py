"""`moespeq inspect`: any artifact says what it is and what it goes with; what is none is refused with a reason."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from runtime.artifacts.manifest import FileEntry, sha256_file
from tests.cli.conftest import Command
from tests.pack.fixtures import make_pack, save_profile, save_quantized
from tests.tiny import save_tiny


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and the artifacts made of it, and a quantized one of another model in `other`."""
    folder = tmp_path_factory.mktemp("inspect")
    model = save_tiny("qwen3_moe", folder / "model", dtype=torch.bfloat16)
    profile = save_profile(model, folder / "profile", torch.diag_embed(torch.arange(16).view(2, 8)))
    quantized = save_quantized(model, folder / "quantized", wide_layers=(1,))
    make_pack(model, quantized, folder / "pack", shards=2, profile=profile)
    save_quantized(save_tiny("qwen3_moe", folder / "foreign", seed=9), folder / "other" / "quantized")
    return folder


def test_every_artifact_tells_its_model_sizes_settings_and_checksums(artifacts: Path, moespeq: Command) -> None:
    digest = json.loads((artifacts / "pack" / "manifest.json").read_text())["model_digest"]
    for kind, words in (
        (
            "quantized",
            ["4 bits, groups of 32: layers 0", "8 bits, one scale an output channel: layers 1", "--method = rtn"],
        ),
        ("profile", ["text: 15 tokens in 1 sequences", "2 layers x 8, top 2"]),
        ("pack", ["raw, ", "in 2 shards", "experts serve half of all uses"]),
    ):
        folder = artifacts / kind
        done = moespeq("inspect", folder, "--artifacts", artifacts)
        assert done.status == 0 and done.stderr == ""
        manifest = json.loads((folder / "manifest.json").read_text())
        total = sum(entry["size_bytes"] for entry in manifest["files"].values())
        for word in [digest, sha256_file(folder / "manifest.json"), f"({total} bytes)", *words]:
            assert word in done.stdout, (kind, word)
        for name, entry in manifest["files"].items():
            assert name in done.stdout and entry["sha256"][:16] in done.stdout
        value = json.loads(moespeq("inspect", folder, "--artifacts", artifacts, "--json").stdout)
        assert value["kind"].startswith(kind) and value["path"] == str(folder) and digest in value["model"]
        assert (value["size_bytes"], value["num_files"]) == (total, len(manifest["files"]))


def test_says_what_it_was_made_with_and_what_with_it(artifacts: Path, moespeq: Command) -> None:
    def relations(place: Path) -> dict[str, str]:
        value = json.loads(moespeq("inspect", place, "--artifacts", artifacts, "--json").stdout)
        return dict(line.split(": ", 1) for line in value["goes_with"])

    pack, quantized, profile = (str(artifacts / name) for name in ("pack", "quantized", "profile"))
    assert relations(artifacts / "pack") == {
        quantized: "it was made with this", profile: "it was made with this",
    }  # fmt: skip
    assert relations(artifacts / "quantized") == {profile: "of the same model", pack: "made with it"}
    other = relations(artifacts / "other" / "quantized")
    assert set(other.values()) == {"of another model: does not go with it"} and len(other) == 3


def test_verify_reads_every_file(artifacts: Path, tmp_path: Path, moespeq: Command) -> None:
    for kind, file in (("quantized", "config.json"), ("profile", "routing.safetensors"), ("pack", "dense.safetensors")):
        folder = Path(shutil.copytree(artifacts / kind, tmp_path / kind))
        assert "all files read" in moespeq("inspect", folder, "--verify").stdout
        data = bytearray((folder / file).read_bytes())
        data[-2] ^= 1
        (folder / file).write_bytes(data)
        damaged = moespeq("inspect", folder, "--verify")
        assert damaged.status == 1 and "sha256" in damaged.stderr and file in damaged.stderr and damaged.stdout == ""
        (folder / file).write_bytes(data[:-1])
        short = moespeq("inspect", folder)
        assert short.status == 1 and file in short.stderr


def test_models_and_deployment_profiles(artifacts: Path, tmp_path: Path, moespeq: Command) -> None:
    model = moespeq("inspect", artifacts / "model")
    assert model.status == 0 and "2 of 2 layers x 8, top 2" in model.stdout and "moespeq quantize" in model.stdout
    place = tmp_path / "mine.yaml"
    place.write_text("# Found by hand.\neviction: lru\nprefetch_window: 3\n")
    found = moespeq("inspect", place)
    assert found.status == 0 and "eviction = lru" in found.stdout and "Found by hand." in found.stdout
    place.write_text("eviction: least\n")
    assert moespeq("inspect", place).status == 1


def test_a_profile_that_comes_along_has_a_name(
    moespeq: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in `run --config h200`; a folder of that name goes first, and names are not paths."""
    found = moespeq("inspect", "h200")
    assert found.status == 0 and "verify_window = 7" in found.stdout and "layers measured" in found.stdout
    assert "fused_kernel = block_dim 0, " in found.stdout
    assert moespeq("inspect", "h200.yaml").stdout == found.stdout
    assert moespeq("inspect", tmp_path / "h200").status == 1
    monkeypatch.chdir(tmp_path)
    Path("h200").mkdir()
    shadowed = moespeq("inspect", "h200")
    assert shadowed.status == 1 and "neither manifest.json nor config.json" in shadowed.stderr


def test_what_is_no_artifact_is_refused_with_a_reason(artifacts: Path, tmp_path: Path, moespeq: Command) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.txt").write_text("words")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "progress.json").write_text("{}")
    strange = Path(shutil.copytree(artifacts / "profile", tmp_path / "strange"))
    body = json.loads((strange / "manifest.json").read_text())
    (strange / "manifest.json").write_text(json.dumps(body | {"kind": "recipe"}))
    cases = {
        tmp_path / "absent": "nothing of that name",
        tmp_path / "empty": "neither manifest.json nor config.json",
        tmp_path / "text.txt": "another file",
        tmp_path / "half": "unfinished",
        strange: "recipe",
        artifacts: "quantized, profile, pack",
    }
    for place, words in cases.items():
        refused = moespeq("inspect", place)
        assert refused.status == 1 and words in refused.stderr and "hint:" in refused.stderr, place
        assert refused.stdout == "" and "Traceback" not in refused.stderr
    (strange / "manifest.json").write_text(json.dumps(body | {"format_version": 1}))
    assert "moespeq profile --force" in moespeq("inspect", strange).stderr


def test_sizes_are_those_of_the_files(artifacts: Path, moespeq: Command) -> None:
    value = json.loads(moespeq("inspect", artifacts / "pack", "--json").stdout)
    listed = [line.split() for line in value["files"]]
    for name, *_ in listed:
        assert FileEntry.of(artifacts / "pack" / name).sha256[:16] == next(row[-1] for row in listed if row[0] == name)
