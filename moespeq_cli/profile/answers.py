"""The embedded model's answers to its held-out problems, with the linears of one class rounded at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from moespeq_cli.demo import Problem, answer_of, checkpoint_path, evaluation_problems
from moespeq_cli.demo.evaluate import Subject
from moespeq_cli.profile.modules import HEAD, module_class
from moespeq_cli.profile.probe import Variant
from moespeq_cli.profile.rounding import rounded
from runtime.threads import set_threads


class Answers:
    """The whole embedded model in memory, in float32; problems are answered greedily."""

    def __init__(self, num_problems: int) -> None:
        set_threads(0, 0)
        self.problems: list[Problem] = evaluation_problems()[:num_problems]
        self.subject = Subject(checkpoint_path(), "float32", "cpu")

    def exact_match(self, variant: Variant | None) -> float:
        """The share of the problems answered right by the model, or by a variant of it."""
        with contextlib.nullcontext() if variant is None else _rounded(self.subject.model, variant):
            outputs = list(self.subject.continue_greedily([problem.prompt for problem in self.problems]))
        right = [answer_of(text) == str(p.number) for text, p in zip(outputs, self.problems, strict=True)]
        return sum(right) / len(right)


@contextlib.contextmanager
def _rounded(model: Any, variant: Variant) -> Iterator[None]:
    kept = []
    head = model.lm_head.weight
    if variant.module_class == HEAD:  # shared with the embedding, which is to stay
        model.lm_head.weight = nn.Parameter(rounded(head.data, variant.bits), requires_grad=False)
    for name, parameter in model.named_parameters():
        plain = name.removeprefix("model.").removesuffix(".weight").replace("gate_up_proj", "up_proj")
        kind = module_class(plain)
        if parameter.dim() >= 2 and kind == variant.module_class and kind != HEAD:
            kept.append((parameter, parameter.data))
            parameter.data = rounded(parameter.data, variant.bits).to(torch.float32)
    try:
        yield
    finally:
        model.lm_head.weight = head
        for parameter, data in kept:
            parameter.data = data
