"""Built checkpoints: the library loads them, their routing is like a trained model's, the stages run on them."""

from __future__ import annotations

import errno
import gc
import json
import math
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from moespeq_cli.app import app, main
from moespeq_cli.bench.synthetic import folder, models
from moespeq_cli.bench.synthetic import tensors as drawing
from moespeq_cli.bench.synthetic.architecture import Architecture
from moespeq_cli.bench.synthetic.figures import RoutingFigures, measure_routing, rounded
from moespeq_cli.bench.synthetic.models import MODELS, SPECIAL_IDS, TEXT_IDS, make_config
from moespeq_cli.bench.synthetic.scales import LAGS, local_weights, overlap_curve, rotary_frequencies
from moespeq_cli.bench.synthetic.tensors import build_tensors
from moespeq_cli.demo import checkpoint_path
from runtime.artifacts.checkpoint import Checkpoint
from runtime.errors import InputError, MoespeqError, StorageError

torch.set_num_threads(1)

# Experts, top k, heads to a key head, shared experts and dense layers as in the real model; widths that are quick.
NARROW: dict[str, dict[str, Any]] = {
    "qwen1.5-moe": {
        "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128, "num_attention_heads": 4,
        "shared_expert_intermediate_size": 512, "num_key_value_heads": 4, "vocab_size": 4224,
    },
    "deepseek-v2-lite": {
        "hidden_size": 256, "intermediate_size": 1024, "moe_intermediate_size": 128, "num_attention_heads": 4,
        "num_key_value_heads": 4, "kv_lora_rank": 64, "qk_nope_head_dim": 64, "v_head_dim": 64, "vocab_size": 4224,
    },
    "phi-3.5-moe": {
        "hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 1,
        "vocab_size": 4224,
    },
    "mixtral-8x7b": {
        "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 1,
        "vocab_size": 4224,
    },
}  # fmt: skip
# As published: parameters of the whole model.
PARAMETERS = {
    "qwen1.5-moe": 14_315_784_192,
    "deepseek-v2-lite": 15_706_484_224,
    "phi-3.5-moe": 41_873_153_344,
    "mixtral-8x7b": 46_702_792_704,
}
GEOMETRIES = tuple(MODELS)
# Figures of two layers with experts; the first one's routing is always alike, because no expert comes before it.
LAYERS = {name: 3 if name == "deepseek-v2-lite" else 2 for name in GEOMETRIES}


def narrow(geometry: str, num_layers: int | None = None) -> Any:
    return make_config(geometry, num_layers or LAYERS[geometry], **NARROW[geometry])


def test_weights_are_drawn_in_float32_and_reach_as_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Older torch ends BF16 draws on a CPU at 3.3 deviations, and a group's largest weight decides its scale."""
    drawn = torch.Tensor.normal_

    def refuse_bf16(values: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        assert values.dtype == torch.float32
        return drawn(values, *arguments, **options)

    monkeypatch.setattr(torch.Tensor, "normal_", refuse_bf16)
    config = make_config("qwen1.5-moe", num_hidden_layers=1, **NARROW["qwen1.5-moe"])
    whole = dict(build_tensors(config))
    monkeypatch.setattr(drawing, "DRAWN", 8208)  # several parts a tensor, the last one shorter
    parts = dict(build_tensors(config))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    experts = torch.stack([value for name, value in whole.items() if ".experts." in name and "gate_proj" in name])
    values = experts[..., 2:].double()  # all but the anchors
    assert 4.5 < float(values.abs().max() / values.std()) < 6.5
    assert float((values**4).mean() / values.var() ** 2) == pytest.approx(3, abs=0.05)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A narrow model of every geometry."""
    place = tmp_path_factory.mktemp("built")
    for geometry in GEOMETRIES:
        folder.write_model(narrow(geometry), place / geometry, seed=1, shard_bytes=8 << 20)
    return {geometry: place / geometry for geometry in GEOMETRIES}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command builds narrow models."""
    monkeypatch.setattr(models, "MODELS", {name: MODELS[name] | NARROW[name] for name in GEOMETRIES})


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def make_model(*arguments: object) -> Any:
    return invoke("bench", "make-model", *arguments)


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_whole_model_has_the_published_number_of_parameters(geometry: str) -> None:
    tensors = Architecture.of(make_config(geometry)).tensors()
    assert sum(math.prod(spec.shape) for spec in tensors) == PARAMETERS[geometry]


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_true_widths_are_those_of_the_librarys_model(geometry: str) -> None:
    config = make_config(geometry, LAYERS[geometry])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    ours = Architecture.of(config)
    theirs = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    same_name = {spec.name: spec.shape for spec in ours.tensors() if spec.name in theirs}
    assert same_name == {name: shape for name, shape in theirs.items() if name in same_name} and len(same_name) > 10
    assert sum(math.prod(spec.shape) for spec in ours.tensors()) == sum(p.numel() for p in model.parameters())
    assert type(config).__name__ == type(model.config).__name__ and config.architectures == [type(model).__name__]


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_loads_in_transformers_with_no_tensor_missing_or_left_over(built: dict[str, Path], geometry: str) -> None:
    model, report = AutoModelForCausalLM.from_pretrained(
        built[geometry], dtype=torch.bfloat16, output_loading_info=True
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    config = json.loads((built[geometry] / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and config["architectures"] == [type(model).__name__]
    with torch.no_grad():
        logits = model(torch.randint(3, TEXT_IDS, (1, 24))).logits[0].float()
    assert torch.isfinite(logits).all() and logits.std() > 1
    assert (logits[:, 3:TEXT_IDS].amax(-1) > logits[:, TEXT_IDS:].amax(-1) + 10).all()  # no text, never said
    assert (logits[:, 3:TEXT_IDS].amax(-1) > logits[:, list(SPECIAL_IDS)].amax(-1) + 10).all()


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_routing_is_like_a_trained_models(built: dict[str, Path], geometry: str) -> None:
    figures = measure_routing(Checkpoint.open(built[geometry]), 512)
    assert figures.tokens >= 400
    assert figures.entropy >= 0.95 and figures.entropy_lowest >= 0.95
    assert 0.20 <= figures.neighbours <= 0.30
    first, *later = figures.experts_alike_by_layer
    assert first == 1 and 0.90 <= later[-1] < 0.98 and 0.94 <= figures.experts_alike <= 0.98
    assert 0.90 <= figures.greedy_alike < 1


def test_measures_with_the_experts_of_one_layer_in_memory(tmp_path: Path) -> None:
    config = narrow("mixtral-8x7b", 4)
    folder.write_model(config, tmp_path / "model")
    expert, live = config.intermediate_size * config.hidden_size, []

    def count() -> None:
        gc.collect()
        tensors = [thing for thing in gc.get_objects() if type(thing) is torch.Tensor and thing.ndim in (2, 3)]
        live.append(sum(tensor.numel() for tensor in tensors if tensor.numel() % expert == 0 and tensor.numel()))

    measure_routing(Checkpoint.open(tmp_path / "model"), 64, advance=count)
    assert len(live) == 5 and max(live[1:4]) <= live[0] and live[0] >= 3 * 8 * expert


def test_weights_without_the_rule_miss_the_goals(built: dict[str, Path], tmp_path: Path) -> None:
    config = narrow("qwen1.5-moe", 4)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "plain")
    for name in folder.TOKENIZER:
        shutil.copyfile(built["qwen1.5-moe"] / name, tmp_path / "plain" / name)
    figures = measure_routing(Checkpoint.open(tmp_path / "plain"), 256)
    assert figures.entropy < 0.95 and figures.neighbours > 0.5


def test_equal_seeds_give_equal_tensors_whichever_are_kept() -> None:
    config = narrow("deepseek-v2-lite", 2)
    first = dict(build_tensors(config, seed=5))
    second = {name: tensor for name, tensor in build_tensors(config, seed=5) if "experts.7." in name}
    other = dict(build_tensors(config, seed=6))
    assert set(first) == {spec.name for spec in Architecture.of(config).tensors()} and second
    assert all(torch.equal(first[name], tensor) for name, tensor in second.items())
    random = [name for name, tensor in first.items() if tensor.unique().numel() > 2]
    assert len(random) > 200 and not any(torch.equal(first[name], other[name]) for name in random)
    assert all(tensor.dtype == torch.bfloat16 for tensor in first.values())


def test_written_tensors_are_those_of_the_function(built: dict[str, Path]) -> None:
    checkpoint = Checkpoint.open(built["mixtral-8x7b"])
    made = dict(build_tensors(narrow("mixtral-8x7b"), seed=1))
    assert set(made) == set(checkpoint.tensors)
    assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in made.items())
    assert len({info.file for info in checkpoint.tensors.values()}) > 1


def test_following_ids_form_one_cycle_through_all_texts() -> None:
    from moespeq_cli.bench.synthetic.tensors import TensorMaker

    before = TensorMaker(Architecture.of(narrow("mixtral-8x7b")), 0, torch.device("cpu"))._predecessors().tolist()
    place, seen = 3, set()
    while place not in seen:
        seen.add(place)
        place = before[place]
    assert place == 3 and seen == set(range(3, TEXT_IDS))
    assert {i for i, value in enumerate(before) if value < 0} == {*SPECIAL_IDS, *range(TEXT_IDS, 4224)}


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_attention_of_the_true_widths_stays_with_the_last_tokens(geometry: str) -> None:
    weights = local_weights(rotary_frequencies(Architecture.of(make_config(geometry))))
    assert len(weights) == LAGS and 3 < 1 / float(weights.square().sum()) < 12
    assert float(weights[32:].sum()) < 0.01


def test_overlap_goes_from_chance_to_all() -> None:
    curve = overlap_curve(60, 4)
    assert float(curve[0]) == pytest.approx(4 / 60, abs=0.01) and float(curve[-1]) == pytest.approx(1)
    assert (curve.diff() > -1e-9).all()


def test_rounding_is_to_the_nearest_of_sixteen_codes_in_groups_of_128() -> None:
    weight = torch.randn(8, 256, generator=torch.Generator().manual_seed(0))
    result = rounded(weight)
    error = (result - weight).view(8, 2, 128)
    step = 2 * weight.view(8, 2, 128).abs().amax(-1, keepdim=True) / 15
    assert (error.abs() <= 0.505 * step).all()  # scales have eight bits, and are rounded up
    assert all(len(group.unique()) <= 16 for group in result.view(16, 128))
    assert 0.08 < float(error.norm() / weight.norm()) < 0.13


def test_tokenizer_is_the_embedded_one(built: dict[str, Path]) -> None:
    body = json.loads((checkpoint_path() / "tokenizer.json").read_text(encoding="utf-8"))
    assert len(body["model"]["vocab"]) == TEXT_IDS
    settings = json.loads((built["qwen1.5-moe"] / "tokenizer_config.json").read_text())
    assert settings["model_max_length"] == 32768


def test_stages_run_on_a_built_model(built: dict[str, Path], tmp_path: Path) -> None:
    model, artifacts = ["--model", built["qwen1.5-moe"]], ["--artifacts", tmp_path]
    quantized = invoke("quantize", *model, *artifacts, "--method", "rtn", "--samples", 2, "--seq-len", 64)
    assert quantized.exit_code == 0, quantized.stderr
    packed = invoke("pack", *model, *artifacts)
    assert packed.exit_code == 0, packed.stderr
    said = invoke("run", *artifacts, "--prompt", "The ferry", "--max-new-tokens", 12, "--expert-cache", "25%", "--json")
    assert said.exit_code == 0, said.stderr
    answer = json.loads(said.stdout)
    assert answer["new_tokens"] == 12 and answer["finish_reason"] == "length"
    assert all(max(SPECIAL_IDS) < i < TEXT_IDS for i in answer["token_ids"]) and answer["text"]


def test_command_says_the_disk_need_then_the_three_figures(quick: None, tmp_path: Path) -> None:
    out = tmp_path / "model"
    result = make_model("--geometry", "mixtral-8x7b", "--layers", 2, "--tokens", 64, "--out", out)
    assert result.exit_code == 0 and result.stdout == f"{out}\n"
    assert "mixtral-8x7b, 2 layers: " in result.stderr and " MB in 1 file to " in result.stderr
    for words in ("tokens of the embedded calibration texts", "of its maximum", "neighbouring tokens", "next tokens"):
        assert words in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_json_is_one_object_and_stays_with_the_model(quick: None, tmp_path: Path) -> None:
    out = tmp_path / "model"
    result = make_model("--geometry", "phi-3.5-moe", "--layers", 1, "--seed", 3, "--tokens", 64, "--out", out, "--json")
    body = json.loads(result.stdout)
    assert body.pop("path") == str(out) and body == json.loads((out / "routing.json").read_text())
    assert (body["geometry"], body["layers"], body["seed"]) == ("phi-3.5-moe", 1, 3)
    assert set(body["routing"]) == set(RoutingFigures.__dataclass_fields__)


def test_refuses_a_place_that_is_taken(quick: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(SystemExit) as caught:
        main(["bench", "make-model", "--geometry", "mixtral-8x7b", "--out", str(tmp_path / "model")])
    said = capsys.readouterr()
    assert caught.value.code == 1 and not said.out
    assert "error: expected nothing at" in said.err and "hint: pass another --out" in said.err
    assert "Traceback" not in said.err and not any((tmp_path / "model").iterdir())


def test_keeps_away_from_a_folder_of_that_name_that_is_not_its_own(tmp_path: Path) -> None:
    (tmp_path / "model.part").mkdir()
    (tmp_path / "model.part" / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match="thesis"):
        folder.write_model(narrow("mixtral-8x7b"), tmp_path / "model")
    assert (tmp_path / "model.part" / "thesis.txt").read_text() == "mine"


def test_goes_over_what_a_killed_run_left(tmp_path: Path) -> None:
    (tmp_path / "model.part").mkdir()
    (tmp_path / "model.part" / "model-00001-of-00009.safetensors").write_text("torn")
    folder.write_model(narrow("mixtral-8x7b", 1), tmp_path / "model")
    assert "model-00001-of-00009.safetensors" not in {path.name for path in (tmp_path / "model").iterdir()}
    assert [path.name for path in tmp_path.iterdir()] == ["model"] and Checkpoint.open(tmp_path / "model").tensors


@pytest.mark.parametrize(("layers", "geometry"), [(0, "mixtral-8x7b"), (33, "mixtral-8x7b"), (1, "deepseek-v2-lite")])
def test_refuses_layers_that_the_model_does_not_have(layers: int, geometry: str, tmp_path: Path) -> None:
    result = make_model("--geometry", geometry, "--layers", layers, "--out", tmp_path / "model")
    assert isinstance(result.exception, InputError) and "--layers from" in result.exception.expected
    assert not any(tmp_path.iterdir())


def test_refuses_an_unknown_geometry(tmp_path: Path) -> None:
    result = make_model("--geometry", "gpt-9", "--out", tmp_path / "model")
    assert isinstance(result.exception, InputError) and "mixtral-8x7b" in result.exception.expected


def test_refuses_a_disk_that_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage(10**12, 10**12 - 10**9, 10**9))
    result = make_model("--geometry", "qwen1.5-moe", "--out", tmp_path / "model")
    assert isinstance(result.exception, StorageError) and "28.6 GB free" in result.exception.expected
    assert "28.6 GB in 1" in result.stderr and not any(tmp_path.iterdir())


def test_leaves_nothing_where_the_disk_fills_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[Path] = []

    def fail(tensors: Any, path: Path, **_: Any) -> None:
        saved.append(path)
        if len(saved) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        path.write_bytes(b"whole")

    monkeypatch.setattr("moespeq_cli.quantize.folder.save_file", fail)
    with pytest.raises(MoespeqError, match="full disk"):
        folder.write_model(narrow("mixtral-8x7b"), tmp_path / "model", shard_bytes=1 << 20)
    assert len(saved) == 2 and not any(tmp_path.iterdir())
