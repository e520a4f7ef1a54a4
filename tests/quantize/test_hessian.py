"""Counts and second moments come from exactly the tokens routed to an expert."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from moespeq_cli.quantize.hessian import TokenLog, hessian
from runtime.artifacts.checkpoint import Checkpoint
from runtime.model.families import describe
from runtime.model.stream import LayerStream, LayerTrace
from tests.tiny import EOS, save_tiny


def trace(hidden: Tensor, choices: list[list[int]]) -> LayerTrace:
    index = torch.tensor(choices)
    return LayerTrace(0, hidden, index, torch.ones(index.shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_token_gives_its_outer_product(dtype: torch.dtype) -> None:
    hidden = torch.randn(4, 48, generator=torch.Generator().manual_seed(0)).to(dtype)
    log = TokenLog(3)
    log(trace(hidden, [[0], [0], [2], [0]]))
    assert log.counts == [3, 0, 1]
    exact = 2 * torch.outer(hidden[2].double(), hidden[2].double())
    torch.testing.assert_close(hessian(log.inputs(2)).double(), exact, rtol=2**-23, atol=0)


def test_the_same_token_three_times_counts_three_and_gives_the_same_hessian() -> None:
    token = torch.randn(1, 48, generator=torch.Generator().manual_seed(1))
    log = TokenLog(2)
    for _ in range(3):
        log(trace(token, [[1, 0]]))
    assert log.counts == [3, 3]
    exact = 2 * torch.outer(token[0].double(), token[0].double())
    torch.testing.assert_close(hessian(log.inputs(1)).double(), exact, rtol=2**-22, atol=0)


@pytest.mark.parametrize(("tokens", "channels"), [(9000, 32), (700, 256), (700, 600)])
def test_many_tokens_equal_the_float64_sum(tokens: int, channels: int) -> None:
    """Less and more channels than are multiplied at once; and both halves alike."""
    inputs = torch.randn(tokens, channels, generator=torch.Generator().manual_seed(2))
    exact = 2 / tokens * inputs.double().t() @ inputs.double()
    found = hessian(inputs)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found, found.t(), rtol=0, atol=1e-6)


def test_no_token_gives_zeros() -> None:
    log = TokenLog(2)
    log(trace(torch.randn(2, 16), [[0], [0]]))
    assert log.counts == [2, 0] and log.inputs(1).shape == (0, 16)
    assert torch.equal(hessian(log.inputs(1)), torch.zeros(16, 16))


@pytest.mark.parametrize("kind", ["qwen2_moe", "mixtral"])
def test_sequences_together_or_alone_count_the_same(kind: str, tmp_path: Path) -> None:
    """Samples of 3, 17 and 40 tokens, end-of-text ids among them, as one batch and one by one."""
    checkpoint = Checkpoint.open(save_tiny(kind, tmp_path))
    spec = describe(checkpoint)
    generator = torch.Generator().manual_seed(0)
    samples = [torch.randint(0, 256, (length,), generator=generator) for length in (3, 17, 40)]
    samples[1][-4:] = EOS
    samples[2][0] = EOS

    def logs(groups: list[list[Tensor]]) -> list[TokenLog]:
        kept = [TokenLog(spec.num_experts) for _ in range(spec.num_layers)]
        for group in groups:
            stream = LayerStream(checkpoint, spec)
            hidden = stream.embed(group)
            for layer in stream.layers():
                hidden = layer.forward(hidden, kept[layer.layer_id])
        return kept

    for together, alone in zip(logs([samples]), logs([[sample] for sample in samples]), strict=True):
        assert together.counts == alone.counts and sum(together.counts) == 60 * spec.top_k
        for expert_id in range(spec.num_experts):
            assert torch.equal(hessian(together.inputs(expert_id)), hessian(alone.inputs(expert_id)))
