"""Text and results on stdout, whatever its encoding and whoever reads it; figures in a file."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

from moespeq_cli import console
from runtime.artifacts.manifest import write_json
from runtime.errors import InputError, StorageError


def prepare_stdout() -> None:
    """Characters that stdout cannot encode are written as escapes instead of ending the run."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        with contextlib.suppress(ValueError, OSError):
            sys.stdout.reconfigure(errors="backslashreplace")


def write_result(result: dict[str, Any]) -> None:
    """One JSON object on a line of its own, in ASCII, which every reader takes."""
    console.write(json.dumps(result) + "\n")


def write_figures(path: Path, figures: dict[str, Any]) -> None:
    """All figures as one JSON object: by rename into a file, straight into what is none (a pipe, /dev/null).

    Raises:
        InputError: the path is a folder.
        StorageError: it cannot be written.
    """
    place = path.resolve()
    if place.is_dir():
        raise InputError(expected="a file for --stats", found=f"the folder {path}", mend="name a file in it")
    try:
        if place.exists() and not place.is_file():
            place.write_text(json.dumps(figures) + "\n", encoding="utf-8")
            return
        place.parent.mkdir(parents=True, exist_ok=True)
        write_json(place, figures)
    except OSError as error:
        raise StorageError(
            expected=f"to write the figures to {path}",
            found=error.strerror or str(error),
            mend="choose another place with --stats",
        ) from error


def claim_figures(path: Path) -> None:
    """Fail now, not after the run, where a file for the figures cannot be written; what it held before is gone.

    Raises:
        InputError, StorageError: as `write_figures`.
    """
    if not path.exists() or path.is_file() or path.is_dir():
        write_figures(path, {"finished": False})
