"""A profile picks the sensitive layers by its documented rule, and the report says what they bought."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from moespeq_cli.profile.build import ProfileJob
from moespeq_cli.profile.build import build as build_profile
from moespeq_cli.profile.measure import TextSequence, measure
from moespeq_cli.quantize import build
from moespeq_cli.quantize.plan import QuantizeOptions
from moespeq_cli.quantize.sensitive import choose_layers
from runtime.artifacts.checkpoint import Checkpoint
from runtime.artifacts.profile import Profile
from runtime.artifacts.quantized import Quantized
from runtime.errors import ArtifactError, InputError
from runtime.model.families import describe
from runtime.model.stream import LayerStream
from tests.kills import STEPS, Killed, Moments
from tests.tiny import save_tiny

LAYERS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers with experts, of which the third's are the only large ones."""
    from safetensors.torch import load_file, save_file

    folder = save_tiny("qwen3_moe", tmp_path_factory.mktemp("model") / "m", num_hidden_layers=LAYERS, num_experts=4)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if ".mlp.experts." in name and ".layers.2." not in name:
            tensor *= 0.1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def profile_of(model: Path, folder: Path, tokens: int = 200) -> Profile:
    checkpoint = Checkpoint.open(model)
    generator = torch.Generator().manual_seed(3)
    sequences = [TextSequence("a", torch.randint(0, 250, (60,), generator=generator)) for _ in range(3)]
    job = ProfileJob(checkpoint, describe(checkpoint), sequences, "known", None, "float32", 0, tokens)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moespeq_cli.profile.pictures.available", lambda: False)
        return build_profile(job, folder)


@pytest.fixture(scope="module")
def profile(model: Path) -> Profile:
    return profile_of(model, model.parent / "profile")


def options(model: Path, out: Path, text: Path, **others: object) -> QuantizeOptions:
    settings = {"data": text, "seq_len": 48, "min_tokens": 4, "group_size": 32, "samples": 4} | others
    return QuantizeOptions(model=str(model), out=out, **settings)  # type: ignore[arg-type]


def test_picks_the_layers_with_the_largest_sum_rounded_up(profile: Profile) -> None:
    digest = profile.manifest.model_digest
    sensitivity = profile.sensitivity()
    sums = [
        sum(
            float(sensitivity.channels[f"layers.{n}.mlp.experts.{p}_proj"].double().sum())
            for p in ("gate", "up", "down")
        )
        for n in range(LAYERS)
    ]
    order = sorted(range(LAYERS), key=lambda n: -sums[n])
    assert order[0] == 2
    for share, count in ((0.0, 0), (0.1, 1), (0.25, 1), (0.26, 2), (0.5, 2), (1.0, 4)):
        choice = choose_layers(profile.folder, share, digest)
        assert choice.layers == tuple(sorted(order[:count])), share
        assert [layer for layer, _ in choice.ranking] == order
        assert [score for _, score in choice.ranking] == pytest.approx(sorted(sums, reverse=True))


def test_what_a_profile_picks_is_what_naming_the_layers_gives(
    model: Path, profile: Profile, text: Path, tmp_path: Path
) -> None:
    picked = build.quantize(options(model, tmp_path / "picked", text, profile=profile.folder, sensitive_share=0.5))
    layers = tuple(int(n) for n in picked.settings["--sensitive-layers"].split(","))
    assert len(layers) == 2 and 2 in layers
    named = build.quantize(options(model, tmp_path / "named", text, sensitive_layers=layers))
    assert picked.settings == named.settings
    shards = [name for name in picked.files if name.endswith(".safetensors")]
    assert [picked.files[name] for name in shards] == [named.files[name] for name in shards]
    for layer_id in range(LAYERS):
        form = picked.layers[str(layer_id)]
        assert (form.bits, form.group_size) == ((8, -1) if layer_id in layers else (4, 32))
    reports = [json.loads((tmp_path / name / "report.json").read_text())["sensitive"] for name in ("picked", "named")]
    assert reports[0]["chosen_by"]["share"] == 0.5 and reports[1]["chosen_by"] is None
    assert {**reports[0], "chosen_by": None} == reports[1]


def test_report_holds_what_separate_runs_give(model: Path, profile: Profile, text: Path, tmp_path: Path) -> None:
    """Bytes, output errors and acceptance of both drafts, against two whole runs and the profile's own comparison."""
    build.quantize(options(model, tmp_path / "with", text, profile=profile.folder))
    build.quantize(options(model, tmp_path / "without", text))
    report = json.loads((tmp_path / "with" / "report.json").read_text())["sensitive"]
    (row,) = report["layers"]
    folders = {"chosen": Quantized.open(tmp_path / "with"), "plain": Quantized.open(tmp_path / "without")}
    layers = {
        name: json.loads((q.folder / "report.json").read_text())["layers"][row["layer"]] for name, q in folders.items()
    }
    assert row["output_error"] == pytest.approx(layers["chosen"]["mean_output_error"])
    assert row["output_error_plain"] == pytest.approx(layers["plain"]["mean_output_error"])
    assert row["layer"] == 2 and row["output_error"] < row["output_error_plain"] / 2
    for name, key in (("chosen", "bytes"), ("plain", "bytes_plain")):
        tensors = folders[name].checkpoint.tensors
        assert report[key] == sum(info.end - info.start for n, info in tensors.items() if ".experts." in n)
    assert report["bytes"] > report["bytes_plain"]
    checkpoint = Checkpoint.open(model)
    ids = build.prepare(options(model, tmp_path / "new", text)).sequences.ids
    for name, quantized in folders.items():
        stream = LayerStream(checkpoint, describe(checkpoint))
        figures = measure(stream, [TextSequence("a", tokens) for tokens in ids], quantized).draft
        assert figures is not None and report["acceptance"]["tokens"] == figures.compared_tokens["a"]
        assert report["acceptance"][name]["overlap"] == pytest.approx(figures.overlap["a"], abs=1e-5)
        assert report["acceptance"][name]["greedy"] == pytest.approx(figures.greedy["a"], abs=0.011)
    assert report["acceptance"]["chosen"]["overlap"] > report["acceptance"]["plain"]["overlap"]


def test_killed_at_any_moment_it_ends_in_the_same_bytes(
    model: Path, profile: Profile, text: Path, tmp_path: Path
) -> None:
    """H11, with the states of both drafts beside the calibration's, and dense layers behind the last experts."""
    chosen = {"profile": profile.folder, "sensitive_share": 0.5}
    build.quantize(options(model, tmp_path / "whole", text, **chosen))
    wanted = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    moments = Moments(STEPS)
    with moments.kill(10**9) as called:
        build.quantize(options(model, tmp_path / "counted", text, **chosen))
    for number in range(4, len(called), len(called) // 4):
        out = tmp_path / f"killed-{number}"
        with pytest.raises(Killed), moments.kill(number):
            build.quantize(options(model, out, text, **chosen))
        build.quantize(options(model, out, text, **chosen))
        assert {p.name: p.read_bytes() for p in out.iterdir() if p.name != ".lock"} == wanted, called[number - 1]


def test_dense_layers_behind_the_experts_count(text: Path, tmp_path: Path) -> None:
    """H08: the comparison goes on to the head; the quantised layers end before."""
    folder = save_tiny("qwen2_moe", tmp_path / "m", num_hidden_layers=3, mlp_only_layers=[2])
    build.quantize(options(folder, tmp_path / "q", text, sensitive_layers=(0, 1)))
    report = json.loads((tmp_path / "q" / "report.json").read_text())["sensitive"]
    checkpoint = Checkpoint.open(folder)
    ids = build.prepare(options(folder, tmp_path / "new", text)).sequences.ids
    stream = LayerStream(checkpoint, describe(checkpoint))
    figures = measure(stream, [TextSequence("a", t) for t in ids], Quantized.open(tmp_path / "q")).draft
    assert figures is not None
    assert report["acceptance"]["chosen"]["overlap"] == pytest.approx(figures.overlap["a"], abs=1e-5)


def test_profiles_and_shares_that_cannot_be_used_are_refused(
    model: Path, profile: Profile, text: Path, tmp_path: Path
) -> None:
    def refused(error: type[Exception], words: str, **others: object) -> None:
        with pytest.raises(error, match=words):
            build.prepare(options(model, tmp_path / "out", text, **others))
        assert not (tmp_path / "out").exists()

    refused(InputError, "both", profile=profile.folder, sensitive_layers=(1,))
    refused(InputError, "--profile", sensitive_share=0.2)
    refused(InputError, "--sensitive-share from 0 to 1", profile=profile.folder, sensitive_share=1.5)
    refused(ArtifactError, "no such folder", profile=tmp_path / "nowhere")
    bare = profile_of(model, tmp_path / "bare", tokens=0)
    refused(ArtifactError, "with sensitivity", profile=bare.folder)
    other = save_tiny("qwen3_moe", tmp_path / "other", seed=5, num_hidden_layers=LAYERS, num_experts=4)
    refused(InputError, "another model", profile=profile_of(other, tmp_path / "foreign").folder)


def test_a_share_of_nothing_is_no_comparison(model: Path, profile: Profile, text: Path, tmp_path: Path) -> None:
    made = build.quantize(options(model, tmp_path / "q", text, profile=profile.folder, sensitive_share=0.0))
    plain = build.quantize(options(model, tmp_path / "plain", text))
    assert made.settings == plain.settings and made.files == plain.files
    assert "sensitive" not in json.loads((tmp_path / "q" / "report.json").read_text())
