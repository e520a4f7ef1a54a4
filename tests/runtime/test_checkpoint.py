"""Model folders that are damaged in some way: named with file, expected and actual before anything is read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.artifacts.checkpoint import INDEX, Checkpoint
from runtime.errors import InputError
from runtime.model.families import describe, expert_tensor_names
from tests.tiny import save_tiny

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
TENSORS = {
    FIRST: {"a": torch.arange(600, dtype=torch.float32).reshape(20, 30), "b": torch.ones(7, dtype=torch.bfloat16)},
    SECOND: {"c": torch.zeros(40, 16, dtype=torch.float16)},
}
POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 4000000000\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards and their index."""
    (tmp_path / "config.json").write_text('{"model_type": "any"}')
    for file, tensors in TENSORS.items():
        save_file(tensors, tmp_path / file)
    write_index(tmp_path, {name: file for file, tensors in TENSORS.items() for name in tensors})
    return tmp_path


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def rewrite_header(path: Path, change: Callable[[str], str]) -> None:
    """Replace the header of a safetensors file by another of the same length."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = change(data[8 : 8 + length].decode()).ljust(length).encode()
    assert header != data[8 : 8 + length] and len(header) == length
    path.write_bytes(data[:8] + header + data[8 + length :])


def refusal(folder: Path) -> InputError:
    with pytest.raises(InputError) as caught:
        Checkpoint.open(folder)
    return caught.value


def test_an_undamaged_folder_is_read_bit_for_bit(folder: Path) -> None:
    (folder / "model-00009-of-00002.safetensors").write_text("not in the index, never opened")
    checkpoint = Checkpoint.open(folder)
    for tensors in TENSORS.values():
        for name, tensor in tensors.items():
            assert torch.equal(checkpoint.read(name), tensor) and checkpoint.read(name).dtype == tensor.dtype
    assert torch.equal(checkpoint.read_row("a", 19), TENSORS[FIRST]["a"][19])
    assert list(checkpoint.tensors) == ["a", "b", "c"]


def test_a_pointer_file(folder: Path) -> None:
    (folder / SECOND).write_text(POINTER)
    error = refusal(folder)
    assert SECOND in error.expected and f"Git LFS pointer of {len(POINTER)} bytes" in error.found
    assert "git lfs pull" in error.mend


def test_a_file_of_length_0(folder: Path) -> None:
    (folder / FIRST).write_bytes(b"")
    error = refusal(folder)
    assert FIRST in error.expected and error.found == "a file of length 0"


@pytest.mark.parametrize("change", [-1000, -1, 1, 512])
def test_a_file_that_is_cut_or_has_bytes_too_many(change: int, folder: Path) -> None:
    path = folder / SECOND
    whole = path.read_bytes()
    path.write_bytes(whole[:change] if change < 0 else whole + b"\0" * change)
    error = refusal(folder)
    assert error.expected == f"{path} of {len(whole)} bytes, as its header says"
    assert error.found == f"{len(whole) + change} bytes"


@pytest.mark.parametrize("length", [3, 8, 20])
def test_a_file_that_is_cut_in_its_header(length: int, folder: Path) -> None:
    path = folder / SECOND
    path.write_bytes(path.read_bytes()[:length])
    error = refusal(folder)
    assert SECOND in error.expected and f"in a file of {length} bytes" in error.found


@pytest.mark.parametrize(
    ("old", "new", "expected", "found"),
    [
        ("[0,1280]", "[0,1278]", "c in {path} at byte {base}, 1280 bytes long", "to {base+1278}"),
        ("[0,1280]", "[2,1282]", "c in {path} at byte {base}, 1280 bytes long", "bytes {base+2} to {base+1282}"),
        ("[40,16]", "[40,17]", "1360 bytes long", "to {base+1280}"),
        ("[40,16]", "[400,1]", "800 bytes long", "to {base+1280}"),
        ('"F16"', '"F32"', "2560 bytes long", "to {base+1280}"),
        ('"F16"', '"F99"', "c in {path} of a known type", "F99"),
        ('"F16"', "16   ", "{path} with a safetensors header", "c with dtype 16"),
        ('"shape"', '"shade"', "{path} with a safetensors header", "c with data_offsets, dtype, shade"),
        ("[0,1280]", "[0]     ", "{path} with a safetensors header", "1 offsets"),
        ("[0,1280]", "null    ", "{path} with a safetensors header", "c with None for whole numbers"),
        ('{"c"', '["c"', "{path} with a safetensors header", "JSONDecodeError"),
    ],
)
def test_a_header_that_lies(old: str, new: str, expected: str, found: str, folder: Path) -> None:
    path = folder / SECOND
    base = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    rewrite_header(path, lambda header: header.replace(old, new))
    error = refusal(folder)
    for template, text in ((expected, error.expected), (found, error.found)):
        for name, value in [("{path}", str(path)), *((f"{{base+{n}}}", str(base + n)) for n in (2, 1278, 1280, 1282))]:
            template = template.replace(name, value)
        assert template.replace("{base}", str(base)) in text
    assert str(path) in error.expected


def test_a_header_longer_than_the_file(folder: Path) -> None:
    path = folder / SECOND
    data = path.read_bytes()
    path.write_bytes((1 << 40).to_bytes(8, "little") + data[8:])
    error = refusal(folder)
    assert SECOND in error.expected and f"a header of {1 << 40} bytes in a file of {len(data)} bytes" in error.found


def test_a_missing_shard(folder: Path) -> None:
    (folder / SECOND).unlink()
    error = refusal(folder)
    assert error.expected == f"a file {folder / SECOND}" and error.found == "no such file"


@pytest.mark.parametrize("place", [FIRST, SECOND])
def test_an_index_that_names_an_absent_tensor(place: str, folder: Path) -> None:
    write_index(folder, {"a": FIRST, "b": FIRST, "c": SECOND, "lost.weight": place})
    error = refusal(folder)
    assert error.expected == f"tensor lost.weight in {folder / place}, as {INDEX} says"
    assert error.found == "none of that name"


def test_an_index_that_names_the_wrong_shard(folder: Path) -> None:
    write_index(folder, {"a": FIRST, "b": SECOND, "c": SECOND})
    assert f"tensor b in {folder / SECOND}" in refusal(folder).expected


def test_a_tensor_in_two_shards(folder: Path) -> None:
    save_file(TENSORS[SECOND] | {"a": TENSORS[FIRST]["a"]}, folder / SECOND)
    error = refusal(folder)
    assert error.expected == "tensor a once" and error.found == f"it in {FIRST} and {SECOND}"


@pytest.mark.parametrize("weight_map", [None, [], {"a": 3}, {"a": "../a.safetensors"}, {"a": "/etc/a.safetensors"}])
def test_an_index_that_is_none(weight_map: object, folder: Path) -> None:
    write_index(folder, weight_map)
    assert INDEX in refusal(folder).expected


@pytest.mark.parametrize(
    ("name", "body"), [("config.json", "{"), ("config.json", "[]"), ("config.json", "\ufeff"), (INDEX, "[" * 100_000)]
)
def test_json_that_is_none(name: str, body: str, folder: Path) -> None:
    (folder / name).write_text(body)
    assert str(folder / name) in refusal(folder).expected


def test_folders_that_are_no_model(folder: Path, tmp_path: Path) -> None:
    assert "no such folder" in refusal(tmp_path / "absent").found
    assert "a file" in refusal(folder / "config.json").found
    (folder / INDEX).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"0")
    assert "only pytorch_model.bin" in refusal(folder).found
    (folder / "config.json").unlink()
    assert str(folder / "config.json") in refusal(folder).expected


LAYER = "model.layers.1."
ROUTERS = {
    "mixtral": "block_sparse_moe.gate.weight",
    "phimoe": "block_sparse_moe.gate.weight",
    "granitemoe": "block_sparse_moe.router.layer.weight",
    "gpt_oss": "mlp.router.weight",
}
DOWN = {
    "mixtral": "block_sparse_moe.experts.{}.w2.weight",
    "phimoe": "block_sparse_moe.experts.{}.w2.weight",
    "granitemoe": "block_sparse_moe.output_linear.weight",
    "gpt_oss": "mlp.experts.down_proj",
}
UP = {
    "mixtral": "block_sparse_moe.experts.{}.w3.weight",
    "phimoe": "block_sparse_moe.experts.{}.w3.weight",
    "granitemoe": "block_sparse_moe.input_linear.weight",
    "gpt_oss": "mlp.experts.gate_up_proj",
}


@pytest.fixture(scope="module", params=sorted(ROUTERS))
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A tiny model of a family whose experts are fused, interleaved, or named w1, w2 and w3."""
    kind: str = request.param
    return kind, save_tiny(kind, tmp_path_factory.mktemp(kind), dtype=torch.bfloat16)


def without(source: Path, names: list[str], target: Path) -> Checkpoint:
    """A copy of a model that lacks some tensors, in file and index."""
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    for name in names:
        del tensors[name]
    save_file(tensors, target / "model.safetensors")
    return Checkpoint.open(target)


def test_a_missing_router_is_named(whole: tuple[str, Path], tmp_path: Path) -> None:
    kind, source = whole
    damaged = without(source, [LAYER + ROUTERS[kind]], tmp_path / "damaged")
    with pytest.raises(InputError) as caught:
        describe(damaged)
    error = caught.value
    assert error.expected.startswith("the router of layer 1 (model.layers.1.") and str(tmp_path) in error.expected
    assert error.found == "no tensor of those names"


@pytest.mark.parametrize("projection", [DOWN, UP], ids=["down", "up"])
def test_missing_projections_are_named(projection: dict[str, str], whole: tuple[str, Path], tmp_path: Path) -> None:
    kind, source = whole
    names = sorted({LAYER + projection[kind].format(expert) for expert in range(8)})
    damaged = without(source, names, tmp_path / "damaged")
    with pytest.raises(InputError) as caught:
        describe(damaged)
    error = caught.value
    assert "expert tensors in layer 1 of" in error.expected and str(tmp_path) in error.expected
    assert error.found.startswith(f"{len(names)} of them missing: {', '.join(names[:4])}")


def test_one_missing_bias_is_named(tmp_path: Path) -> None:
    source = save_tiny("gpt_oss", tmp_path / "whole", dtype=torch.bfloat16)
    name = f"{LAYER}mlp.experts.down_proj_bias"
    with pytest.raises(InputError, match=f"1 of them missing: {name}"):
        describe(without(source, [name], tmp_path / "damaged"))


def test_a_layer_of_another_shape_is_named(whole: tuple[str, Path], tmp_path: Path) -> None:
    kind, source = whole
    target = tmp_path / "damaged"
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    name = LAYER + DOWN[kind].format(3)
    shape = list(tensors[name].shape)
    tensors[name] = tensors[name][..., :-8].contiguous()
    save_file(tensors, target / "model.safetensors")
    with pytest.raises(InputError) as caught:
        describe(Checkpoint.open(target))
    assert caught.value.expected == f"{name} of shape {shape}, as config.json says"
    assert caught.value.found == str([*shape[:-1], shape[-1] - 8])


@pytest.mark.parametrize("kind", ["granitemoe", "qwen3_moe", "mixtral", "gpt_oss"])
def test_a_router_without_experts_is_refused(kind: str, tmp_path: Path) -> None:
    """A layer that lost all of its expert tensors must not pass for a dense one (H09)."""
    source = save_tiny(kind, tmp_path / "model")
    tensors = load_file(source / "model.safetensors")
    spec = describe(Checkpoint.open(source))
    for name in expert_tensor_names(spec, 1):
        del tensors[name]
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match="no expert tensor of layer 1"):
        describe(Checkpoint.open(source))
