"""`moespeq quantize` as a user types it: status, stdout and stderr; options that are refused; a damaged folder."""

from __future__ import annotations

import dataclasses
import inspect
import json
import shutil
from pathlib import Path

import pytest
import typer
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from moespeq_cli.quantize.command import quantize as command
from moespeq_cli.quantize.plan import ALWAYS_SKIPPED, QuantizeOptions
from moespeq_cli.quantize.solver import auto_gptq_available
from runtime.artifacts.quantized import KeptLinear, Quantized, QuantizedLinear
from runtime.errors import ArtifactError, InputError, MoespeqError, StorageError
from tests.quantize.conftest import Quantize

app = typer.Typer()
app.command()(command)


def invoke(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def base(model: Path, text: Path, tmp_path: Path) -> list[object]:
    return ["--model", model, "--data", text, "--seq-len", 48, "--out", tmp_path / "out", "--min-tokens", 4]


def test_prints_the_folder_and_says_first_what_it_will_do(base: list[object], tmp_path: Path) -> None:
    result = invoke(*base)
    assert result.exit_code == 0 and result.stdout == f"{tmp_path / 'out'}\n"
    assert "2 layers x 8 experts x 3 projections = 48 linears" in result.stderr
    assert "layer 1: output error" in result.stderr
    assert Quantized.open(tmp_path / "out", verify=True).manifest.quantized_linears == 48


def test_json_is_one_object(base: list[object], tmp_path: Path) -> None:
    result = invoke(*base, "--json", "--method", "rtn")
    body = json.loads(result.stdout)
    assert body["path"] == str(tmp_path / "out") and body["quantized_linears"] == body["rounded_linears"] == 48
    assert body["mean_output_error"] > 0


def test_gptq_has_less_output_error_than_rounding(run: Quantize, model: Path) -> None:
    gptq, rounded = run(model), run(model, method="rtn")
    assert gptq.manifest.mean_output_error < 0.95 * rounded.manifest.mean_output_error
    assert rounded.manifest.method == "rtn" and rounded.manifest.rounded_linears == 48


def test_artifacts_folder_is_the_default_place(base: list[object], tmp_path: Path) -> None:
    arguments = [argument for argument in base if argument not in ("--out", tmp_path / "out")]
    result = invoke(*arguments, "--artifacts", tmp_path / "made")
    assert result.stdout.strip() == str(tmp_path / "made" / "quantized")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--no-sym"], "--no-sym"),
        (["--bits", 3], "--bits of 4 or 8"),
        (["--group-size", 0], "group size"),
        (["--damp-percent", 0], "--damp-percent"),
        (["--solver", "exact"], "batched or auto-gptq"),
        (["--method", "awq"], "gptq or rtn"),
        (["--skip-modules", "gate,layernorm,shared_expert"], "attention left out"),
        (["--skip-modules", "gate,attention,layernorm,shared_expert,up_proj"], "gate_proj and up_proj both"),
        (["--skip-modules", "gate,attention,layernorm,shared_expert,mlp"], "'mlp'"),
        (["--skip-modules", "gate,attention,layernorm,shared_expert,layers.7"], r"'layers\.7'"),
        (["--skip-modules", "gate,attention,layernorm,shared_expert,layers.0,layers.1"], "at least one linear"),
        (["--sensitive-layers", "0,9"], "found 9"),
        (["--sensitive-layers", "first"], "'first'"),
        (["--seq-len", 129], "at most 128"),
        (["--device", "abacus"], "--device abacus"),
        (["--solver", "auto-gptq", "--scale-search"], "--scale-search"),
        (["--model", "/nonexistent/model"], "no such folder"),
    ],
)
def test_options_that_cannot_be_are_refused_before_anything_is_written(
    arguments: list[object], message: str, base: list[object], tmp_path: Path
) -> None:
    result = invoke(*base, *arguments)
    assert isinstance(result.exception, MoespeqError)
    with pytest.raises(MoespeqError, match=message):
        raise result.exception
    assert not (tmp_path / "out").exists()


def test_skipped_modules_stay_as_they_are_and_gate_means_the_router(run: Quantize, model: Path) -> None:
    skip = ("gate", "attention", "layernorm", "shared_expert")
    quantized = run(model, skip_modules=(*skip, "down_proj", "layers.0"))
    kinds = {(n, p): type(quantized.linear(n, 2, p)) for n in (0, 1) for p in ("gate_proj", "up_proj", "down_proj")}
    assert {key for key, kind in kinds.items() if kind is QuantizedLinear} == {(1, "gate_proj"), (1, "up_proj")}
    assert quantized.manifest.kept_linears == 32 and kinds[0, "gate_proj"] is KeptLinear


@pytest.mark.skipif(not auto_gptq_available(), reason="auto-gptq is not installed")
@pytest.mark.auto_gptq
def test_both_solvers_make_the_same_shards(run: Quantize, model: Path) -> None:
    ours = run(model, scale_search=False, token_damping=False)
    theirs = run(model, solver="auto-gptq")
    shards = [name for name in ours.manifest.files if name.endswith(".safetensors")]
    for name in shards:
        mine, other = load_file(ours.folder / name), load_file(theirs.folder / name)
        assert mine.keys() == other.keys()
        differing = sum(int((mine[key] != other[key]).sum()) for key in mine)
        assert differing <= 0.01 * sum(tensor.numel() for tensor in mine.values())
    assert ours.manifest.mean_output_error == pytest.approx(theirs.manifest.mean_output_error, rel=0.01)


def test_the_command_and_the_stage_have_the_same_defaults() -> None:
    parameters = inspect.signature(command).parameters
    shared = {field.name: field.default for field in dataclasses.fields(QuantizeOptions) if field.name in parameters}
    shared["skip_modules"] = ",".join(ALWAYS_SKIPPED)
    assert len(shared) > 10
    for name, default in shared.items():
        if name not in ("model", "out", "sensitive_layers"):
            assert parameters[name].default == default, name


def test_a_folder_with_other_files_is_left_alone_even_by_force(base: list[object], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    result = invoke(*base, "--force")
    assert isinstance(result.exception, ArtifactError) and "thesis.txt" in str(result.exception)
    assert (tmp_path / "out" / "thesis.txt").read_text() == "years of work"


def test_the_model_itself_is_never_the_output(model: Path, base: list[object]) -> None:
    result = invoke(*base, "--out", model, "--force")
    assert isinstance(result.exception, InputError) and (model / "config.json").is_file()


def test_a_quantised_model_is_not_quantised_again(run: Quantize, model: Path, tmp_path: Path) -> None:
    quantized = run(model)
    with pytest.raises(InputError, match="quantization_config"):
        run(quantized.folder)


def test_a_full_disk_is_refused_beforehand(base: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    result = invoke(*base)
    assert isinstance(result.exception, StorageError) and "free" in str(result.exception)
    assert not (tmp_path / "out").exists()


def test_damage_is_found_on_opening(run: Quantize, model: Path) -> None:
    quantized = run(model)
    shard = sorted(quantized.folder.glob("model-*.safetensors"))[-1]
    whole = shard.read_bytes()

    shard.write_bytes(whole[:-1000])
    with pytest.raises(ArtifactError, match=rf"{shard.name} of {len(whole)} bytes; found {len(whole) - 1000} bytes"):
        Quantized.open(quantized.folder)

    flipped = bytearray(whole)
    flipped[-5] ^= 16
    shard.write_bytes(flipped)
    Quantized.open(quantized.folder)
    with pytest.raises(ArtifactError, match="sha256"):
        Quantized.open(quantized.folder, verify=True)

    tensors = load_file(shard)
    tensors["model.layers.1.mlp.experts.0.odd_proj.qweight"] = tensors.pop(
        "model.layers.1.mlp.experts.0.up_proj.qweight"
    )
    shard.unlink()
    with pytest.raises(ArtifactError, match="no such file"):
        Quantized.open(quantized.folder)


def test_missing_and_unexpected_experts_are_named(run: Quantize, model: Path) -> None:
    quantized = run(model)
    shard = sorted(quantized.folder.glob("model-*.safetensors"))[-1]
    index = quantized.folder / "model.safetensors.index.json"
    manifest = quantized.folder / "manifest.json"
    name = "model.layers.1.mlp.experts.3.up_proj"
    tensors = load_file(shard)
    tensors[f"{name}.weight"] = tensors.pop(f"{name}.qweight")
    save_file(tensors, shard, metadata={"format": "pt"})
    index.write_text(index.read_text().replace(f"{name}.qweight", f"{name}.weight"))
    body = json.loads(manifest.read_text())
    for path in (shard, index):
        body["files"][path.name]["size_bytes"] = path.stat().st_size
    manifest.write_text(json.dumps(body))
    with pytest.raises(ArtifactError, match=rf"1 missing: {name}\.qweight"):
        Quantized.open(quantized.folder)


def test_linears_that_are_not_there_are_refused(run: Quantize, model: Path) -> None:
    quantized = run(model)
    for layer_id, expert_id, projection in ((2, 0, "up_proj"), (0, 8, "up_proj"), (0, 0, "gate"), (0, -1, "up_proj")):
        with pytest.raises(ArtifactError, match="asked for"):
            quantized.linear(layer_id, expert_id, projection)
