"""A pack gives back its source, bit for bit, for every family."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from moespeq_cli.pack.verify import verify_pack
from runtime.artifacts.checkpoint import Checkpoint
from runtime.artifacts.pack import Pack
from runtime.artifacts.quantized import KeptLinear, Quantized, QuantizedLinear
from runtime.artifacts.record import unpack_codes
from runtime.artifacts.safetensors_file import pread
from runtime.memory.location import ExpertKey
from runtime.model.families import dense_names, describe, expert_tensor_names, read_layer, to_disk_tensors
from tests.pack.fixtures import make_pack, read_record, save_quantized, unpack_layer
from tests.tiny import KINDS, make_model, save_model, save_tiny, save_tokenizer


def assert_gives_back(pack: Pack, model: Path) -> None:
    """Every tensor of the source, experts through the disk's own names and layouts, equals what the pack holds."""
    source = Checkpoint.open(model)
    seen = set()
    for layer_id in pack.spec.moe_layers:
        for name, tensor in to_disk_tensors(pack.spec, layer_id, unpack_layer(pack, layer_id)).items():
            assert bytes(tensor.contiguous().view(torch.uint8).numpy()) == source.read_bytes(name), name
            seen.add(name)
    for name in pack.dense_names():
        copy = pack.read_dense(name)
        assert bytes(copy.reshape(-1).view(torch.uint8).numpy()) == source.read_bytes(name), name
        assert copy.dtype == source.read(name).dtype and copy.shape == source.read(name).shape
        seen.add(name)
    assert seen == set(source.tensors)


@pytest.mark.parametrize("kind", KINDS)
def test_unpacking_gives_back_the_source(kind: str, tmp_path: Path) -> None:
    model = save_tiny(kind, tmp_path / "model", dtype=torch.bfloat16 if kind != "olmoe" else torch.float32)
    quantized = save_quantized(model, tmp_path / "quantized")
    pack = make_pack(model, quantized, tmp_path / "pack", shards=2)
    assert_gives_back(pack, model)
    verification = verify_pack(pack, Checkpoint.open(model), Quantized.open(quantized))
    assert verification.problems == []
    assert verification.records_equal_to_source == verification.drafts_equal_to_quantized == pack.spec.num_records
    for shard in (pack.folder / name for name in pack.manifest.files if name.endswith(".safetensors")):
        with safe_open(shard, "pt") as file:
            assert len(file.keys()) > 0
    for location in (*pack.target_locations().values(), *pack.draft_locations().values()):
        assert location.offset_bytes % 4096 == 0 and location.padded_bytes % 4096 == 0


def test_float16_source_comes_back(tmp_path: Path) -> None:
    model = save_tiny("mixtral", tmp_path / "model", dtype=torch.float16)
    pack = make_pack(model, save_quantized(model, tmp_path / "quantized"), tmp_path / "pack")
    assert pack.spec.dtype == "F16"
    assert_gives_back(pack, model)


def test_draft_records_hold_the_quantized_codes(model: Path, quantized: Path, tmp_path: Path) -> None:
    pack = make_pack(model, quantized, tmp_path / "pack")
    source = Quantized.open(quantized)
    for key in ((0, 0), (1, 3), (2, 7)):
        views = pack.draft_layout(key[0]).views(read_record(pack.draft_location(key)))
        linears = [source.linear(*key, name) for name in ("gate_proj", "up_proj")]
        codes = unpack_codes(views["gate_up.codes"], pack.spec.hidden_size)
        assert torch.equal(
            codes, torch.cat([linear.codes for linear in linears if isinstance(linear, QuantizedLinear)])
        )
        down = source.linear(*key, "down_proj")
        assert isinstance(down, QuantizedLinear)
        assert torch.equal(views["down.scales"], down.scales) and torch.equal(views["down.zeros"], down.zeros)
        assert pack.draft_format(key[0]).down.bits == (8 if key[0] == 1 else 4) == down.bits
    assert views["gate_up.codes"].shape == (128, 32) and pack.draft_layout(1) != pack.draft_layout(2)


def test_narrow_projections_stay_unquantised(tmp_path: Path) -> None:
    model = save_tiny("qwen2_moe", tmp_path / "model", dtype=torch.bfloat16, moe_intermediate_size=40)
    quantized = save_quantized(model, tmp_path / "quantized")
    pack = make_pack(model, quantized, tmp_path / "pack")
    assert pack.draft_format(0).down.bits == 0
    key: ExpertKey = (0, 5)
    kept = Quantized.open(quantized).linear(*key, "down_proj")
    assert isinstance(kept, KeptLinear)
    assert torch.equal(pack.draft_layout(0).views(read_record(pack.draft_location(key)))["down.weight"], kept.weight)


def save_fused(model: Path, folder: Path) -> Path:
    """The same Mixtral with the experts of a layer in one tensor, as newer checkpoints have them."""
    source = Checkpoint.open(model)
    spec = describe(source)
    renamed = {name: name.replace(".block_sparse_moe.", ".mlp.") for name in dense_names(source, spec)}
    tensors = {renamed[name]: source.read(name) for name in renamed}
    for layer_id in spec.moe_layers:
        experts = read_layer(source, spec, layer_id)
        prefix = f"model.layers.{layer_id}.mlp.experts"
        tensors[f"{prefix}.gate_up_proj"] = torch.cat((experts.gate_proj, experts.up_proj), 1)
        tensors[f"{prefix}.down_proj"] = experts.down_proj.contiguous()
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(source.config))
    save_tokenizer(folder)
    return folder


def test_h05_names_on_disk_do_not_change_the_packed_bytes(tmp_path: Path) -> None:
    folders = {"separate": save_tiny("mixtral", tmp_path / "separate", dtype=torch.bfloat16)}
    assert any(".w1." in name for name in Checkpoint.open(folders["separate"]).tensors)
    folders["fused"] = save_fused(folders["separate"], tmp_path / "fused")
    packs = {
        name: make_pack(
            folder, save_quantized(folder, tmp_path / f"{name}-quantized"), tmp_path / f"{name}-pack", shards=2
        )
        for name, folder in folders.items()
    }
    for file in ("target-0000", "target-0001", "draft-0000", "draft-0001"):
        separate, fused = (packs[name].folder / f"{file}.safetensors" for name in ("separate", "fused"))
        assert separate.read_bytes() == fused.read_bytes()
    assert packs["separate"].records == packs["fused"].records


@pytest.mark.parametrize("kind", ["qwen2_moe", "deepseek_v2", "deepseek_v3", "granitemoe"])
def test_h06_all_but_routed_experts_is_copied(kind: str, tmp_path: Path) -> None:
    model = save_tiny(kind, tmp_path / "model", dtype=torch.bfloat16)
    pack = make_pack(model, save_quantized(model, tmp_path / "quantized"), tmp_path / "pack")
    source, copy = Checkpoint.open(model), pack.folder / "dense.safetensors"
    experts = {name for layer in pack.spec.moe_layers for name in expert_tensor_names(pack.spec, layer)}
    assert set(pack.dense_names()) == set(source.tensors) - experts
    assert any("shared_expert" in name for name in pack.dense_names()) == (kind != "granitemoe")
    for name in pack.dense_names():
        info = pack.dense_info(name)
        assert pread(copy, info.start, info.end - info.start) == source.read_bytes(name)
        assert info.dtype == source.tensors[name].dtype and info.start % pack.read_dense(name).itemsize == 0


@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe"])
def test_h07_router_and_correction_bias_keep_float32(kind: str, tmp_path: Path) -> None:
    network = make_model(kind, dtype=torch.bfloat16)
    for name, tensor in (*network.named_buffers(), *network.named_parameters()):
        if name.endswith("e_score_correction_bias"):
            tensor.data = 7 + 0.2 * torch.rand(tensor.shape)
        elif name.endswith("mlp.gate.weight"):
            tensor.data = torch.rand(tensor.shape)
    model = save_model(network, tmp_path / "model")
    pack = make_pack(model, save_quantized(model, tmp_path / "quantized"), tmp_path / "pack")
    routers = [n for n in pack.dense_names() if n.endswith(("e_score_correction_bias", "mlp.gate.weight"))]
    assert len(routers) == 2 * len(pack.spec.moe_layers) and pack.spec.dtype == "BF16"
    for name in routers:
        assert pack.read_dense(name).dtype == torch.float32
        assert torch.equal(pack.read_dense(name), Checkpoint.open(model).read(name))


@pytest.mark.parametrize(
    ("kind", "overrides", "layers"),
    [
        ("qwen2_moe", {"mlp_only_layers": [0], "num_hidden_layers": 4}, (1, 2, 3)),
        ("qwen2_moe", {"decoder_sparse_step": 2, "num_hidden_layers": 4}, (1, 3)),
        ("deepseek_v2", {"first_k_dense_replace": 2}, (2,)),
    ],
)
def test_h08_layers_keep_their_true_numbers(
    kind: str, overrides: dict[str, object], layers: tuple[int, ...], tmp_path: Path
) -> None:
    model = save_tiny(kind, tmp_path / "model", **overrides)
    pack = make_pack(model, save_quantized(model, tmp_path / "quantized"), tmp_path / "pack")
    assert pack.spec.moe_layers == layers
    assert {key[0] for key in pack.target_locations()} == set(layers)
    assert set(pack.manifest.draft_layouts) == {str(layer) for layer in layers}
    with safe_open(pack.folder / "target-0000.safetensors", "pt") as shard:
        assert {int(name.split(".")[1]) for name in shard.keys()} == set(layers)  # noqa: SIM118
    assert_gives_back(pack, model)


def test_small_files_go_along_and_nothing_else(model: Path, quantized: Path, tmp_path: Path) -> None:
    source = tmp_path / "model"
    source.mkdir()
    for path in model.iterdir():
        (source / path.name).symlink_to(path)
    extra = {"chat_template.jinja": "{{ x }}", "merges.txt": "a b", "LICENSE.txt": "free", "tokenizer.model": "m"}
    extra |= {"vocab.json": "{}", "additional_chat_templates/tool.jinja": "t", "modeling.py": "import os"}
    extra |= {"pytorch_model.bin": "x", "README.md": "#", "old.safetensors.index.json": "{}"}
    (source / "additional_chat_templates").mkdir()
    for name, text in extra.items():
        (source / name).write_text(text)
    pack = make_pack(source, quantized, tmp_path / "pack")
    copied = {
        path.relative_to(pack.config_folder).as_posix() for path in pack.config_folder.rglob("*") if path.is_file()
    }
    wanted = {path.name for path in model.glob("*.json") if not path.name.endswith(".index.json")}
    wanted |= set(extra) - {"modeling.py", "pytorch_model.bin", "README.md", "old.safetensors.index.json"}
    assert copied == wanted
    assert {f"model/{name}" for name in copied} <= set(pack.manifest.files)
