"""What goes where: data on stdout, everything for a person on stderr."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from runtime.errors import StorageError

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
    """Tell a person something, as it is: no markup, no wrapping; names that are no UTF-8 with their bytes spelt out."""
    text = text.encode(errors="backslashreplace").decode()
    stderr.print(text, markup=False, soft_wrap=True)


def emit(value: Path | dict[str, Any], as_json: bool) -> None:
    """Print a command's result on stdout: the path it made, or one JSON object."""
    if as_json:
        body = {"path": str(value)} if isinstance(value, Path) else value
        write(json.dumps(body, ensure_ascii=not _utf8()) + "\n")
    else:
        write(f"{value if isinstance(value, Path) else value['path']}\n")


def write(text: str) -> None:
    """Text on stdout, at once.

    Raises:
        StorageError: stdout is closed, or a file that cannot take it.
    """
    if sys.stdout is None:
        raise StorageError(expected="an open standard output", found="a closed one", mend="leave it open")
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        with contextlib.suppress(OSError, ValueError):  # or the interpreter tries the same write again at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise StorageError(
            expected="to write to standard output",
            found=error.strerror or str(error),
            mend="free some space there, or send the output elsewhere",
        ) from error


def _utf8() -> bool:
    return (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """A stage run on behalf of another prints its result for the person, not for the pipe."""
    with contextlib.redirect_stdout(sys.stderr):
        yield
