"""Text and results on stdout, whatever its encoding and whoever reads it."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from typing import Any


def prepare_stdout() -> None:
    """Characters that stdout cannot encode are written as escapes instead of ending the run."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        with contextlib.suppress(ValueError, OSError):
            sys.stdout.reconfigure(errors="backslashreplace")


def write_piece(text: str) -> None:
    """A piece of the answer, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def write_result(result: dict[str, Any]) -> None:
    """One JSON object on a line of its own, in ASCII, which every reader takes."""
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()
