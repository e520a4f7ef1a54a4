"""The person a word problem is about, and the register of problem templates."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

from moespeq_cli.demo.problems.words import HE, SHE

T = TypeVar("T")
Worked: TypeAlias = tuple[str, list[str], int]  # the question, the steps of its solution, the result


class Protagonist:
    """A name with its pronouns, and the source of every random choice of one problem."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        if rng.random() < 0.5:
            self.name, self.he, self.his = rng.choice(SHE), "she", "her"
        else:
            self.name, self.he, self.his = rng.choice(HE), "he", "his"
        self.He = self.he.capitalize()

    def other(self) -> str:
        """The name of somebody else."""
        while True:
            name = self.rng.choice(SHE if self.rng.random() < 0.5 else HE)
            if name != self.name:
                return name

    def pick(self, options: Sequence[T]) -> T:
        """One of the options."""
        return self.rng.choice(options)

    def choose(self, *wordings: str) -> str:
        """One of several wordings of the question."""
        return self.rng.choice(wordings)

    def int(self, low: int, high: int) -> int:
        """A number from low to high, both included."""
        return self.rng.randint(low, high)


Template: TypeAlias = Callable[[Protagonist], Worked]
TEMPLATES: dict[str, Template] = {}


def template(make: Template) -> Template:
    """Register a template under its function's name; a trailing underscore only avoids a keyword."""
    TEMPLATES[make.__name__.rstrip("_")] = make
    return make


def count_of(number: int, singular: str, plural: str | None = None) -> str:
    """`1 week`, `2 weeks`."""
    return f"{number} {singular if number == 1 else plural or singular + 's'}"
