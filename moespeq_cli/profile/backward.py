"""The backward pass over all layers, step by step on disk, and the tensors that it leaves in the profile."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moespeq_cli.profile.measure import TextSequence
from moespeq_cli.profile.rounding import GROUP_SIZE
from moespeq_cli.profile.scores import BITS, Scores
from moespeq_cli.profile.sensitivity import SensitivityPass
from moespeq_cli.profile.work import Work
from runtime.artifacts.profile import SensitivityFigures
from runtime.model.stream import LayerStream

STEP = "backward"  # its number is the layer that is done; one past the last layer is the head


def measure_sensitivity(
    stream: LayerStream,
    sequences: Sequence[TextSequence],
    domain_names: Sequence[str],
    work: Work,
    advance: Callable[[], None] = lambda: None,
) -> tuple[SensitivityFigures, dict[str, Tensor]]:
    """Weigh every linear of the model.

    Args:
        stream: of the model; float32 whatever the profile's own arithmetic is.
        sequences: those whose inputs of every layer `work` holds.
        domain_names: in the order of the domain axis.
        work: where steps are kept.
        advance: called after each step, those of an earlier run included.

    Returns:
        The figures, and the tensors of sensitivity.safetensors.
    """
    num_layers = stream.spec.num_layers
    stream.embed([sequence.input_ids for sequence in sequences])  # for masks and positions
    backward = SensitivityPass(stream, sequences, domain_names)
    done = work.numbers(STEP)
    first = min(done, default=num_layers + 1)
    for _ in done:
        advance()
    if first > num_layers:
        scores, gradients, losses = backward.head(work.reader("inputs", num_layers))
        stream.drop_head()
        _keep(work, num_layers, scores, gradients, losses=losses.tolist())
        first = num_layers
        advance()
    else:
        kept = work.load("gradient", first)
        gradients = [kept[name] for name in sorted(kept)]
    for layer in stream.layers(reversed(range(first))):
        number = layer.layer_id
        scores, gradients = backward.layer(layer, work.reader("inputs", number), gradients)
        _keep(work, number, scores, gradients)
        work.drop("gradient", number + 1)
        advance()
    return _gather(work, num_layers, sequences, domain_names)


def _keep(work: Work, number: int, scores: Scores, gradients: list[Tensor], **record: object) -> None:
    """Write the gradients first: the mark of the step stands for both files."""
    work.save("gradient", number, {f"{place:06d}": tensor for place, tensor in enumerate(gradients)})
    work.save(STEP, number, scores.tensors(), **record)


def _gather(
    work: Work, num_layers: int, sequences: Sequence[TextSequence], domain_names: Sequence[str]
) -> tuple[SensitivityFigures, dict[str, Tensor]]:
    """Sums of all steps as means a predicted token."""
    tokens = [sum(len(s.input_ids) - 1 for s in sequences if s.domain == name) for name in domain_names]
    losses = work.journal.done[f"{STEP} {num_layers}"]["losses"]
    tensors: dict[str, Tensor] = {}
    rows = []
    for number in range(num_layers + 1):
        found = work.load(STEP, number)
        for key in sorted(found):
            kind, _, name = key.partition(" ")
            if kind == "channels":
                tensors[name] = (found[key] / max(sum(tokens), 1)).to(torch.float32)
                rows.append(found[f"domains {name}"] / torch.tensor(tokens).clamp(min=1))
    figures = SensitivityFigures(
        bits=BITS,
        group_size=GROUP_SIZE,
        sequences=len(sequences),
        tokens=dict(zip(domain_names, tokens, strict=True)),
        loss={n: loss / count if count else None for n, loss, count in zip(domain_names, losses, tokens, strict=True)},
        linears=tuple(tensors),
    )
    return figures, tensors | {"domains": torch.stack(rows)}
