"""The streamed backward pass against autograd over the whole model of the library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moespeq_cli.profile import rounding, sensitivity
from moespeq_cli.profile.measure import TextSequence
from moespeq_cli.profile.modules import CLASSES, layer_of, module_class
from moespeq_cli.profile.rounding import group_size, rounded
from moespeq_cli.profile.scores import Scores, Waiting
from moespeq_cli.profile.sensitivity import SensitivityPass
from runtime.artifacts.checkpoint import Checkpoint
from runtime.model.families import describe
from runtime.model.stream import LayerStream
from tests import tiny
from tests.profile.test_measure import texts


def streamed(folder: Path, sequences: list[TextSequence], names: list[str]) -> tuple[Scores, Tensor, list[Tensor]]:
    """Scores of every linear, the losses, and the gradient of the embedded tokens, with one layer at a time."""
    checkpoint = Checkpoint.open(folder)
    stream = LayerStream(checkpoint, describe(checkpoint))
    inputs = [stream.embed([sequence.input_ids for sequence in sequences])]
    for layer in stream.layers():
        inputs.append(layer.forward(inputs[-1]))
    backward = SensitivityPass(stream, sequences, names)
    scores, gradients, losses = backward.head(inputs[-1].__getitem__)
    for layer in stream.layers(reversed(range(len(inputs) - 1))):
        found, gradients = backward.layer(layer, inputs[layer.layer_id].__getitem__, gradients)
        scores.channels |= found.channels
        scores.domains |= found.domains
    return scores, losses, gradients


def whole(folder: Path, sequences: list[TextSequence]) -> tuple[dict[str, Tensor], list[float], list[Tensor]]:
    """By linear (gradient x error)^2 summed over sequences; from the library's own backward pass."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager", attn_implementation="eager"
    ).eval()
    sums: dict[str, Tensor] = {}
    losses, embedded = [], []
    for sequence in sequences:
        model.zero_grad()
        states = model.get_input_embeddings()(sequence.input_ids[None]).detach().requires_grad_()
        scale = float(getattr(model.model, "embedding_multiplier", 1.0))
        logits = model(inputs_embeds=states, use_cache=False).logits[0]
        loss = torch.nn.functional.cross_entropy(logits[:-1], sequence.input_ids[1:], reduction="sum")
        loss.backward()
        losses.append(float(loss.detach()))
        embedded.append(states.grad[0] / scale)
        for name, gradient, weight in canonical(model):
            score = (gradient.double() * (weight.double() - rounded(weight, 4).double())).square().sum(-1)
            sums[name] = sums.get(name, torch.zeros_like(score)) + score
    return sums, losses, embedded


def canonical(model: Any) -> list[tuple[str, Tensor, Tensor]]:
    """Name, gradient and weight of every linear, [out, in] or [E, out, in], the experts' projections apart."""
    found = []
    for name, parameter in model.named_parameters():
        plain = name.removeprefix("model.").removesuffix(".weight")
        pair = (parameter.grad, parameter.detach())
        if ".experts." in name and "bias" in name:
            continue
        if plain.endswith("gate_up_proj"):
            if model.config.model_type == "gpt_oss":  # transposed, gate and up columns alternating
                halves = [tuple(t[:, :, place::2].transpose(1, 2) for t in pair) for place in (0, 1)]
            else:
                halves = list(zip(*(t.chunk(2, dim=1) for t in pair), strict=True))
            experts = plain.replace("block_sparse_moe", "mlp").removesuffix("gate_up_proj")
            found += [(f"{experts}{p}", *half) for p, half in zip(("gate_proj", "up_proj"), halves, strict=True)]
        elif plain.endswith("experts.down_proj"):
            if model.config.model_type == "gpt_oss":
                pair = tuple(t.transpose(1, 2) for t in pair)
            found.append((plain.replace("block_sparse_moe", "mlp"), *pair))
        elif parameter.dim() == 2 and "embed" not in name:
            found.append((plain, *pair))
    return found


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "deepseek_v3", "gpt_oss", "granitemoe"])
def test_equals_autograd_over_the_whole_model(kind: str, tmp_path: Path) -> None:
    """Every linear and output channel, sequences of several lengths and domains, in five families."""
    tiny.save_tiny(kind, tmp_path, initializer_range=0.1)
    sequences = [*texts(21, 2, domain="a"), *texts(33, domain="b", seed=1)]
    scores, losses, gradients = streamed(tmp_path, sequences, ["a", "b"])
    expected, expected_losses, embedded = whole(tmp_path, sequences)
    assert set(scores.channels) == set(expected)
    for name, score in expected.items():
        found = scores.channels[name]
        assert found.shape == score.shape and torch.isfinite(found).all(), name
        assert not found.requires_grad, f"{name} holds on to all that it was computed from"
        assert torch.allclose(found, score, rtol=2e-3, atol=2e-5 * float(score.max())), name
        assert float(scores.domains[name].sum()) == pytest.approx(float(found.sum()), rel=1e-9)
        assert float(score.max()) > 0, name
    assert losses.tolist() == pytest.approx([sum(expected_losses[:2]), expected_losses[2]], rel=1e-5)
    for found, wanted in zip(gradients, embedded, strict=True):
        assert torch.allclose(found, wanted, rtol=2e-3, atol=2e-5 * float(wanted.abs().max()))


def test_domains_are_those_of_their_own_sequences(tmp_path: Path) -> None:
    tiny.save_tiny("mixtral", tmp_path)
    first, second = texts(9, domain="a"), texts(14, domain="b", seed=1)
    both = streamed(tmp_path, [*first, *second], ["a", "b"])[0]
    alone = streamed(tmp_path, second, ["b"])[0]
    for name, score in alone.domains.items():
        assert float(both.domains[name][1]) == pytest.approx(float(score[0]), rel=1e-6)


def test_an_expert_that_no_token_reaches_has_zeros(tmp_path: Path) -> None:
    """And a sequence of one token has no loss to feel anything."""
    tiny.save_tiny("mixtral", tmp_path)
    scores, losses, _ = streamed(tmp_path, [TextSequence("a", torch.tensor([5]))], ["a"])
    assert losses.tolist() == [0.0]
    assert all(float(score.sum()) == 0 for score in scores.channels.values())
    few = streamed(tmp_path, [TextSequence("a", torch.tensor([5, 6]))], ["a"])[0]
    totals = few.channels["layers.0.mlp.experts.down_proj"].sum(1)
    assert (totals == 0).sum() >= 4 and (totals > 0).any()  # 2 tokens use at most 4 of 8 experts


def test_a_head_in_parts_has_the_same_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.save_tiny("mixtral", tmp_path)
    sequences = texts(21, 9, domain="a")
    whole_head, losses, gradients = streamed(tmp_path, sequences, ["a"])
    monkeypatch.setattr(sensitivity, "HEAD_TOKENS", 8)  # of 20 that have a next one, the last part shorter
    monkeypatch.setattr(rounding, "CPU_BLOCK", 37 * 64)  # 37 rows of 260, the last part shorter
    parts, their_losses, their_gradients = streamed(tmp_path, sequences, ["a"])
    torch.testing.assert_close(parts.channels["lm_head"], whole_head.channels["lm_head"], rtol=1e-5, atol=0)
    torch.testing.assert_close(their_losses, losses, rtol=1e-6, atol=0)
    torch.testing.assert_close(their_gradients, gradients, rtol=1e-4, atol=1e-7)
    assert float(whole_head.channels["lm_head"].min()) > 0


@pytest.mark.parametrize("waiting_bytes", [0, 60_000])
def test_gradients_that_are_counted_sooner_have_the_same_scores(
    waiting_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After every sequence, or after some."""
    tiny.save_tiny("mixtral", tmp_path)
    sequences = [*texts(21, 9, domain="a"), *texts(21, 9, domain="b", seed=1)]
    together = streamed(tmp_path, sequences, ["a", "b"])[0]
    monkeypatch.setattr(sensitivity, "WAITING_BYTES", waiting_bytes)
    settled: list[int] = []
    settle = Waiting.settle

    def count(waiting: Waiting, beyond_bytes: int = 0) -> None:
        settled.append(waiting.num_bytes > beyond_bytes)
        settle(waiting, beyond_bytes)

    monkeypatch.setattr(Waiting, "settle", count)
    sooner = streamed(tmp_path, sequences, ["a", "b"])[0]
    assert 2 * 3 < sum(settled) <= 4 * 3  # in two layers and the head
    for name, score in together.channels.items():
        assert torch.equal(sooner.channels[name], score), name
        torch.testing.assert_close(sooner.domains[name], together.domains[name], rtol=1e-12, atol=0)


def test_rounding_stays_within_half_a_step_and_in_its_grid() -> None:
    weights = torch.randn(6, 256, generator=torch.Generator().manual_seed(0))
    for bits in (4, 8):
        near = rounded(weights, bits)
        step = weights.unflatten(-1, (2, 128)).abs().amax(-1) * 2 / (2**bits - 1)
        error = (near - weights).abs().unflatten(-1, (2, 128)).amax(-1)
        assert (error <= step * 0.505).all()  # scales have eight bits, and are rounded up
        assert all(len(near[row, :128].unique()) <= 2**bits for row in range(6))
    assert group_size(96) == 96 and group_size(256) == 128
    assert rounded(torch.zeros(3, 40), 4).abs().max() == 0


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_every_linear_of_a_family_has_a_class_and_a_layer(kind: str, tmp_path: Path) -> None:
    model = tiny.make_model(kind)
    for name, parameter in model.named_parameters():
        plain = name.removeprefix("model.").removesuffix(".weight")
        if parameter.dim() >= 2 and "embed" not in name and "bias" not in name and not name.endswith("sinks"):
            if plain.endswith("gate_up_proj"):
                plain = plain.replace("gate_up_proj", "up_proj")
            assert module_class(plain) in CLASSES and module_class(plain) != "other", plain
            assert (layer_of(plain) is None) == (plain == "lm_head")
