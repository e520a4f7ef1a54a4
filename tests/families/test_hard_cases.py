"""Cases of docs/hard_cases.md that go through more than one stage."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.artifacts.checkpoint import Checkpoint
from runtime.memory.store import RecordStore
from runtime.model.experts import find_experts
from runtime.model.families import describe
from runtime.model.stream import LayerStream, LayerTrace
from tests.decode.packs import build, decode, prompt_of
from tests.tiny import make_model, save_model


@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe"])
def test_h07_a_bfloat16_model_chooses_by_its_float32_bias(kind: str, tmp_path: Path) -> None:
    """Biases close together far from zero: in BF16 they would be 1/32 apart, and other experts would be chosen."""
    from transformers import AutoModelForCausalLM

    network = make_model(kind, dtype=torch.bfloat16, n_group=1, topk_group=1)
    generator = torch.Generator().manual_seed(3)
    for name, tensor in (*network.named_buffers(), *network.named_parameters()):
        if name.endswith("e_score_correction_bias"):
            tensor.data = 7 + 0.2 * torch.rand(tensor.shape, generator=generator)
        elif name.endswith("mlp.gate.weight"):
            tensor.data = 0.05 * torch.randn(tensor.shape, generator=generator)
    folder = save_model(network, tmp_path / "model")
    tokens = torch.tensor(prompt_of(60))

    checkpoint = Checkpoint.open(folder)
    ours: dict[int, torch.Tensor] = {}
    stream = LayerStream(checkpoint, describe(checkpoint), torch.bfloat16)
    hidden = stream.embed([tokens])
    for layer in stream.layers():

        def observe(trace: LayerTrace, layer_id: int = layer.layer_id) -> None:
            ours[layer_id] = trace.top_k_index.sort(-1).values

        hidden = layer.forward(hidden, observe)

    def library_chooses(round_bias: bool) -> dict[int, torch.Tensor]:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        seen: dict[int, torch.Tensor] = {}
        for layer_id, layer in enumerate(model.model.layers):
            experts: Any = find_experts(layer)
            if experts is None:
                continue
            if round_bias:
                bias = layer.mlp.gate.e_score_correction_bias
                assert bias.dtype == torch.float32
                bias.data = bias.to(torch.bfloat16).float()
            experts.register_forward_pre_hook(
                lambda module, arguments, layer_id=layer_id: seen.update({layer_id: arguments[1].sort(-1).values})
            )
        with torch.no_grad():
            model(tokens[None])
        return seen

    first = min(ours)  # later layers see what experts computed, by other products than the library's
    assert torch.equal(ours[first], library_chooses(round_bias=False)[first])
    assert not torch.equal(ours[first], library_chooses(round_bias=True)[first])


def test_h13_a_thousand_steps_through_two_slots_with_late_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 experts, top-2, two reads at a time that take as long as they like; late kernels would need a GPU."""
    sizes = {"num_experts": 64, "num_hidden_layers": 1, "max_position_embeddings": 1100}
    pack = build(tmp_path, "qwen3_moe", **sizes)
    monkeypatch.setattr("tests.decode.packs.CONTEXT", 1100)
    resident = decode(pack, prompt_of(5), 350, speculate=False)
    generator, read = random.Random(1), RecordStore.read_into

    def late(self: RecordStore, *arguments: Any, **named: Any) -> Any:
        time.sleep(generator.choice((0, 0, 0.0005)))
        return read(self, *arguments, **named)

    monkeypatch.setattr(RecordStore, "read_into", late)
    few: dict[str, Any] = {"slots": 2, "max_parallel_transfers": 2}
    alone = decode(pack, prompt_of(5), 350, speculate=False, **few)
    drafted = decode(pack, prompt_of(5), 350, prefetch_window=6, verify_window=3, governor="fixed", **few)
    assert alone.tokens == drafted.tokens == resident.tokens and len(alone.tokens) == 350
    assert 350 + drafted.report["draft_steps"] + drafted.report["verify_rows"] >= 1000
