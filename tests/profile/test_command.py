"""`moespeq profile`: exit status, stdout and stderr together."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from moespeq_cli.profile.command import profile
from runtime.artifacts.profile import Profile
from runtime.errors import ArtifactError, InputError, MoespeqError
from tests.tiny import save_tiny

app = typer.Typer()
app.command()(profile)


def call(*arguments: object) -> Result:
    """Run the command; an error meant for the user comes back in `exception`."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, MoespeqError | SystemExit), result.exception
    return result


@pytest.fixture(autouse=True)
def _no_png_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing them takes longer than all the rest; test_report looks at them."""
    monkeypatch.setattr("moespeq_cli.profile.pictures.available", lambda: False)


@pytest.fixture
def base(model: Path, tmp_path: Path) -> list[object]:
    """A tiny model, an artifacts folder of its own, and two texts."""
    (tmp_path / "tale.txt").write_text("Once upon a time there was a router. " * 8, encoding="utf-8")
    lines = [{"text": "x = 1\n" * 12}, {"text": "print(x)\n" * 9, "domain": "shell"}]
    (tmp_path / "mixed.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    shared = [
        "--device",
        "cpu",
        "--model",
        model,
        "--artifacts",
        tmp_path / "artifacts",
        "--samples",
        6,
        "--seq-len",
        48,
    ]
    return [*shared, "--data", f"prose={tmp_path / 'tale.txt'}", "--data", tmp_path / "mixed.jsonl"]


def test_says_first_what_it_will_do_and_prints_the_path(base: list[object], tmp_path: Path) -> None:
    result = call(*base)
    assert (result.exit_code, result.stdout) == (0, f"{tmp_path / 'artifacts' / 'profile'}\n")
    lines = [line for line in result.stderr.splitlines() if not line.startswith("[transformers]")]
    assert lines[0].startswith("profiling qwen2_moe, 3 layers with 8 experts, on 249 tokens in 6 sequences (")
    assert lines[0].endswith("(prose 96, mixed 72, shell 81; prose=tale.txt, mixed.jsonl)")
    assert "no draft" in lines[1] and "float32 arithmetic" in lines[1]
    assert "agreement" not in result.stderr
    assert Profile.open(tmp_path / "artifacts" / "profile").manifest.domain_names == ("mixed", "prose", "shell")


def test_an_equal_profile_is_left_and_another_one_refused(base: list[object], tmp_path: Path) -> None:
    first = call(*base, "--json")
    manifest = tmp_path / "artifacts" / "profile" / "manifest.json"
    written = manifest.stat().st_mtime_ns
    again = call(*base, "--json")
    assert again.exit_code == 0 and json.loads(again.stdout) == json.loads(first.stdout)
    assert "holds this profile already" in again.stderr and manifest.stat().st_mtime_ns == written
    body = json.loads(manifest.read_text())
    assert body["settings"].pop("device") == "cpu"  # older ones do not name it
    manifest.write_text(json.dumps(body))
    written = manifest.stat().st_mtime_ns
    assert "holds this profile already" in call(*base).stderr
    other = call(*base, "--trace-tokens", 7)
    assert isinstance(other.exception, ArtifactError) and "trace_tokens" in str(other.exception)
    assert "--force" in other.exception.mend and manifest.stat().st_mtime_ns == written
    shorter = call(*base, "--seq-len", 24)
    assert isinstance(shorter.exception, ArtifactError) and "--data, --samples or --seq-len" in str(shorter.exception)
    assert manifest.stat().st_mtime_ns == written
    assert call(*base, "--trace-tokens", 7, "--force").exit_code == 0
    assert Profile.open(manifest.parent).manifest.trace_tokens == 7


def test_a_device_that_is_not_there_is_named(base: list[object], tmp_path: Path) -> None:
    refused = call(*base, "--device", "abacus")
    assert isinstance(refused.exception, InputError) and "--device abacus" in str(refused.exception)
    assert "--device cpu" in refused.exception.mend and not (tmp_path / "artifacts").exists()


def test_finds_the_draft_beside_it(base: list[object], quantized: Path, tmp_path: Path) -> None:
    shutil.copytree(quantized, tmp_path / "artifacts" / "quantized")
    result = call(*base, "--json", "--dtype", "model")
    value = json.loads(result.stdout)
    assert set(value["routing_agreement"]) == {"mixed", "prose", "shell"}
    assert all(0.2 < share <= 1 for share in value["routing_agreement"].values())
    assert "routing agreement" in result.stderr and "bfloat16 arithmetic" in result.stderr
    scores = value["sensitivity_by_layer"]
    order = sorted(scores, key=lambda layer: -scores[layer])
    assert len(scores) == 3 and f"rounding their experts hurts: {', '.join(order)}\n" in result.stderr
    bare = ["--quantized", "none", "--sensitivity-tokens", 0, "--out", tmp_path / "bare"]
    without = call(*base, *bare, "--json")
    assert json.loads(without.stdout)["routing_agreement"] is None
    assert json.loads(without.stdout)["sensitivity_by_layer"] is None and "hurts" not in without.stderr


def test_a_draft_of_another_model_is_passed_over_or_refused(
    base: list[object], quantized: Path, tmp_path: Path
) -> None:
    other = save_tiny("qwen2_moe", tmp_path / "other", seed=9, num_hidden_layers=3)
    base[3] = other
    shutil.copytree(quantized, tmp_path / "artifacts" / "quantized")
    result = call(*base)
    assert result.exit_code == 0 and "is of another model" in result.stderr
    refused = call(*base, "--quantized", quantized, "--out", tmp_path / "new")
    assert isinstance(refused.exception, InputError) and "another model" in str(refused.exception)
    assert not (tmp_path / "new").exists()
    missing = call(*base, "--quantized", tmp_path / "nowhere", "--out", tmp_path / "new")
    assert isinstance(missing.exception, ArtifactError) and "no such folder" in str(missing.exception)


def test_an_unfinished_draft_beside_it_is_not_used(base: list[object], quantized: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(quantized, tmp_path / "artifacts" / "quantized"))
    (folder / "manifest.json").unlink()
    assert "no draft" in call(*base).stderr


def test_wrong_texts_are_named_before_any_work(base: list[object], tmp_path: Path) -> None:
    cases = {
        f"prose={tmp_path / 'absent.txt'}": "absent.txt",
        f"={tmp_path / 'tale.txt'}": "NAME=FILE",
        "prose=": "NAME=FILE",
    }
    for value, words in cases.items():
        result = call(*base, "--data", value)
        assert isinstance(result.exception, InputError) and words in str(result.exception)
    few = call(*base, "--samples", 2)
    assert isinstance(few.exception, InputError) and "3 domains" in str(few.exception)
    long = call(*base, "--seq-len", 129)
    assert isinstance(long.exception, InputError) and "128" in str(long.exception)
    assert not (tmp_path / "artifacts" / "profile").exists()
    assert call(*base, "--samples", 0).exit_code == call(*base, "--samples", 100_001).exit_code == 2
    assert call(*base, "--dtype", "int3").exit_code == 2


def test_a_file_whose_name_holds_an_equals_sign(base: list[object], tmp_path: Path) -> None:
    (tmp_path / "a=b.txt").write_text("some words " * 9, encoding="utf-8")
    result = call(*base[:-4], "--data", tmp_path / "a=b.txt", "--json")
    assert set(json.loads(result.stdout)["domains"]) == {"a=b"}


def test_another_artifact_is_not_overwritten(base: list[object], quantized: Path, tmp_path: Path) -> None:
    place = Path(shutil.copytree(quantized, tmp_path / "occupied"))
    before = (place / "manifest.json").read_bytes()
    result = call(*base, "--out", place)
    assert isinstance(result.exception, ArtifactError) and "another --out" in result.exception.mend
    assert (place / "manifest.json").read_bytes() == before


def test_held_out_takes_the_embedded_evaluation_texts(base: list[object]) -> None:
    options = [*base[:-4], "--data", "held-out", "--samples", 12, "--seq-len", 64, "--json"]
    made = json.loads(call(*options).stdout)
    assert made["sequences"] == {"code": 4, "maths": 4, "prose": 4}


def test_problems_are_for_the_embedded_model_and_go_with_a_probe(base: list[object], tmp_path: Path) -> None:
    other = call(*base, "--probe-tokens", 50, "--probe-problems", 3)
    assert isinstance(other.exception, InputError) and "embedded model" in str(other.exception)
    alone = call("--artifacts", tmp_path / "artifacts", "--probe-problems", 3)
    assert isinstance(alone.exception, InputError) and "--probe-tokens" in str(alone.exception)
    assert not (tmp_path / "artifacts" / "profile").exists()
