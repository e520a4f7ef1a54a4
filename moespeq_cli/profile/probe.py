"""One class of linears rounded at a time, all else as it is: what that does to routing, logits and loss."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from moespeq_cli.profile.measure import TextSequence
from moespeq_cli.profile.modules import CLASSES, HEAD, module_class
from moespeq_cli.profile.rounding import rounded
from moespeq_cli.profile.routing import AgreementTally, chosen_experts
from runtime.artifacts.profile import EXPERT_LINEARS, ProbeFigures, ProbeRow, expert_linear
from runtime.model.families import LayerExperts
from runtime.model.stream import LayerStream, LayerTrace, Observer, StreamedLayer

PROBE_BITS = (8, 4)


@dataclass(frozen=True, slots=True)
class Variant:
    """The model with the linears of one class rounded."""

    module_class: str
    bits: int


def layer_linears(layer: StreamedLayer) -> dict[str, str]:
    """The class of each linear of a layer, by name; the routed experts' as one linear a projection."""
    prefix = f"layers.{layer.layer_id}."
    names = [
        prefix + name.removesuffix(".weight")
        for name, parameter in layer.module.named_parameters()
        if parameter.dim() == 2
    ]
    if layer.is_moe:
        names += [expert_linear(layer.layer_id, projection) for projection in EXPERT_LINEARS]
    return {name: module_class(name) for name in names}


@contextlib.contextmanager
def rounded_in(layer: StreamedLayer, variant: Variant) -> Iterator[None]:
    """The current layer with the class's linears rounded; as it was afterwards."""
    classes, prefix, experts = layer_linears(layer), f"layers.{layer.layer_id}.", layer.experts
    kept = []
    for name, parameter in layer.module.named_parameters():
        if classes.get(prefix + name.removesuffix(".weight")) == variant.module_class:
            kept.append((parameter, parameter.data))
            parameter.data = rounded(parameter.data, variant.bits).to(parameter.dtype)
    changed = _rounded_experts(layer.layer_id, experts, variant) if experts is not None else None
    try:
        if changed is not None:
            layer.experts = changed
        yield
    finally:
        for parameter, data in kept:
            parameter.data = data
        if changed is not None:
            layer.experts = experts


def _rounded_experts(layer_id: int, experts: LayerExperts, variant: Variant) -> LayerExperts | None:
    changed = {
        projection: rounded(getattr(experts, projection), variant.bits)
        for projection in EXPERT_LINEARS
        if module_class(expert_linear(layer_id, projection)) == variant.module_class
    }
    return replace(experts, **changed) if changed else None


class _Outputs:
    """Sums over positions of how one model's logits differ from the target's."""

    def __init__(self) -> None:
        self.tokens, self.predicted, self.kl, self.greedy, self.loss = 0, 0, 0.0, 0, 0.0

    def add(self, target: Tensor, other: Tensor, input_ids: Tensor) -> None:
        """Count one sequence: log probabilities [T, vocab_size] of both."""
        self.tokens += len(target)
        self.predicted += len(target) - 1
        self.kl += float((target.exp() * (target - other)).sum(dtype=torch.float64))
        self.greedy += int((target.argmax(-1) == other.argmax(-1)).sum())
        self.loss += (
            float(F.nll_loss(other[:-1], input_ids[1:].to(other.device), reduction="sum")) if len(target) > 1 else 0.0
        )

    def mean(self, value: float, count: int) -> float | None:
        """None where nothing was counted."""
        return value / count if count else None


class _Routing:
    """How one variant's choices differ from the target's, by domain, all layers together."""

    def __init__(self, num_domains: int, num_experts: int) -> None:
        self.num_experts = num_experts
        self.shares = AgreementTally(num_domains, 1, num_experts)
        self.same, self.rows = [0] * num_domains, [0] * num_domains

    def add(self, domain: int, target: Tensor, other: Tensor) -> None:
        self.shares.add(domain, 0, target, other)
        alike = chosen_experts(target, self.num_experts) == chosen_experts(other, self.num_experts)
        self.same[domain] += int(alike.all(1).sum())
        self.rows[domain] += len(target)


class Probe:
    """All variants through the layers side by side, one layer in memory."""

    def __init__(self, stream: LayerStream, sequences: Sequence[TextSequence], domain_names: Sequence[str]) -> None:
        self.stream, self.sequences, self.names = stream, sequences, list(domain_names)
        self.domain = [self.names.index(sequence.domain) for sequence in sequences]
        self.routing: dict[Variant, _Routing] = {}
        self.weights: dict[str, int] = {}

    def measure(self, advance: Callable[[], None] = lambda: None) -> ProbeFigures:
        """Round every class that the model has, at 8 and at 4 bits.

        Args:
            advance: called after each layer, and after the logits.
        """
        target = self.stream.embed([sequence.input_ids for sequence in self.sequences])
        states: dict[Variant, list[Tensor]] = {}
        for layer in self.stream.layers():
            self._count_weights(layer)
            for kind in set(layer_linears(layer).values()):
                for bits in PROBE_BITS:
                    states.setdefault(Variant(kind, bits), target)  # until here it was the target
            chosen: dict[int, Tensor] = {}
            target = layer.forward(target, _record(chosen) if layer.is_moe else None)
            for variant, hidden in states.items():
                with rounded_in(layer, variant):
                    observe = self._compare(variant, chosen) if layer.is_moe else None
                    states[variant] = layer.forward(hidden, observe)
            advance()
        for bits in PROBE_BITS:
            states[Variant(HEAD, bits)] = target
        self.weights[HEAD] = self.stream.head_weight.numel()
        figures = self._figures(target, states)
        advance()
        return figures

    def _count_weights(self, layer: StreamedLayer) -> None:
        sizes = dict(layer.module.named_parameters())
        prefix = f"layers.{layer.layer_id}."
        for name, kind in layer_linears(layer).items():
            plain = name.removeprefix(prefix)
            if f"{plain}.weight" in sizes:
                size = sizes[f"{plain}.weight"].numel()
            else:
                size = getattr(layer.experts, plain.rpartition(".")[2]).numel()
            self.weights[kind] = self.weights.get(kind, 0) + size

    def _compare(self, variant: Variant, chosen: dict[int, Tensor]) -> Observer:
        tally = self.routing.setdefault(variant, _Routing(len(self.names), self.stream.spec.num_experts))

        def observe(trace: LayerTrace) -> None:
            tally.add(self.domain[trace.sequence], chosen[trace.sequence], trace.top_k_index)

        return observe

    def _figures(self, target: list[Tensor], states: dict[Variant, list[Tensor]]) -> ProbeFigures:
        outputs = {variant: [_Outputs() for _ in self.names] for variant in states}
        plain = [_Outputs() for _ in self.names]
        heads = {bits: rounded(self.stream.head_weight, bits).to(self.stream.dtype) for bits in PROBE_BITS}
        for place, (domain, sequence) in enumerate(zip(self.domain, self.sequences, strict=True)):
            ours = self.stream.logits(target[place]).float().log_softmax(-1)
            plain[domain].add(ours, ours, sequence.input_ids)
            for variant, hidden in states.items():
                theirs = self._logits(hidden[place], heads[variant.bits] if variant.module_class == HEAD else None)
                outputs[variant][domain].add(ours, theirs.float().log_softmax(-1), sequence.input_ids)
        order = [Variant(kind, bits) for kind in CLASSES for bits in PROBE_BITS]
        return ProbeFigures(
            tokens={name: plain[i].tokens for i, name in enumerate(self.names)},
            loss={name: out.mean(out.loss, out.predicted) for name, out in zip(self.names, plain, strict=True)},
            problems=0,
            exact_match=None,
            rows=tuple(self._row(variant, outputs[variant]) for variant in order if variant in outputs),
        )

    @torch.no_grad()
    def _logits(self, hidden: Tensor, head: Tensor | None) -> Tensor:
        return self.stream.head(self.stream.normed(hidden), head)

    def _row(self, variant: Variant, outputs: list[_Outputs]) -> ProbeRow:
        routing = self.routing.get(variant)
        shares = [None] * len(self.names) if routing is None else routing.shares.shares()[:, 0].tolist()
        same: list[float | None] = [None] * len(self.names)
        if routing is not None:
            same = [s / rows if rows else None for s, rows in zip(routing.same, routing.rows, strict=True)]
        by_domain = list(zip(self.names, outputs, strict=True))
        return ProbeRow(
            module_class=variant.module_class,
            bits=variant.bits,
            weights=self.weights[variant.module_class],
            agreement={name: None if s is None or s != s else s for name, s in zip(self.names, shares, strict=True)},
            same_set=dict(zip(self.names, same, strict=True)),
            kl={name: out.mean(out.kl, out.tokens) for name, out in by_domain},
            greedy={name: out.mean(out.greedy, out.tokens) for name, out in by_domain},
            loss={name: out.mean(out.loss, out.predicted) for name, out in by_domain},
            exact_match=None,
        )


def _record(chosen: dict[int, Tensor]) -> Observer:
    def observe(trace: LayerTrace) -> None:
        chosen[trace.sequence] = trace.top_k_index

    return observe
