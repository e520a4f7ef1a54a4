"""Every family: all routed experts quantised, nothing else touched, whatever the names on disk."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from runtime.artifacts.checkpoint import Checkpoint
from runtime.artifacts.quantized import KeptLinear, Quantized, QuantizedLinear, linear_name
from runtime.errors import InputError
from runtime.model.families import PROJECTIONS, dense_names, describe, memory_name, read_expert, read_layer
from tests.quantize.conftest import Quantize
from tests.tiny import KINDS, make_model, save_model, save_tiny


def report_of(quantized: Quantized) -> dict:
    return json.loads((quantized.folder / "report.json").read_text())


@pytest.mark.parametrize("kind", KINDS)
def test_every_routed_linear_is_quantised_and_all_else_is_the_source(kind: str, run: Quantize, tmp_path: Path) -> None:
    source = Checkpoint.open(save_tiny(kind, tmp_path / "model", dtype=torch.bfloat16))
    spec = describe(source)
    quantized = run(source.folder)

    report, manifest = report_of(quantized), quantized.manifest
    expected = spec.num_experts * 3 * len(spec.moe_layers)
    assert manifest.quantized_linears == expected == report["totals"]["quantized"] == len(report["linears"])
    assert {(x["layer"], x["expert"], x["projection"]) for x in report["linears"]} == {
        (layer, expert, projection)
        for layer, expert in product(spec.moe_layers, range(spec.num_experts))
        for projection in PROJECTIONS
    }
    per_layer = [sum(x["tokens"] for x in report["linears"] if x["layer"] == n) // 3 for n in spec.moe_layers]
    assert per_layer == [manifest.calibration.tokens * spec.top_k] * len(spec.moe_layers)

    dense = dense_names(source, spec)
    library = {name: memory_name(spec, name) for name in dense}  # as transformers' model calls them, for other readers
    assert all(source.sha256(name) == quantized.checkpoint.sha256(library[name]) for name in dense)
    assert all(source.tensors[name].dtype == quantized.checkpoint.tensors[library[name]].dtype for name in dense)
    parts = 5 if spec.has_bias else 4
    assert len(quantized.checkpoint.tensors) == len(dense) + expected * parts

    layer_id = spec.moe_layers[-1]
    weights = read_expert(source, spec, layer_id, 3)
    for projection in PROJECTIONS:
        linear = quantized.linear(layer_id, 3, projection)
        assert isinstance(linear, QuantizedLinear)
        original = getattr(weights, projection).float()
        error = (linear.dequantized(torch.float32) - original).norm() / original.norm()
        assert error < 0.2, projection
        bias = getattr(weights, projection.replace("proj", "bias"))
        assert (linear.bias is None) if bias is None else torch.equal(linear.bias, bias)
    stacked = quantized.read_layer(layer_id, torch.bfloat16)
    assert stacked.gate_proj.shape == read_layer(source, spec, layer_id).gate_proj.shape
    assert torch.equal(stacked.down_proj[3], quantized.linear(layer_id, 3, "down_proj").dequantized(torch.bfloat16))


def test_the_interchange_configuration_names_what_differs(run: Quantize, model: Path) -> None:
    quantized = run(model, sensitive_layers=(1,))
    config = json.loads((quantized.folder / "config.json").read_text())["quantization_config"]
    assert config == json.loads((quantized.folder / "quantize_config.json").read_text())
    assert (config["quant_method"], config["bits"], config["group_size"], config["sym"], config["desc_act"]) == (
        "gptq", 4, 128, True, False,
    )  # fmt: skip
    assert config["dynamic"][r"+:.*\.layers\.1\.mlp\.experts\.\d+\..*"] == {"bits": 8, "group_size": -1}
    linear = quantized.linear(1, 0, "gate_proj")
    assert isinstance(linear, QuantizedLinear) and linear.bits == 8 and linear.scales.shape == (64, 1)
    assert quantized.linear(0, 0, "gate_proj").bits == 4  # type: ignore[union-attr]
    errors = {row["layer"]: row["mean_weight_error"] for row in report_of(quantized)["layers"]}
    assert errors[1] < errors[0] / 8


def test_both_mixtral_namings_give_the_same_plan_and_bytes(run: Quantize, tmp_path: Path) -> None:
    split = Checkpoint.open(save_tiny("mixtral", tmp_path / "split", dtype=torch.bfloat16))
    spec = describe(split)
    assert any(name.endswith("w1.weight") for name in split.tensors)
    tensors = {name: split.read(name) for name in dense_names(split, spec)}
    for layer_id in spec.moe_layers:
        experts = read_layer(split, spec, layer_id)
        prefix = f"model.layers.{layer_id}.mlp.experts"
        tensors[f"{prefix}.gate_up_proj"] = torch.cat([experts.gate_proj, experts.up_proj], 1)
        tensors[f"{prefix}.down_proj"] = experts.down_proj
    fused = tmp_path / "fused"
    fused.mkdir()
    for path in split.folder.iterdir():
        if path.suffix == ".json" and "index" not in path.name:
            (fused / path.name).write_bytes(path.read_bytes())
    save_file(tensors, fused / "model.safetensors", metadata={"format": "pt"})
    first, second = run(split.folder), run(fused)
    assert first.manifest.layers == second.manifest.layers
    shards = [name for name in first.manifest.files if name.endswith(".safetensors")]
    assert shards and all(first.manifest.files[name] == second.manifest.files[name] for name in shards)


@pytest.mark.parametrize(
    ("kind", "overrides", "layers"),
    [
        ("qwen2_moe", {"mlp_only_layers": [0], "num_hidden_layers": 3}, (1, 2)),
        ("qwen2_moe", {"decoder_sparse_step": 2, "num_hidden_layers": 4}, (1, 3)),
        ("deepseek_v3", {}, (1, 2)),
    ],
)
def test_dense_layers_keep_true_layer_numbers(
    kind: str, overrides: dict, layers: tuple[int, ...], run: Quantize, tmp_path: Path
) -> None:
    source = Checkpoint.open(save_tiny(kind, tmp_path / "model", **overrides))
    quantized = run(source.folder)
    assert quantized.moe_layers == layers
    assert {row["layer"] for row in report_of(quantized)["layers"]} == set(layers)
    assert not any(name.startswith("model.layers.0.mlp.experts") for name in quantized.checkpoint.tensors)
    dense = "model.layers.0.mlp.gate_proj.weight"
    assert source.sha256(dense) == quantized.checkpoint.sha256(dense)


def test_a_model_of_dense_layers_alone_is_refused(run: Quantize, tmp_path: Path) -> None:
    folder = save_tiny("qwen2_moe", tmp_path / "model", mlp_only_layers=[0, 1])
    with pytest.raises(InputError, match="dense"):
        run(folder, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("missing", ["router", "down_proj"])
def test_missing_tensors_are_named_and_nothing_is_written(missing: str, run: Quantize, tmp_path: Path) -> None:
    source = Checkpoint.open(save_tiny("qwen3_moe", tmp_path / "model"))
    gone = "model.layers.1.mlp.gate.weight" if missing == "router" else ".layers.1.mlp.experts."
    tensors = {
        name: source.read(name)
        for name in source.tensors
        if not (name == gone or (gone in name and name.endswith("down_proj.weight")))
    }
    assert len(tensors) < len(source.tensors)
    save_file(tensors, source.folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError) as caught:
        run(source.folder, out=tmp_path / "out")
    assert ("layers.1.mlp.gate.weight" if missing == "router" else "down_proj") in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_an_expert_that_is_never_routed_to_is_rounded_to_nearest(run: Quantize, tmp_path: Path) -> None:
    model = make_model("mixtral", num_local_experts=5)
    with torch.no_grad():
        for layer in model.model.layers:
            v, u = torch.randn(2, 64, generator=torch.Generator().manual_seed(1))
            layer.mlp.gate.weight.copy_(torch.stack([v, -v, u, -u, torch.zeros(64)]))
    source = Checkpoint.open(save_model(model, tmp_path / "model"))
    quantized = run(source.folder)
    report = report_of(quantized)
    never = [row for row in report["experts_with_too_few_tokens"] if row["tokens"] == 0]
    assert never == [{"layer": layer, "expert": 4, "tokens": 0} for layer in (0, 1)]
    assert {x["method"] for x in report["linears"] if x["expert"] == 4} == {"rtn"}
    weights = read_expert(source, describe(source), 1, 4)
    for projection in PROJECTIONS:
        linear = quantized.linear(1, 4, projection)
        assert isinstance(linear, QuantizedLinear)
        error = (linear.dequantized(torch.float32) - getattr(weights, projection)).abs()
        half_step = 0.5 * linear.scales.float().repeat_interleave(linear.group_size, 1)
        assert bool(torch.isfinite(error).all()) and bool((error <= half_step * (1 + 1e-6)).all())


@pytest.mark.parametrize(
    ("hidden", "inner", "group", "kept"),
    [
        (64, 40, 32, ("down_proj",)), (64, 48, -1, ("down_proj",)), (64, 192, 64, ()), (96, 192, -1, ()),
        (96, 48, 128, ("down_proj",)), (64, 192, 32, ()), (96, 192, 96, ()),
    ],
)  # fmt: skip
def test_odd_sizes_are_quantised_or_kept_by_one_rule(
    hidden: int, inner: int, group: int, kept: tuple[str, ...], run: Quantize, tmp_path: Path
) -> None:
    source = save_tiny(
        "qwen3_moe",
        tmp_path / "model",
        hidden_size=hidden,
        moe_intermediate_size=inner,
        num_experts=4,
        num_hidden_layers=1,
    )
    quantized = run(source, group_size=group)
    assert quantized.manifest.layers["0"].kept == kept
    for projection in PROJECTIONS:
        linear = quantized.linear(0, 1, projection)
        name = f"{linear_name(0, 1, projection)}.{'weight' if projection in kept else 'qweight'}"
        assert isinstance(linear, KeptLinear if projection in kept else QuantizedLinear)
        assert name in quantized.checkpoint.tensors
    if kept:
        original = read_expert(Checkpoint.open(source), describe(Checkpoint.open(source)), 0, 1).down_proj
        assert torch.equal(quantized.linear(0, 1, "down_proj").dequantized(torch.float32), original)


@pytest.mark.parametrize(("hidden", "inner", "group", "fits"), [(64, 192, 128, 96), (96, 64, 64, 48)])
def test_groups_that_do_not_fit_are_refused_before_any_work(
    hidden: int, inner: int, group: int, fits: int, run: Quantize, tmp_path: Path
) -> None:
    source = save_tiny(
        "qwen3_moe",
        tmp_path / "model",
        hidden_size=hidden,
        moe_intermediate_size=inner,
        num_experts=4,
        num_hidden_layers=1,
    )
    from runtime.errors import ShapeError

    with pytest.raises(ShapeError) as caught:
        run(source, group_size=group, out=tmp_path / "out")
    assert "model.layers.0.mlp.experts.0." in str(caught.value) and f"--group-size {fits}" in caught.value.mend
    assert not (tmp_path / "out").exists()
