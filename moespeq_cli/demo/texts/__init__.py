"""Readers of the texts written for this project: prose passages and the openings that a model continues."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any


def read_rows(name: str) -> list[dict[str, Any]]:
    """The rows of one JSON lines file of this folder."""
    text = files(__name__).joinpath(name).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]
