"""Texts through the model and, if there is one, its draft, layer by layer, with one layer in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moespeq_cli.profile.outputs import OutputTally
from moespeq_cli.profile.routing import (
    AgreementTally,
    RoutingTally,
    RoutingTrace,
    mean_or_none,
    number_or_none,
    reuse_edges,
)
from runtime.artifacts.profile import DraftFigures
from runtime.model.families import LayerExperts
from runtime.model.stream import LayerStream, LayerTrace, Observer, StreamedLayer

NEXT_LAYER_TOKENS = 4096  # on how many the one-layer reading is taken: it costs two more passes
KEPT_STATES = ("target", "draft", "ahead")
LOGIT_ROWS = 256  # tokens whose logits of both models are in memory at a time


class DraftExperts(Protocol):
    """Where the draft's experts come from; `runtime.artifacts.quantized.Quantized` is one."""

    def read_layer(self, layer_id: int, dtype: torch.dtype, device: torch.device) -> LayerExperts:
        """The dequantised experts of a layer, on the device or where they are made."""


class Keeper(Protocol):
    """Where the work after each layer is kept; `moespeq_cli.profile.work.Work` is one."""

    def resume(self) -> tuple[int, dict[str, Tensor]] | None:
        """How many layers are done, and what was kept after them."""

    def inputs(self, layer_id: int, target: list[Tensor]) -> None:
        """The target's states before a layer, or after the last."""

    def keep(self, layers_done: int, tensors: dict[str, Tensor]) -> None:
        """What goes on after so many layers."""


@dataclass(frozen=True, slots=True)
class TextSequence:
    """Tokens of one domain that follow each other; int64 [T], T at least 1."""

    domain: str
    input_ids: Tensor


@dataclass(frozen=True, slots=True)
class Measurement:
    """The tensors of the artifact and the draft's figures."""

    tensors: dict[str, Tensor]
    edges: tuple[int, ...]
    draft: DraftFigures | None


def in_turn(sequences: list[TextSequence]) -> list[TextSequence]:
    """The sequences reordered, a domain after the other in turn, so that a prefix of them holds all domains."""
    queues: dict[str, list[TextSequence]] = {}
    for sequence in sequences:
        queues.setdefault(sequence.domain, []).append(sequence)
    longest = max((len(queue) for queue in queues.values()), default=0)
    return [queue[place] for place in range(longest) for queue in queues.values() if place < len(queue)]


def measure(
    stream: LayerStream,
    sequences: list[TextSequence],
    quantized: DraftExperts | None = None,
    quantized_sha256: str = "",
    trace_tokens: int = 16384,
    advance: Callable[[], None] = lambda: None,
    keeper: Keeper | None = None,
) -> Measurement:
    """Route every sequence and count.

    Args:
        stream: the target.
        sequences: run one by one, unpadded; their order decides which are traced.
        quantized: the draft's experts, of the same model.
        quantized_sha256: names that artifact in the figures.
        trace_tokens: how many tokens' choices are kept as they are.
        advance: called after each layer, and after the logits.
        keeper: has what an earlier call had measured, and takes what this one has.
    """
    return _Run(stream, sequences, quantized, trace_tokens).measure(quantized_sha256, advance, keeper)


class _Run:
    """One pass over the layers; `hidden` lists hold one [T, H] a sequence."""

    def __init__(
        self, stream: LayerStream, sequences: list[TextSequence], quantized: DraftExperts | None, trace_tokens: int
    ) -> None:
        spec = stream.spec
        self.stream, self.sequences, self.quantized = stream, sequences, quantized
        names = sorted({sequence.domain for sequence in sequences})
        lengths = [len(sequence.input_ids) for sequence in sequences]
        self.names = names
        self.domain = [names.index(sequence.domain) for sequence in sequences]
        self.longest = max(lengths)
        num_layers = len(spec.moe_layers)
        self.tally = RoutingTally(len(names), num_layers, spec.num_experts, self.longest)
        self.trace = RoutingTrace(lengths, num_layers, spec.top_k, trace_tokens)
        self.draft_trace = RoutingTrace(lengths, num_layers, spec.top_k, trace_tokens)
        self.agreement = AgreementTally(len(names), num_layers, spec.num_experts)
        self.agreement_next = AgreementTally(len(names), num_layers, spec.num_experts)
        self.chosen: list[Tensor] = []  # the target's choices in the current layer, a sequence each
        self.ahead_sequences = prefix(lengths, NEXT_LAYER_TOKENS)

    def measure(self, quantized_sha256: str, advance: Callable[[], None], keeper: Keeper | None) -> Measurement:
        self.target = self.stream.embed([sequence.input_ids for sequence in self.sequences])
        self.draft = list(self.target) if self.quantized is not None else []
        self.ahead: list[Tensor] = []  # states behind a layer whose experts alone were the draft's
        first = self._resume(keeper)
        for _ in range(first):
            advance()
        for layer in self.stream.layers(range(first, self.stream.spec.num_layers)):
            if keeper is not None:
                keeper.inputs(layer.layer_id, self.target)
            self._layer(layer)
            if keeper is not None:
                keeper.keep(layer.layer_id + 1, self._state())
            advance()
        if keeper is not None:
            keeper.inputs(self.stream.spec.num_layers, self.target)
        figures = None
        if self.quantized is not None:
            figures = self._figures(self.target, self.draft, quantized_sha256)
            advance()
        return Measurement(self._tensors(), reuse_edges(self.longest), figures)

    def _layer(self, layer: StreamedLayer) -> None:
        row = self.stream.spec.moe_layers.index(layer.layer_id) if layer.is_moe else -1
        before, self.chosen = self.target, []
        self.target = layer.forward(before, self._count(row) if layer.is_moe else None)
        if self.quantized is None:
            return
        if self.ahead:
            self.ahead = layer.forward(self.ahead, self._compare_next(row - 1) if layer.is_moe else None)
        self._use_draft_experts(layer)
        self.draft = layer.forward(self.draft, self._compare(row) if layer.is_moe else None)
        if layer.is_moe and row + 1 < len(self.stream.spec.moe_layers):
            self.ahead = layer.forward(before[: self.ahead_sequences])

    def _state(self) -> dict[str, Tensor]:
        """All that the layers behind need, and all that was counted."""
        state = {f"tally.{name}": tensor for name, tensor in self._counted().items()}
        for name, states in zip(KEPT_STATES, (self.target, self.draft, self.ahead), strict=True):
            state |= {f"{name}.{place:06d}": tensor for place, tensor in enumerate(states)}
        return state

    def _resume(self, keeper: Keeper | None) -> int:
        """Take over what was kept; returns how many layers are done."""
        found = keeper.resume() if keeper is not None else None
        if found is None:
            return 0
        done, state = found
        for name, tensor in self._counted().items():
            tensor.copy_(state[f"tally.{name}"])
        kept = {name: [state[key] for key in sorted(state) if key.startswith(f"{name}.")] for name in KEPT_STATES}
        self.target, self.draft, self.ahead = (kept[name] for name in KEPT_STATES)
        return done

    def _counted(self) -> dict[str, Tensor]:
        """The tensors that are counted in, by name."""
        counted = self.tally.counted() | {"trace": self.trace.rows, "draft_trace": self.draft_trace.rows}
        for name, tally in (("agreement", self.agreement), ("agreement_next", self.agreement_next)):
            counted |= {f"{name}.common": tally.common, f"{name}.chosen": tally.chosen}
        return counted

    def _count(self, row: int) -> Observer:
        def observe(trace: LayerTrace) -> None:
            index = trace.top_k_index
            self.chosen.append(index)
            self.tally.add(self.domain[trace.sequence], row, index)
            self.trace.add(trace.sequence, row, index)

        return observe

    def _compare(self, row: int) -> Observer:
        def observe(trace: LayerTrace) -> None:
            index = trace.top_k_index
            self.agreement.add(self.domain[trace.sequence], row, self.chosen[trace.sequence], index)
            self.draft_trace.add(trace.sequence, row, index)

        return observe

    def _compare_next(self, row: int) -> Observer:
        def observe(trace: LayerTrace) -> None:
            domain = self.domain[trace.sequence]
            self.agreement_next.add(domain, row, self.chosen[trace.sequence], trace.top_k_index)

        return observe

    def _use_draft_experts(self, layer: StreamedLayer) -> None:
        if self.quantized is not None and layer.is_moe:
            layer.experts = None  # the source's go before the draft's come: one layer in memory
            layer.experts = self.quantized.read_layer(layer.layer_id, self.stream.dtype, self.stream.device)

    def _tensors(self) -> dict[str, Tensor]:
        counts = self.tally.counts.sum(-1)
        tokens = [sum(len(s.input_ids) for s in self.sequences if s.domain == name) for name in self.names]
        expected = torch.tensor(tokens)[:, None] * self.stream.spec.top_k
        assert (counts == expected).all(), f"{counts.tolist()} uses counted for {tokens} tokens"
        tensors = self.tally.tensors()
        tensors["trace"] = self.trace.rows
        tensors["trace_starts"] = self.trace.starts
        tensors["trace_domain"] = torch.tensor(self.domain[: len(self.trace.starts)], dtype=torch.int64)
        if self.quantized is not None:
            tensors["agreement"] = self.agreement.shares()
            tensors["agreement_next"] = self.agreement_next.shares()
            tensors["draft_trace"] = self.draft_trace.rows
        return tensors

    def _figures(self, target: list[Tensor], draft: list[Tensor], quantized_sha256: str) -> DraftFigures:
        agreement, agreement_next = self.agreement.shares().tolist(), self.agreement_next.shares().tolist()
        outputs = [OutputTally() for _ in self.names]
        for domain, ours, theirs in zip(self.domain, target, draft, strict=True):
            for start in range(0, len(ours), LOGIT_ROWS):
                rows = slice(start, start + LOGIT_ROWS)
                outputs[domain].add(self.stream.logits(ours[rows]), self.stream.logits(theirs[rows]))
        by_name = list(enumerate(self.names))
        return DraftFigures(
            quantized_sha256=quantized_sha256,
            agreement={name: mean_or_none(agreement[i]) for i, name in by_name},
            agreement_next={name: mean_or_none(agreement_next[i]) for i, name in by_name},
            agreement_by_layer={name: tuple(number_or_none(value) for value in agreement[i]) for i, name in by_name},
            greedy={name: outputs[i].share(outputs[i].same) for i, name in by_name},
            overlap={name: outputs[i].share(outputs[i].overlap) for i, name in by_name},
            compared_tokens={name: outputs[i].tokens for i, name in by_name},
        )


def prefix(lengths: list[int], max_tokens: int) -> int:
    """How many of the first sequences hold at most `max_tokens` tokens together, at least one."""
    total = 0
    for count, length in enumerate(lengths):
        total += length
        if total > max_tokens:
            return max(count, 1)
    return len(lengths)
