"""Decoding passes taken apart give what the library's own modules give, in float32 on the processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.artifacts.checkpoint import Checkpoint
from runtime.gpu import attention
from runtime.gpu.rows_decoder import PLAIN, RowsDecoder
from runtime.kernels.rows import Routing
from runtime.kernels.rows_reference import TorchRows
from runtime.model import loader
from runtime.model.experts import find_experts
from runtime.model.families import dense_names, describe
from runtime.model.kv import SharedKv
from tests.tiny import make_model, save_model

CASES: dict[str, tuple[str, dict[str, Any]]] = {kind: (kind, {}) for kind in PLAIN} | {
    "mixtral with a window": ("mixtral", {"sliding_window": 5}),
    "qwen2_moe with a window": ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen2_moe, weights that sum to 1": ("qwen2_moe", {"norm_topk_prob": True}),
    "qwen2_moe with a dense layer": ("qwen2_moe", {"mlp_only_layers": [0], "intermediate_size": 96}),
    "deepseek_v2 with a latent query": ("deepseek_v2", {"q_lora_rank": 24}),
    "phimoe with biases": ("phimoe", {"attention_bias": True, "lm_head_bias": True}),
}
CAPACITY = 24


class Experts:
    """A sum that depends on every expert chosen and on its weight."""

    def __init__(self, top_k: int) -> None:
        self._top_k, self.written, self.ahead = top_k, 0, False

    def compute(self, place: int, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return hidden * (top_k_weights * (top_k_index + 1)).sum(-1, keepdim=True) * (place + 1) * 0.1

    def routing(self, place: int, rows: int) -> Routing:
        self.written += 1
        self._to = Routing(torch.zeros(rows, self._top_k, dtype=torch.int32), torch.zeros(rows, self._top_k))
        return self._to

    def routed(self, place: int, hidden: Tensor) -> Tensor:
        return self.compute(place, hidden, self._to.index, self._to.weights)


def build(kind: str, folder: Path, changes: dict[str, Any]) -> tuple[Any, Any]:
    """A model in which every parameter counts, its experts those above, and its facts."""
    made = make_model(kind, **changes)
    with torch.no_grad():
        for weight in made.parameters():
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.numel())) * 0.05)
    source = Checkpoint.open(save_model(made, folder))
    spec = describe(source)
    attention.register()
    model = loader.build(source.folder, torch.float32, spec, attention.NAME)
    loader.load_dense(model, spec, source.read, dense_names(source, spec))
    return model, spec


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_equals_the_library(name: str, tmp_path: Path) -> None:
    kind, changes = CASES[name]
    model, spec = build(kind, tmp_path / "model", changes)
    layers, ops = loader.decoder_layers(model), TorchRows()
    assert RowsDecoder.accepts(model, ops)
    shared = attention.install(model)
    found, caches = [], []
    experts = Experts(spec.top_k)
    for place, layer_id in enumerate(spec.moe_layers):
        module: Any = find_experts(layers[layer_id])
        module.compute = lambda h, i, w, place=place: experts.compute(place, h, i, w)
    for way in ("library", "apart"):
        kv = SharedKv(spec.num_layers, CAPACITY)
        caches.append(kv)
        decoder = None if way == "library" else RowsDecoder(model, spec.moe_layers, kv, ops)
        named = {loader.cache_argument(model.model) or "past_key_values": kv}
        outputs = []
        for tokens, places in (
            ([5, 6, 7, 8], [0, 1, 2, 3]),
            ([9, 10, 9, 9], [4, 5, 4, 4]),
            ([11], [6]),
            ([3, 4], [5, 6]),
        ):
            ids, positions = torch.tensor(tokens), torch.tensor(places)
            experts.ahead = len(tokens) == 1
            kv.place_rows(positions, 16)
            shared.rows(positions, 16)
            if decoder is None:
                outputs.append(
                    model(input_ids=ids[None], position_ids=positions[None], use_cache=True, **named).logits[0]
                )
            else:
                outputs.append(decoder.logits(ids, positions, 16, experts))
        found.append(outputs)
    for ours, theirs in zip(*found, strict=True):
        assert torch.allclose(ours, theirs, atol=2e-5, rtol=1e-4)
    for ours, theirs in zip(caches[1].layers, caches[0].layers, strict=True):
        assert torch.allclose(ours.keys, theirs.keys, atol=1e-5) and torch.allclose(
            ours.values, theirs.values, atol=1e-5
        )
    assert bool(experts.written) == (kind not in ("phimoe", "deepseek_v2"))
    assert found[0][0].std() > 0.01


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("glm4_moe", {}), ("granitemoe", {}), ("olmoe", {"clip_qkv": 1.0}), ("qwen2_moe", {"hidden_act": "gelu"})],
)
def test_leaves_other_models_to_the_library(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    model, _ = build(kind, tmp_path / "model", changes)
    assert not RowsDecoder.accepts(model, TorchRows())


@pytest.mark.parametrize(("kind", "accepted"), [("qwen2_moe", False), ("qwen3_moe", True)])
def test_a_router_that_is_too_large_is_the_librarys(kind: str, accepted: bool, tmp_path: Path) -> None:
    """And with it a model whose shared experts have a gate, which is a column of the router's product."""

    class Small(TorchRows):
        def fits_router(self, num_experts: int, top_k: int) -> bool:
            return num_experts < 8

    model, spec = build(kind, tmp_path / "model", {})
    assert RowsDecoder.accepts(model, Small()) == accepted
    if accepted:
        RowsDecoder(model, spec.moe_layers, SharedKv(spec.num_layers, 8), Small())


def test_weights_that_are_read_together_are_not_there_twice(tmp_path: Path) -> None:
    model, spec = build("qwen2_moe", tmp_path / "model", {})
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    RowsDecoder(model, spec.moe_layers, SharedKv(spec.num_layers, 8), TorchRows())
    after = dict(model.named_parameters())
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    q, k = (after[f"model.layers.0.self_attn.{name}.weight"] for name in ("q_proj", "k_proj"))
    assert k.data_ptr() == q.data_ptr() + q.numel() * q.element_size()
