"""What a built model's routing is like: how even, how alike between neighbours, how alike in an INT4 draft."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moespeq_cli.bench.tables import percent
from moespeq_cli.profile.measure import TextSequence, measure
from moespeq_cli.quantize.gptq import SolverSettings, round_solution
from runtime.artifacts.checkpoint import Checkpoint
from runtime.artifacts.gptq_format import dequantize
from runtime.model.families import LayerExperts, MoeSpec, describe, read_expert
from runtime.model.stream import LayerStream

BITS, GROUP_SIZE = 4, 128


@dataclass(frozen=True, slots=True)
class RoutingFigures:
    """Shares from 0 to 1, over the tokens measured.

    Attributes:
        tokens: how many.
        entropy: of how often each expert is chosen, over its maximum, mean of the layers.
        entropy_lowest: of the layer where it is lowest.
        neighbours: of a token's experts, those that the token before it used too, mean of the layers.
        experts_alike: of the target's experts, those that the draft chooses too, mean of the layers.
        experts_alike_by_layer: the same, layer by layer.
        greedy_alike: of positions, those where draft and target have the same likeliest next token.
    """

    tokens: int
    entropy: float
    entropy_lowest: float
    neighbours: float
    experts_alike: float
    experts_alike_by_layer: tuple[float, ...]
    greedy_alike: float

    def lines(self) -> list[str]:
        """The three figures for a person."""
        return [
            f"routing over {self.tokens} tokens of the embedded calibration texts:",
            f"  entropy {percent(self.entropy)} of its maximum (lowest layer {percent(self.entropy_lowest)})",
            f"  experts that neighbouring tokens share {percent(self.neighbours)}",
            f"  INT4 draft: experts chosen alike {percent(self.experts_alike)}, "
            f"next tokens alike {percent(self.greedy_alike)}",
        ]


class RoundedDraft:
    """The experts of a checkpoint rounded to the nearest INT4 code, made as a layer is asked for."""

    def __init__(self, checkpoint: Checkpoint, spec: MoeSpec) -> None:
        self._checkpoint, self._spec = checkpoint, spec

    def read_layer(self, layer_id: int, dtype: torch.dtype, device: torch.device) -> LayerExperts:
        """The dequantised experts of a layer, stacked."""
        stacked: dict[str, Tensor] = {}
        for expert_id in range(self._spec.num_experts):
            for name, weight in read_expert(self._checkpoint, self._spec, layer_id, expert_id).named().items():
                if name not in stacked:
                    stacked[name] = torch.empty(self._spec.num_experts, *weight.shape, dtype=dtype)
                stacked[name][expert_id] = rounded(weight)
        return LayerExperts(**stacked)


def rounded(weight: Tensor) -> Tensor:
    """[out, in] to the nearest INT4 code and back, float32; rows too short for a group have one scale."""
    size = GROUP_SIZE if weight.shape[1] % GROUP_SIZE == 0 else weight.shape[1]
    whole = round_solution(weight[None], SolverSettings(bits=BITS, group_size=size))
    return dequantize(whole.codes, whole.scales, whole.zeros, size, torch.float32)[0]


def measure_routing(
    checkpoint: Checkpoint,
    tokens: int,
    dtype: torch.dtype = torch.bfloat16,
    advance: Callable[[], None] = lambda: None,
    seq_len: int = 128,
) -> RoutingFigures:
    """Run embedded calibration texts through the model and its INT4 draft, one layer in memory at a time.

    Args:
        checkpoint: to measure.
        tokens: about how many; whole sequences of at most `seq_len`, domains in turn.
        dtype: of the arithmetic.
        advance: called after each layer, and after the logits.
        seq_len: of a sequence.
    """
    from moespeq_cli.quantize.calibrate import make_sequences, read_texts
    from runtime.model.tokenizer import load_tokenizer

    spec = describe(checkpoint)
    tokenizer = load_tokenizer(checkpoint.folder)
    samples = max(1, math.ceil(tokens / seq_len))
    source, texts = read_texts(None, tokenizer, samples)
    made = make_sequences(source, texts, tokenizer, samples, seq_len, 0, int(checkpoint.config["vocab_size"]))
    sequences = [TextSequence("text", ids) for ids in made.ids]
    stream = LayerStream(checkpoint, spec, dtype)
    result = measure(stream, sequences, RoundedDraft(checkpoint, spec), "", 0, advance)
    return _figures(made.tokens, spec, result)


def _figures(tokens: int, spec: MoeSpec, result: Any) -> RoutingFigures:
    counts = result.tensors["counts"].sum(0).double()
    shares = counts / counts.sum(-1, keepdim=True)
    entropy = torch.special.entr(shares).sum(-1) / math.log(spec.num_experts)
    alike = [float(value) for value in result.tensors["agreement"][0]]
    return RoutingFigures(
        tokens=tokens,
        entropy=float(entropy.mean()),
        entropy_lowest=float(entropy.min()),
        neighbours=float(result.tensors["kept_from_previous"].mean()),
        experts_alike=sum(alike) / len(alike),
        experts_alike_by_layer=tuple(alike),
        greedy_alike=float(result.draft.greedy["text"]),
    )
