"""What goes where: data on stdout, everything for a person on stderr."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

stderr = Console(stderr=True, highlight=False)


class Progress(Protocol):
    """A running count of finished work."""

    def advance(self, amount: float = 1) -> None:
        """Add to what is done."""


class _Bar:
    def __init__(self, bar: Any, task: Any) -> None:
        self._bar, self._task = bar, task

    def advance(self, amount: float = 1) -> None:
        self._bar.advance(self._task, amount)


class _Silent:
    def advance(self, amount: float = 1) -> None:
        pass


@contextlib.contextmanager
def progress(description: str, total: float) -> Iterator[Progress]:
    """Show a bar on stderr while the body runs, where stderr is a terminal."""
    if not stderr.is_terminal:
        yield _Silent()
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with RichProgress(*columns, console=stderr, transient=True) as bar:
        yield _Bar(bar, bar.add_task(description, total=total))


def note(text: str) -> None:
    """Tell a person something, as it is: no markup, no wrapping."""
    stderr.print(text, markup=False, soft_wrap=True)


def emit(value: Path | dict[str, Any], as_json: bool) -> None:
    """Print a command's result on stdout: the path it made, or one JSON object."""
    if isinstance(value, Path):
        print(json.dumps({"path": str(value)}) if as_json else value)
    elif as_json:
        print(json.dumps(value, ensure_ascii=not _utf8()))
    else:
        print(value["path"])
    sys.stdout.flush()


def _utf8() -> bool:
    return (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """A stage run on behalf of another prints its result for the person, not for the pipe."""
    with contextlib.redirect_stdout(sys.stderr):
        yield
