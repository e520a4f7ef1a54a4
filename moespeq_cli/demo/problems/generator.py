"""Random word problems, and the 500 of them that no training run may see."""

from __future__ import annotations

import hashlib
import itertools
import random
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from moespeq_cli.demo.problems import counting, crowds, measures, money
from moespeq_cli.demo.problems.protagonist import TEMPLATES, Protagonist

HELD_OUT_SEED = 20_260_101
HELD_OUT_COUNT = 500
TEMPLATE_GROUPS = (counting, crowds, measures, money)  # importing them fills TEMPLATES

_IN_ORDER = sorted(TEMPLATES)  # a seed stands for the same problems only in one order of the templates
_ANSWER = re.compile(r"####\s*(-?\d+)")


@dataclass(frozen=True, slots=True)
class Problem:
    """A word problem, its worked answer (the last line is `#### number`) and the template it came from."""

    question: str
    answer: str
    number: int
    template: str

    @property
    def prompt(self) -> str:
        """What the model is asked to continue; its chat template renders a user's message so."""
        return f"Question: {self.question}\nAnswer:"

    @property
    def text(self) -> str:
        """The problem as a training document."""
        return f"{self.prompt} {self.answer}"


def make_problem(rng: random.Random, template: str | None = None) -> Problem:
    """One random problem, of the named template or of a random one."""
    name = rng.choice(_IN_ORDER) if template is None else template
    question, steps, number = TEMPLATES[name](Protagonist(rng))
    return Problem(question, "\n".join(steps) + f"\n#### {number}", number, name)


def held_out_problems(count: int = HELD_OUT_COUNT) -> list[Problem]:
    """The first `count` held-out problems, the same ones every time, no question twice."""
    return list(itertools.islice(distinct_problems(random.Random(HELD_OUT_SEED)), count))


def distinct_problems(rng: random.Random, exclude: Collection[str] = ()) -> Iterator[Problem]:
    """Endless problems; none has a question that came before or whose `question_key` is in `exclude`."""
    seen = set(exclude)
    while True:
        problem = make_problem(rng)
        key = question_key(problem.question)
        if key not in seen:
            seen.add(key)
            yield problem


def question_key(question: str) -> str:
    """A short digest by which questions are compared."""
    return hashlib.blake2b(question.encode(), digest_size=8).hexdigest()


def answer_of(text: str) -> str | None:
    """The number after the first `####`, as written; None where the text has none."""
    found = _ANSWER.search(text)
    return found.group(1) if found else None
