"""Models of which the stages would compute something else than the library are refused before any work, by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from runtime.artifacts.checkpoint import Checkpoint
from runtime.errors import InputError
from runtime.model.families import describe
from runtime.model.loader import require_supported
from runtime.model.support import check_model
from tests.cli.conftest import Command, moespeq
from tests.tiny import make_model, save_tiny

__all__ = ["moespeq"]


@pytest.mark.parametrize("told", [True, False])
def test_qwen3_next_is_refused_by_every_stage_and_nothing_is_written(
    told: bool, moespeq: Command, tmp_path: Path
) -> None:
    """Linear attention, whether config.json lists the kinds of layers or leaves them to the library's defaults."""
    model = save_tiny("qwen3_next", tmp_path / "model")
    if not told:
        config = json.loads((model / "config.json").read_text())
        del config["layer_types"]
        (model / "config.json").write_text(json.dumps(config))
    for stage in ("quantize", "profile", *(("pack",) if told else ())):  # pack asks for what quantize refused to make
        done = moespeq(stage, "--model", model, "--artifacts", tmp_path / "artifacts")
        assert (done.status, done.stdout) == (1, "") and "Traceback" not in done.stderr
        assert "found qwen3_next with linear_attention layers" in done.stderr and "hint: " in done.stderr
    assert not (tmp_path / "artifacts").exists()


@pytest.mark.parametrize(("kind", "word"), [("dots1", "dots1"), ("mixtral", "mixtral")])
def test_experts_named_in_another_way_are_shown(kind: str, word: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = save_tiny(kind, tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    renamed = {
        n.replace(".mlp.", ".ffn.").replace(".block_sparse_moe.", ".ffn."): t.clone() for n, t in tensors.items()
    }
    save_file(renamed, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=rf"this {word} has model\.layers\.\d\.ffn\.experts\.") as caught:
        describe(Checkpoint.open(model))
    assert "docs/models.md" in caught.value.mend


def test_a_router_named_in_another_way_may_be_a_familys_own(tmp_path: Path) -> None:
    """A family of the table has lost a tensor; of one that nobody knows the name may be another."""
    from safetensors.torch import load_file, save_file

    for kind, known in (("dots1", False), ("mixtral", True)):
        model = save_tiny(kind, tmp_path / kind)
        tensors = load_file(model / "model.safetensors")
        save_file(
            {n.replace(".gate.", ".chooser."): t.clone() for n, t in tensors.items()}, model / "model.safetensors"
        )
        with pytest.raises(InputError, match=r"the router of layer \d \(model\.layers") as caught:
            describe(Checkpoint.open(model))
        assert ("docs/models.md" in caught.value.mend) != known and "download" in caught.value.mend


def test_a_model_that_transformers_does_not_know_is_told_in_one_line(moespeq: Command, tmp_path: Path) -> None:
    model = save_tiny("dots1", tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": "newer_moe"}))
    done = moespeq("quantize", "--model", model, "--artifacts", tmp_path / "artifacts")
    told = done.stderr.splitlines()
    assert (done.status, done.stdout) == (1, "") and not (tmp_path / "artifacts").exists()
    assert len(told) == 2 and "`newer_moe`" in told[0] and told[1].startswith("hint: ") and len(told[0]) < 500


def test_a_config_without_layers_is_named(tmp_path: Path) -> None:
    model = save_tiny("dots1", tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    for wrong in (None, "three", 0, [3]):
        (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": wrong}))
        with pytest.raises(InputError, match="num_hidden_layers above 0"):
            describe(Checkpoint.open(model))


def experts_of(model: Any) -> Any:
    return model.model.layers[1].mlp.experts


def separate(model: Any) -> None:
    model.model.layers[1].mlp.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))


def nest(model: Any) -> None:
    layer = model.model.layers[1]
    layer.block = nn.ModuleDict({"inner": layer.self_attn})
    del layer.self_attn


def second(model: Any) -> None:
    model.model.layers[1].cross_attn = model.model.layers[0].self_attn


class Other(nn.Module):
    """Experts that want to know more than the library's."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = experts_of(model).gate_up_proj, experts_of(model).down_proj

    def _apply_gate(self, x: Any) -> Any:
        return x

    def forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any, positions: Any) -> Any:
        return hidden_states


CHANGES: list[tuple[Callable[[Any], object], str]] = [
    (lambda model: setattr(experts_of(model), "has_gate", False), "a gate beside the up projection"),
    (lambda model: setattr(experts_of(model), "has_post_expert_norm", True), "a norm after each expert"),
    (lambda model: setattr(experts_of(model), "has_bias", True), "biases"),
    (lambda model: setattr(experts_of(model), "is_concatenated", False), "interleaved gate and up"),
    (lambda model: setattr(experts_of(model), "is_transposed", True), "gate_up_proj of shape"),
    (lambda model: setattr(model.model.layers[1].mlp, "experts", Other(model)), "arguments: 4"),
    (separate, r"fused experts .* in layer 1.*found in it self_attn \(Dots1Attention\), mlp \(Dots1MoE\)"),
    (nest, "one attention module right under layer 1 .* found block.inner"),
    (second, "one attention module right under layer 1 .* found self_attn, cross_attn"),
    (lambda model: model.model.layers.append(nn.Identity()), "3 decoder layers .* found 4"),
    (lambda model: setattr(type(model), "_is_stateful", True), "dots1 with recurrent layers"),
]


@pytest.mark.parametrize(("change", "named"), CHANGES)
def test_what_the_stages_rely_on_is_looked_at(
    change: Callable[[Any], object], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unknown family of the library's fused experts goes through; one that only looks so does not."""
    folder = save_tiny("dots1", tmp_path / "model")
    spec = describe(Checkpoint.open(folder))
    require_supported(Checkpoint.open(folder), spec)
    model = make_model("dots1")
    check_model(model, spec)
    monkeypatch.setattr(type(model), "_is_stateful", False)
    change(model)
    with pytest.raises(InputError, match=named) as caught:
        check_model(model, spec)
    assert "dots1" in str(caught.value)


def test_experts_where_the_checkpoint_has_none_are_named(tmp_path: Path) -> None:
    folder = save_tiny("dots1", tmp_path / "model")
    spec = describe(Checkpoint.open(folder))
    with pytest.raises(InputError, match="no routed experts in layer 0"):
        check_model(make_model("dots1", first_k_dense_replace=0), spec)
