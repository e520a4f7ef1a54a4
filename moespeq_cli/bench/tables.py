"""Figures as Markdown tables, the form the docs have."""

from __future__ import annotations

from collections.abc import Sequence


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; every row has as many cells as the head."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def percent(value: float | None, digits: int = 1) -> str:
    """A share as a percentage, n/a where nothing was counted."""
    return "n/a" if value is None else f"{100 * value:.{digits}f} %"


def number(value: float | None, digits: int = 2) -> str:
    """A figure with so many decimals, n/a where there is none."""
    return "n/a" if value is None else f"{value:.{digits}f}"
