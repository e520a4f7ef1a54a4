"""How much finer layers improve the draft: each layer quantised once in each form, then every mixture of forms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moespeq_cli.bench.tables import markdown, percent
from moespeq_cli.profile.charts import LineChart, line_alt
from moespeq_cli.profile.measure import TextSequence
from moespeq_cli.profile.outputs import OutputTally
from moespeq_cli.profile.routing import AgreementTally
from moespeq_cli.quantize.build import quantize
from moespeq_cli.quantize.plan import QuantizeOptions
from runtime.artifacts.quantized import Quantized
from runtime.model.stream import LayerStream, LayerTrace, Observer

PLAIN = "plain"  # 4 bits, groups of 128
FORMS = {PLAIN: 0, "8 bits": 8, "4 bits": 4}  # of a layer: the default, or one scale an output channel


@dataclass(frozen=True, slots=True)
class Mixture:
    """A draft: some layers in a finer form, the others plain."""

    form: str
    layers: tuple[int, ...]


def quantize_forms(
    model: str, folder: Path, moe_layers: Sequence[int], say: Callable[[str], None]
) -> dict[str, Quantized]:
    """The model with all layers in each form; a layer's result does not depend on the other layers' form."""
    found = {}
    for form, bits in FORMS.items():
        out = folder / form.replace(" ", "-")
        sensitive = tuple(moe_layers) if bits else ()
        say(f"quantising every layer: {form}")
        quantize(QuantizeOptions(model, out, sensitive_layers=sensitive, sensitive_bits=bits or 8))
        found[form] = Quantized.open(out)
    return found


def mixtures(ranking: Sequence[int]) -> list[Mixture]:
    """Growing shares of the layers by rank, in both finer forms; and each single layer at 8 bits."""
    grown = [Mixture(PLAIN, ())]
    for form in list(FORMS)[1:]:
        grown += [Mixture(form, tuple(ranking[:count])) for count in range(1, len(ranking) + 1)]
    return grown + [Mixture("8 bits", (layer,)) for layer in ranking[1:]]


class MixtureRun:
    """All mixtures through the layers side by side, over hidden states of their own."""

    def __init__(self, stream: LayerStream, sequences: Sequence[TextSequence], forms: Mapping[str, Quantized]) -> None:
        self.stream, self.sequences, self.forms = stream, sequences, forms
        self.names = sorted({sequence.domain for sequence in sequences})
        self.domain = [self.names.index(sequence.domain) for sequence in sequences]

    def measure(self, drafts: Sequence[Mixture], advance: Callable[[], None]) -> list[dict[str, Any]]:
        """By mixture and domain: routing agreement, greedy agreement and overlap; and the bytes of the experts."""
        spec = self.stream.spec
        target = self.stream.embed([sequence.input_ids for sequence in self.sequences])
        states = {draft: target for draft in drafts}
        routing = {draft: AgreementTally(len(self.names), 1, spec.num_experts) for draft in drafts}
        sizes = dict.fromkeys(drafts, 0)
        for layer in self.stream.layers():
            chosen: dict[int, Tensor] = {}
            target = layer.forward(target, _record(chosen) if layer.is_moe else None)
            for form in FORMS:
                if layer.is_moe:
                    layer.experts = self.forms[form].read_layer(layer.layer_id, self.stream.dtype, self.stream.device)
                for draft in drafts:
                    if (draft.form if layer.layer_id in draft.layers else PLAIN) == form:
                        observe = self._compare(routing[draft], chosen) if layer.is_moe else None
                        states[draft] = layer.forward(states[draft], observe)
                        sizes[draft] += expert_bytes(self.forms[form], layer.layer_id) if layer.is_moe else 0
            advance()
        return [self._row(draft, target, states[draft], routing[draft], sizes[draft]) for draft in drafts]

    def _compare(self, tally: AgreementTally, chosen: dict[int, Tensor]) -> Observer:
        def observe(trace: LayerTrace) -> None:
            tally.add(self.domain[trace.sequence], 0, chosen[trace.sequence], trace.top_k_index)

        return observe

    @torch.no_grad()
    def _row(
        self, draft: Mixture, target: list[Tensor], states: list[Tensor], routing: AgreementTally, size: int
    ) -> dict[str, Any]:
        outputs = [OutputTally() for _ in self.names]
        for domain, ours, theirs in zip(self.domain, target, states, strict=True):
            outputs[domain].add(self.stream.logits(ours), self.stream.logits(theirs))
        by_domain = list(enumerate(self.names))
        return {
            "form": draft.form,
            "layers": list(draft.layers),
            "expert_bytes": size,
            "routing_agreement": {name: float(routing.shares()[i, 0]) for i, name in by_domain},
            "greedy_agreement": {name: outputs[i].share(outputs[i].same) for i, name in by_domain},
            "sampled_acceptance": {name: outputs[i].share(outputs[i].overlap) for i, name in by_domain},
        }


def expert_bytes(quantized: Quantized, layer_id: int) -> int:
    """Bytes of a layer's routed experts in the folder."""
    inside = f"model.layers.{layer_id}.mlp.experts."
    tensors = quantized.checkpoint.tensors.items()
    return sum(info.end - info.start for name, info in tensors if name.startswith(inside))


def _record(chosen: dict[int, Tensor]) -> Observer:
    def observe(trace: LayerTrace) -> None:
        chosen[trace.sequence] = trace.top_k_index

    return observe


def curve(result: dict[str, Any], name: str) -> LineChart:
    """Sampled acceptance by how many layers are finer, the most sensitive first; a line a form and domain.

    Args:
        result: as the benchmark writes it.
        name: of the picture's file.
    """
    ranking = [layer for layer, _ in result["ranking"]]
    grown = {
        (row["form"], len(row["layers"])): row
        for row in result["rows"]
        if row["layers"] == ranking[: len(row["layers"])]
    }
    counts, forms = range(len(ranking) + 1), list(FORMS)[1:]
    lines = {
        f"{domain}, {form}": [grown[form if count else PLAIN, count]["sampled_acceptance"][domain] for count in counts]
        for form in forms
        for domain in result["domains"]
    }
    megabytes = [grown[forms[0] if count else PLAIN, count]["expert_bytes"] / 1e6 for count in counts]
    chart = LineChart(
        name=name,
        title="What finer layers buy: acceptance by the share of the layers",
        alt="",
        x_label=f"layers with one scale an output channel, the most sensitive first; MB of all experts at {forms[0]}",
        y_label="expected acceptance, sampled",
        x_ticks=tuple(f"{count}\n{size:.2f} MB" for count, size in zip(counts, megabytes, strict=True)),
        series=lines,
    )
    return replace(chart, alt=line_alt("Expected acceptance by how many layers are finer", chart))


def table(result: dict[str, Any]) -> str:
    """Markdown; triples are the domains in order."""
    rows = []
    for row in result["rows"]:
        shares = [
            " / ".join(percent(value) for value in row[key].values())
            for key in ("sampled_acceptance", "greedy_agreement", "routing_agreement")
        ]
        layers = ", ".join(map(str, row["layers"])) or "none"
        rows.append((layers, row["form"], f"{row['expert_bytes'] / 1e6:.2f}", *shares))
    domains = " / ".join(result["domains"])
    return markdown(
        (
            "finer layers", "their form", "MB of experts", f"sampled acceptance, {domains}", "greedy agreement",
            "same experts",
        ),
        rows,
    )  # fmt: skip
