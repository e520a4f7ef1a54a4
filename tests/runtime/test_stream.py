"""The streamed layers compute what the library computes."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch

from runtime.artifacts.checkpoint import Checkpoint
from runtime.model.families import describe, read_layer, to_disk_tensors
from runtime.model.stream import LayerStream, LayerTrace
from tests import tiny


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_streamed_layers_give_the_librarys_logits(kind: str, tmp_path: Path) -> None:
    """Float32, sequences of 3, 17 and 40 tokens, alone and beside others of their length: logits equal to rounding,
    every token counted top_k times a layer, and the observer told of each sequence in order."""
    from transformers import AutoModelForCausalLM

    tiny.save_tiny(kind, tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    spec = describe(checkpoint)
    stream = LayerStream(checkpoint, spec)
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, 250, (n,), generator=generator) for n in (3, 17, 17, 40, 17, 17, 17)]
    counts: dict[int, int] = {}
    told: list[int] = []  # the layer of each trace

    hidden = stream.embed(ids)
    for layer in stream.layers():

        def observe(trace: LayerTrace, layer_id: int = layer.layer_id) -> None:
            assert trace.sequence == told.count(layer_id) and len(trace.hidden) == len(ids[trace.sequence])
            told.append(layer_id)
            counts[layer_id] = counts.get(layer_id, 0) + trace.top_k_index.numel()

        hidden = layer.forward(hidden, observe)

    reference = AutoModelForCausalLM.from_pretrained(tmp_path)
    for states, tokens in zip(hidden, ids, strict=True):
        with torch.no_grad():
            expected = reference(tokens[None]).logits[0]
        assert torch.allclose(stream.logits(states), expected, atol=2e-4, rtol=1e-4)
    assert counts == {layer_id: 128 * spec.top_k for layer_id in spec.moe_layers}


@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v2"])
def test_a_layer_is_gone_when_the_next_one_is_asked_for(kind: str, tmp_path: Path) -> None:
    """Its experts, what was made of them, its module's weights, and what observed it."""
    tiny.save_tiny(kind, tmp_path, num_hidden_layers=4)
    checkpoint = Checkpoint.open(tmp_path)
    stream = LayerStream(checkpoint, describe(checkpoint))
    hidden = stream.embed([torch.arange(20)])
    before: list[weakref.ref[object]] = []
    layers = stream.layers()
    for _ in range(4):
        layer = next(layers)
        gc.collect()
        assert [alive() for alive in before if alive() is not None] == []

        def observe(trace: LayerTrace) -> None:
            assert len(trace.hidden) == 20

        hidden = layer.forward(hidden, observe)
        held: list[object] = [observe, *layer.module.parameters()]
        if layer.experts is not None:
            held += [layer.experts.gate_proj, layer.experts.down_proj]
        before = [weakref.ref(thing) for thing in held]
        del held, observe, layer


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_canonical_experts_go_back_to_the_disk_layout(kind: str, tmp_path: Path) -> None:
    """Reading a layer and writing it back gives the source's tensors bit for bit."""
    tiny.save_tiny(kind, tmp_path, dtype=torch.bfloat16)
    checkpoint = Checkpoint.open(tmp_path)
    spec = describe(checkpoint)
    for layer_id in spec.moe_layers:
        for name, tensor in to_disk_tensors(spec, layer_id, read_layer(checkpoint, spec, layer_id)).items():
            assert torch.equal(tensor, checkpoint.read(name)), name


@pytest.mark.parametrize("tied", [False, True])
def test_embedding_and_head_are_in_memory_only_while_they_are_used(tied: bool, tmp_path: Path) -> None:
    """In a model of many words they are larger than a layer; tied, they are one tensor."""
    from transformers import AutoModelForCausalLM

    tiny.save_tiny("qwen2_moe", tmp_path, tie_word_embeddings=tied)
    checkpoint = Checkpoint.open(tmp_path)
    tokens = torch.arange(20)
    stream = LayerStream(checkpoint, describe(checkpoint))
    model = stream._model
    hidden = stream.embed([tokens])
    assert model.model.embed_tokens.weight.is_meta and model.lm_head.weight.is_meta
    first = stream.logits(hidden[0])
    assert model.model.embed_tokens.weight.is_meta and not model.lm_head.weight.is_meta
    assert torch.equal(stream.embed([tokens])[0], hidden[0])  # beside the head, and without it
    stream.drop_head()
    assert model.model.embed_tokens.weight.is_meta and model.lm_head.weight.is_meta
    assert torch.equal(stream.embed([tokens])[0], hidden[0])
    assert torch.equal(stream.logits(hidden[0]), first)
    for layer in stream.layers():
        hidden = layer.forward(hidden)
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(tmp_path)(tokens[None]).logits[0]
    assert torch.allclose(stream.logits(hidden[0]), expected, atol=2e-4, rtol=1e-4)
