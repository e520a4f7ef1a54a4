"""`moespeq pack`: exit status, stdout and stderr together."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from moespeq_cli.pack.command import pack
from runtime.artifacts.pack import Pack
from runtime.errors import ArtifactError, InputError, MoespeqError
from tests.pack.fixtures import save_profile, save_quantized
from tests.tiny import save_tiny

app = typer.Typer()
app.command()(pack)


def call(*arguments: object) -> Result:
    """Run the command; an error meant for the user comes back in `exception`."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, MoespeqError | SystemExit), result.exception
    return result


@pytest.fixture
def artifacts(quantized: Path, tmp_path: Path) -> Path:
    """An artifacts folder in which quantize has been."""
    shutil.copytree(quantized, tmp_path / "artifacts" / "quantized")
    return tmp_path / "artifacts"


def test_prints_the_path_and_says_first_what_it_will_do(model: Path, artifacts: Path) -> None:
    result = call("--model", model, "--artifacts", artifacts)
    assert (result.exit_code, result.stdout) == (0, f"{artifacts / 'pack'}\n")
    lines = result.stderr.splitlines()
    assert lines[0] == "24 experts of 3 layers (qwen2_moe, BF16), striped by round-robin over 1 shard a side"
    assert re.match(r"target [\d.]+ [kM]B \(raw\), draft [\d.]+ [kM]B, dense [\d.]+ [kM]B in \d+ tensors", lines[1])
    assert lines[2] == f"to {artifacts / 'pack'}"
    again = call("--model", model, "--artifacts", artifacts)
    assert (again.exit_code, again.stdout) == (0, result.stdout)
    assert "is this pack already" in again.stderr


def test_a_pack_killed_after_its_manifest_is_tidied_by_the_next_command(model: Path, artifacts: Path) -> None:
    call("--model", model, "--artifacts", artifacts)
    (artifacts / "pack" / "progress.json").write_text('{"settings": {}, "done": {}}')
    assert call("--model", model, "--artifacts", artifacts).exit_code == 0
    assert not (artifacts / "pack" / "progress.json").exists()


def test_a_profile_that_turned_up_since_leaves_a_finished_pack(model: Path, artifacts: Path) -> None:
    """The embedded model's first run packs before anything is profiled; the four commands must work after it."""
    call("--model", model, "--artifacts", artifacts)
    spec = Pack.open(artifacts / "pack").spec
    shape = (len(spec.moe_layers), spec.num_experts, spec.num_experts)
    profile = save_profile(model, artifacts / "profile", torch.ones(shape, dtype=torch.int64))
    again = call("--model", model, "--artifacts", artifacts)
    assert (again.exit_code, again.stdout) == (0, f"{artifacts / 'pack'}\n")
    assert "striped without this profile (--force)" in again.stderr
    asked = call("--model", model, "--artifacts", artifacts, "--profile", profile)
    assert isinstance(asked.exception, ArtifactError) and "--force" in asked.exception.mend
    assert call("--model", model, "--artifacts", artifacts, "--force").exit_code == 0


def test_json_is_one_object(model: Path, artifacts: Path, tmp_path: Path) -> None:
    out = tmp_path / "elsewhere"
    result = call("--model", model, "--artifacts", artifacts, "--out", out, "--shards", 3, "--json")
    value = json.loads(result.stdout)
    assert (result.exit_code, value["path"], value["records"], value["shards"]) == (0, str(out), 24, 3)
    assert value["total_bytes"] == sum(entry.size_bytes for entry in Pack.open(out).manifest.files.values())


def report(folder: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return value


def test_report_counts_bits_and_bytes(model: Path, artifacts: Path) -> None:
    call("--model", model, "--artifacts", artifacts)
    value = report(artifacts / "pack")
    assert value["target_bits_per_weight"] == value["layers"]["2"]["target"]["gate_up"] == 16
    assert value["layers"]["0"]["draft"]["gate_up"] == 4 + (16 + 8) / 32
    assert value["layers"]["1"]["draft"]["down"] == 8 + (16 + 8) / 64
    assert value["total_bytes"] == sum(value["bytes_by_file"].values()) and value["seconds"] > 0
    for name, size in value["bytes_by_file"].items():
        assert (artifacts / "pack" / name).stat().st_size == size


def test_profile_is_found_and_decides_striping(model: Path, artifacts: Path) -> None:
    coactivation = torch.zeros(3, 8, 8, dtype=torch.int64)
    coactivation[:, ::2, ::2] = 5  # even experts fire together: going round would put them in one shard
    coactivation[:, 6, 6] = 9
    save_profile(model, artifacts / "profile", coactivation)
    result = call("--model", model, "--artifacts", artifacts, "--shards", 2)
    assert "striped by co-activation over 2 shards" in result.stderr
    opened = Pack.open(artifacts / "pack")
    shards = [opened.target_location((1, expert)).path.name for expert in range(8)]
    assert sorted(shards[::2]) == ["target-0000.safetensors"] * 2 + ["target-0001.safetensors"] * 2
    assert shards == [opened.draft_location((1, e)).path.name.replace("draft", "target") for e in range(8)]
    striping = report(artifacts / "pack")["striping"]
    assert (striping["pairs_in_one_shard"], striping["pairs_in_one_shard_round_robin"]) == (3 * 2 * 5, 3 * 6 * 5)
    first = min((opened.target_location((0, e)).offset_bytes, e) for e in range(0, 8) if shards[e] == shards[6])
    assert first[1] == 6  # the hottest comes first


def test_a_profile_that_was_stopped_is_left_out_and_named(model: Path, artifacts: Path) -> None:
    (artifacts / "profile").mkdir()
    result = call("--model", model, "--artifacts", artifacts)
    assert result.exit_code == 0
    assert result.stderr.splitlines()[0] == (
        f"{artifacts / 'profile'} is not finished: striping without it; repeat moespeq profile to use it"
    )


def test_verify_compares_with_sources_and_writes_nothing(model: Path, artifacts: Path) -> None:
    call("--model", model, "--artifacts", artifacts)
    before = {path: path.stat().st_mtime_ns for path in (artifacts / "pack").rglob("*")}
    result = call("--verify", "--model", model, "--artifacts", artifacts, "--json")
    value = json.loads(result.stdout)
    assert (result.exit_code, value["records"]) == (0, 48)
    assert value["records_equal_to_source"] == value["drafts_equal_to_quantized"] == 24
    assert value["dense_equal_to_source"] == len(Pack.open(artifacts / "pack").dense_names())
    assert "24 target records" in result.stderr
    assert before == {path: path.stat().st_mtime_ns for path in (artifacts / "pack").rglob("*")}


def test_verify_of_another_model_than_the_default_compares_checksums_only(model: Path, artifacts: Path) -> None:
    call("--model", model, "--artifacts", artifacts)
    result = call("--verify", "--artifacts", artifacts, "--json")
    assert result.exit_code == 0 and "checksums only" in result.stderr
    assert json.loads(result.stdout)["records_equal_to_source"] == 0


def test_verify_names_every_fault(model: Path, artifacts: Path) -> None:
    call("--model", model, "--artifacts", artifacts)
    for key in ((0, 1), (2, 6)):
        location = Pack.open(artifacts / "pack").target_location(key)
        with location.path.open("r+b") as file:
            file.seek(location.offset_bytes)
            byte = file.read(1)[0]
            file.seek(location.offset_bytes)
            file.write(bytes([byte ^ 1]))
    result = call("--verify", "--model", model, "--artifacts", artifacts)
    assert (result.exit_code, result.stdout) == (1, "")
    assert isinstance(result.exception, ArtifactError) and "3 faults" in str(result.exception)
    assert "layer 0, expert 1: sha256" in result.stderr and "layer 2, expert 6: sha256" in result.stderr


def test_sources_that_do_not_belong_together_are_refused(model: Path, artifacts: Path, tmp_path: Path) -> None:
    other = save_tiny("mixtral", tmp_path / "other")
    result = call("--model", other, "--artifacts", artifacts)
    assert result.exit_code == 1 and isinstance(result.exception, InputError)
    assert "a quantized artifact of this model" in str(result.exception)
    assert not (artifacts / "pack").exists()
    call("--model", model, "--artifacts", artifacts)
    result = call("--verify", "--model", other, "--artifacts", artifacts)
    assert isinstance(result.exception, InputError) and "a pack artifact of this model" in str(result.exception)
    shutil.rmtree(artifacts / "quantized")
    shutil.copytree(save_quantized(other, tmp_path / "q"), artifacts / "quantized")
    result = call("--model", other, "--artifacts", artifacts)
    assert isinstance(result.exception, ArtifactError) and "--force" in result.exception.mend
    assert call("--model", other, "--artifacts", artifacts, "--force").exit_code == 0
    assert Pack.open(artifacts / "pack").spec.model_type == "mixtral"


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_folder_of_something_else_is_left_alone(model: Path, artifacts: Path, tmp_path: Path, force: list[str]) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("years of work")
    for out, stranger in ((tmp_path / "home", "thesis.txt"), (artifacts / "quantized", "config.json")):
        result = call("--model", model, "--artifacts", artifacts, "--out", out, *force)
        assert isinstance(result.exception, MoespeqError)
        assert stranger in str(result.exception) or "kind 'pack'" in str(result.exception)
        assert (out / stranger).exists()


def test_missing_quantized_artifact_names_the_command_that_makes_it(model: Path, tmp_path: Path) -> None:
    result = call("--model", model, "--artifacts", tmp_path / "artifacts")
    assert isinstance(result.exception, ArtifactError) and "`moespeq quantize`" in result.exception.mend


@pytest.mark.parametrize("arguments", [["--shards", "0"], ["--shards", "many"], ["--unknown"]])
def test_wrong_command_line_exits_2(arguments: list[str]) -> None:
    assert call(*arguments).exit_code == 2


def test_command_imports_nothing_heavy() -> None:
    code = "import sys, moespeq_cli.pack.command; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
