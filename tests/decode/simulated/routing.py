"""Which experts the rows of a text go to."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate

from runtime.decode.loop import Route
from tests.decode.simulated.constants import Model

_BEYOND = 40  # rows after the text's end that a tail may reach

Row = list[list[int]]
"""Experts by layer."""


@dataclass(frozen=True, slots=True)
class Likeness:
    """How much routing is alike, as in the built Qwen1.5-MoE (docs/gpu.md, "Measured").

    Attributes:
        skew: of the experts' popularity, sigma of a log-normal distribution; 0.5 leaves 95 % of the entropy.
        kept: chance that an expert of the row before is kept; those drawn anew may be of that row too, 26 % in all.
        agreed: chance that an expert of the draft is the target's.
        right: chance that a proposal after a right one is right.
    """

    skew: float = 0.5
    kept: float = 0.2
    agreed: float = 0.95
    right: float = 0.985


BUILT = Likeness()


class Routing:
    """Experts by position, and where the draft goes wrong. The token at a position is called by the position.

    A wrong token has the position's negative; what follows one is wrong too. Its rows are routed alike by draft and
    target, differently from those of the text.

    Args:
        model: sizes.
        length: of the text, prompt and new tokens.
        seed: of the text.
        likeness: how much is alike.

    Nothing depends on how it is decoded: ways of decoding meet the same routing, also after a wrong token.

    Attributes:
        seed: of the text.
        text: by position.
    """

    def __init__(self, model: Model, length: int, seed: int, likeness: Likeness = BUILT) -> None:
        self.seed = seed
        self._random, self._model, self._likeness = random.Random(seed), model, likeness
        draw, rows = self._random, range(length + _BEYOND)
        popularity = [
            [draw.lognormvariate(0, likeness.skew) for _ in range(model.experts)] for _ in range(model.layers)
        ]
        self._popularity = [list(accumulate(weights)) for weights in popularity]
        self.text: list[Row] = []
        for _ in rows:
            self.text.append(self._row_after(self.text[-1] if self.text else None))
        self._drafted = [self._redrawn(row) for row in self.text]
        self._wrong_from = [draw.random() > likeness.right for _ in rows]
        self._strayed = [self._row_after(self.text[position - 1]) for position in rows]

    def by_target(self, token: int, position: int) -> Route:
        """The target's experts of an input."""
        return _route(self.text[position] if token == position else self._strayed[position])

    def by_draft(self, token: int, position: int) -> Route:
        """The draft's."""
        return _route(self._drafted[position] if token == position else self._strayed[position])

    def after(self, token: int, position: int) -> int:
        """What the target says follows an input; after a wrong one something that no draft proposes."""
        return position + 1 if token == position else -1

    def proposed(self, token: int, position: int) -> int:
        """What the draft proposes after an input."""
        following = position + 1
        return following if token == position and not self._wrong_from[following] else -following

    def _row_after(self, before: Row | None) -> Row:
        row: Row = []
        for layer in range(self._model.layers):
            chosen: list[int] = []
            if before is not None:
                chosen = [expert for expert in before[layer] if self._random.random() < self._likeness.kept]
            while len(chosen) < self._model.top_k:
                chosen.append(self._another(layer, chosen))
            row.append(chosen)
        return row

    def _redrawn(self, row: Row) -> Row:
        drafted = [list(chosen) for chosen in row]
        for layer, chosen in enumerate(drafted):
            for place in range(len(chosen)):
                if self._random.random() > self._likeness.agreed:
                    chosen[place] = self._another(layer, chosen)
        return drafted

    def _another(self, layer: int, taken: list[int]) -> int:
        """An expert that is not taken, by popularity."""
        while True:
            (expert,) = self._random.choices(range(self._model.experts), cum_weights=self._popularity[layer])
            if expert not in taken:
                return expert


def _route(row: Row) -> Route:
    return [(layer, expert) for layer, chosen in enumerate(row) for expert in chosen]
