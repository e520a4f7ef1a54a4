"""The probe as a step of the profile: measured once, its answers one variant at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

from moespeq_cli.profile.answers import Answers
from moespeq_cli.profile.measure import TextSequence
from moespeq_cli.profile.probe import Probe, Variant
from moespeq_cli.profile.work import Work
from runtime.artifacts.manifest import parse
from runtime.artifacts.profile import ProbeFigures
from runtime.model.stream import LayerStream

PROBE_COPIES = 22  # hidden states of as many variants, most models have ten classes, and the target's before and after
STEP = "probe"


def measure_probe(
    stream: LayerStream,
    sequences: Sequence[TextSequence],
    domain_names: Sequence[str],
    num_problems: int,
    work: Work,
    advance: Callable[[], None] = lambda: None,
) -> ProbeFigures:
    """Round one class of linears at a time and compare.

    Args:
        stream: of the model, float32.
        sequences: the texts.
        domain_names: in order.
        num_problems: embedded problems to answer with each variant; above 0 only where the model is the embedded one.
        work: where finished steps are kept.
        advance: called after each layer and after the logits; where they are done already, so often at once.
    """
    if STEP in work.journal.done:
        for _ in range(stream.spec.num_layers + 1):
            advance()
    else:
        measured = Probe(stream, sequences, domain_names).measure(advance)
        work.journal.mark(STEP, json.loads(json.dumps(asdict(measured))))
    figures: ProbeFigures = parse(ProbeFigures, work.journal.done[STEP], "probe")
    return _answered(figures, num_problems, work) if num_problems else figures


def _answered(figures: ProbeFigures, num_problems: int, work: Work) -> ProbeFigures:
    """The figures with the share of problems that each variant answers right."""
    answers: Answers | None = None

    def exact_match(variant: Variant | None) -> float:
        nonlocal answers
        step = "answers" if variant is None else f"answers {variant.module_class} {variant.bits}"
        if step not in work.journal.done:
            answers = answers or Answers(num_problems)
            work.journal.mark(step, {"exact_match": answers.exact_match(variant)})
        return float(work.journal.done[step]["exact_match"])

    plain = exact_match(None)
    rows = tuple(replace(row, exact_match=exact_match(Variant(row.module_class, row.bits))) for row in figures.rows)
    return replace(figures, problems=num_problems, exact_match=plain, rows=rows)
