"""Packs that are cut short, changed, unfinished, or made from something else (H10)."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moespeq_cli.pack.verify import verify_pack
from runtime.artifacts.checkpoint import Checkpoint
from runtime.artifacts.manifest import FileEntry
from runtime.artifacts.pack import Pack
from runtime.errors import ArtifactError, InputError
from runtime.memory.store import RecordStore
from tests.pack.fixtures import make_pack, plan_for, save_profile, save_quantized
from tests.tiny import save_tiny


@pytest.fixture(scope="module")
def finished(model: Path, quantized: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pack(model, quantized, tmp_path_factory.mktemp("finished") / "pack", shards=2).folder


@pytest.fixture
def pack(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "pack"))


def edit(path: Path, change: Callable[[Any], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def change_index(pack: Path, change: Callable[[Any], object]) -> None:
    """Change the index and let the manifest agree with it, as a faulty writer would."""
    edit(pack / "records.json", change)
    entry = FileEntry.of(pack / "records.json")
    edit(
        pack / "manifest.json",
        lambda m: m["files"].update({"records.json": {"size_bytes": entry.size_bytes, "sha256": entry.sha256}}),
    )


@pytest.mark.parametrize("name", ["target-0001.safetensors", "draft-0000.safetensors", "dense.safetensors"])
def test_file_cut_short_is_named_with_both_sizes(pack: Path, name: str) -> None:
    size = (pack / name).stat().st_size
    with (pack / name).open("r+b") as file:
        file.truncate(size - 1000)
    with pytest.raises(ArtifactError, match=f"{name} of {size} bytes; found {size - 1000} bytes"):
        Pack.open(pack)


def test_pointer_file_empty_file_and_lost_file_are_named(pack: Path) -> None:
    shard = pack / "target-0000.safetensors"
    shard.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(ArtifactError, match=r"target-0000.safetensors of \d+ bytes; found 6\d bytes"):
        Pack.open(pack)
    shard.write_bytes(b"")
    with pytest.raises(ArtifactError, match=r"target-0000.safetensors of \d+ bytes; found 0 bytes"):
        Pack.open(pack)
    shard.unlink()
    with pytest.raises(ArtifactError, match=r"target-0000.safetensors of \d+ bytes; found no such file"):
        Pack.open(pack)


@pytest.mark.parametrize("side", ["target", "draft"])
def test_flipped_byte_is_named_by_verification_and_by_the_store(pack: Path, side: str) -> None:
    opened = Pack.open(pack)
    key = (1, 5)
    location = opened.target_location(key) if side == "target" else opened.draft_location(key)
    flip(location.path, location.offset_bytes + 77)
    problems = verify_pack(Pack.open(pack)).problems
    assert [location.path.name in problem for problem in problems] == [True, True]
    assert "sha256" in problems[0] and f"{side} record of layer 1, expert 5" in problems[1]
    assert location.sha256 in problems[1]
    with pytest.raises(ArtifactError, match=location.path.name):
        Pack.open(pack, verify=True)
    store = RecordStore({key: location})
    buffer = torch.zeros(location.padded_bytes + 4096, dtype=torch.uint8)
    start = -buffer.data_ptr() % 4096
    with pytest.raises(ArtifactError, match=f"layer 1, expert 5|{location.path.name}"):
        store.read_into(key, memoryview(buffer.numpy())[start : start + location.padded_bytes])
    store.close()


def flip(path: Path, place: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 0x10]))


def test_verification_compares_with_the_source_not_only_with_checksums(model: Path, pack: Path) -> None:
    """A record that was wrong when it was written has a right checksum."""
    opened = Pack.open(pack)
    location = opened.target_location((0, 0))
    flip(location.path, location.offset_bytes)
    data = location.path.read_bytes()[location.offset_bytes :][: location.payload_bytes]

    def mend(index: dict[str, list[dict[str, Any]]]) -> None:
        entry = next(e for e in index["target"] if (e["layer_id"], e["expert_id"]) == (0, 0))
        entry["sha256"] = hashlib.sha256(data).hexdigest()

    change_index(pack, mend)
    problems = verify_pack(Pack.open(pack), Checkpoint.open(model)).problems
    assert any("target record of layer 0, expert 0: not the weights" in problem for problem in problems)


def test_padding_that_is_not_zero_and_a_wrong_header_are_found(model: Path, tmp_path: Path) -> None:
    model = save_tiny("gpt_oss", tmp_path / "model", dtype=torch.bfloat16)  # its biases leave padding
    pack = make_pack(model, save_quantized(model, tmp_path / "quantized"), tmp_path / "pack")
    location = pack.target_location((0, 0))
    flip(location.path, location.offset_bytes + location.padded_bytes - 1)
    header = location.path.read_bytes()[: location.offset_bytes]
    with location.path.open("r+b") as file:
        file.write(header.replace(b"layers.1.experts.0", b"layers.9.experts.0"))
    problems = " ".join(verify_pack(Pack.open(pack.folder)).problems)
    assert "layer 0, expert 0: padding that is not zero" in problems
    assert "layer 1, expert 0: nowhere by the shard's header" in problems


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: i["target"].pop(3), "one target record for each of 24 experts"),
        (lambda i: i["draft"].append(i["draft"][0]), "layer 0, expert 0 there twice"),
        (lambda i: i["target"][0].update(layer_id=9), "layer 0, expert 0 missing"),
        (lambda i: i["target"][2].update(offset_bytes=i["target"][0]["offset_bytes"]), "an offset of at least"),
        (lambda i: i["target"][2].update(offset_bytes=5000), "multiple of 4096"),
        (lambda i: i["target"][2].update(offset_bytes=-4096), "multiple of 4096"),
        (lambda i: i["target"][2].update(offset_bytes=1 << 40), "its end within the"),
        (lambda i: i["target"][2].update(payload_bytes=5), "payload_bytes 24576"),
        (lambda i: i["draft"][2].update(payload_bytes=1 << 40), "payload_bytes"),
        (lambda i: i["target"][2].update(padded_bytes=4096), "padded_bytes 24576"),
        (lambda i: i["target"][2].update(shard="draft-0000.safetensors"), "a target shard of this pack"),
        (lambda i: i["target"][2].update(shard="../x"), "a target shard of this pack"),
        (lambda i: i["target"][2].update(encoding="zip"), "encoding raw"),
        (lambda i: i["target"][2].update(sha256="12"), "a sha256"),
        (lambda i: i["target"][2].update(expert_id="2"), "expert_id as int"),
        (lambda i: i["target"][2].update(expert_id=True), "expert_id as int"),
        (lambda i: i["target"][2].pop("sha256"), "fields"),
        (lambda i: i.pop("draft"), "lists target and draft"),
    ],
)
def test_index_that_contradicts_itself_is_refused(pack: Path, change: Callable[[Any], object], message: str) -> None:
    change_index(pack, change)
    with pytest.raises(ArtifactError, match=message):
        Pack.open(pack)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(format_version=99), "format_version 1"),
        (lambda m: m.update(kind="quantized"), "kind 'pack'"),
        (lambda m: m.update(encoding="zip"), "an encoding this version knows"),
        (lambda m: m.update(align_bytes=512), "align_bytes"),
        (lambda m: m.update(draft_layout_name="columns"), "draft_layout_name"),
        (lambda m: m["files"].pop("draft-0001.safetensors"), "unlisted files"),
        (lambda m: m.update(num_shards=3), "unlisted files"),
        (lambda m: m.update(num_shards=1 << 60), "as many shards as files"),
        (lambda m: m["spec"].update(hidden_size=-64), "above 0"),
        (lambda m: m["draft_layouts"].pop("2"), "layers of draft_layouts"),
        (lambda m: m["draft_formats"].update({"x": m["draft_formats"]["0"]}), "layers of draft_formats"),
        (lambda m: m["draft_formats"]["0"]["down"].update(bits=3), "draft_formats.0"),
        (lambda m: m["draft_formats"]["0"]["down"].update(group_size=0), "draft_formats.0"),
        (lambda m: m["draft_formats"]["0"]["down"].update(group_size=64), "draft_layouts.0"),
        (lambda m: m["target_layout"]["fields"][1].update(offset_bytes=1 << 30), "target_layout"),
        (lambda m: m["spec"].update(dtype="F32"), "target_layout"),
        (lambda m: m["spec"].update(dtype="Q7"), "dtype"),
        (lambda m: m.update(target_slot_bytes=4096), "at most 4096 bytes"),
        (lambda m: m.pop("model_digest"), "model_digest"),
    ],
)
def test_manifest_that_promises_something_else_is_refused(
    pack: Path, change: Callable[[Any], object], message: str
) -> None:
    edit(pack / "manifest.json", change)
    with pytest.raises(ArtifactError, match=message):
        Pack.open(pack)


def test_folder_without_a_manifest_is_never_accepted(pack: Path) -> None:
    (pack / "manifest.json").rename(pack / "manifest.json.part")
    with pytest.raises(ArtifactError, match="a pack artifact"):
        Pack.open(pack)
    with pytest.raises(ArtifactError, match="no such folder"):
        Pack.open(pack / "nowhere")


def test_quantized_artifact_and_profile_of_another_model_are_refused(
    model: Path, quantized: Path, tmp_path: Path
) -> None:
    other = save_tiny("qwen2_moe", tmp_path / "other", seed=1, dtype=torch.bfloat16, num_hidden_layers=3)
    with pytest.raises(InputError, match="a quantized artifact of this model"):
        plan_for(other, quantized, tmp_path / "pack")
    profile = save_profile(other, tmp_path / "profile", torch.zeros(3, 8, 8, dtype=torch.int64))
    with pytest.raises(InputError, match="a profile artifact of this model"):
        plan_for(model, quantized, tmp_path / "pack", profile=profile)
    assert not (tmp_path / "pack").exists()


def test_half_written_sources_are_refused(model: Path, quantized: Path, tmp_path: Path) -> None:
    half = Path(shutil.copytree(quantized, tmp_path / "quantized"))
    (half / "manifest.json").unlink()
    with pytest.raises(ArtifactError, match="a quantized artifact"):
        plan_for(model, half, tmp_path / "pack")
    cut = Path(shutil.copytree(quantized, tmp_path / "cut"))
    shard = min(cut.glob("*.safetensors"))
    with shard.open("r+b") as file:
        file.truncate(shard.stat().st_size - 1000)
    with pytest.raises(ArtifactError, match=rf"{shard.name} of \d+ bytes; found"):
        plan_for(model, cut, tmp_path / "pack")
    source = Path(shutil.copytree(model, tmp_path / "source"))
    weights = next(source.glob("*.safetensors"))
    with weights.open("r+b") as file:
        file.truncate(weights.stat().st_size - 1000)
    with pytest.raises(InputError, match=rf"{weights.name} of \d+ bytes"):
        plan_for(source, quantized, tmp_path / "pack")
    assert not (tmp_path / "pack").exists()


@pytest.mark.parametrize(
    ("shards", "encoding", "message"), [(0, "raw", "1 to 24"), (25, "raw", "1 to 24"), (1, "zip", "raw")]
)
def test_impossible_options_are_refused(
    model: Path, quantized: Path, tmp_path: Path, shards: int, encoding: str, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        plan_for(model, quantized, tmp_path / "pack", shards, encoding=encoding)
