"""A text out of an engine, with the logits behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from runtime.decode.sampling import SamplingSettings
from runtime.engine import BaseEngine, Request

Logits = dict[tuple[int, ...], Tensor]
"""By the whole text before them, the logits that the target last computed; rows after an unknown text are left out."""


def say(
    engine: BaseEngine, prompt: Sequence[int], count: int, logits: Logits, sampling: SamplingSettings | None = None
) -> list[int]:
    """Generate, and add to `logits`."""
    text, inner = list(prompt), engine.rows

    def rows(tokens: Sequence[int], position: int, *begun: Any) -> Any:
        scores, routes = inner(tokens, position, *begun)
        for row, score in enumerate(scores):
            known = (*text[:position], *tokens[: row + 1])
            if len(known) == position + row + 1:
                logits[known] = score.values().clone()  # type: ignore[operator]
        return scores, routes

    engine.rows = rows  # type: ignore[method-assign]
    try:
        for token in engine.generate(Request(prompt, count, frozenset(), sampling or SamplingSettings())):
            text.append(token)
    finally:
        engine.rows = inner  # type: ignore[method-assign]
    return text[len(prompt) :]
