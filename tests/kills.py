"""Kills at chosen and at random moments of a stage that writes files."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Half = Callable[..., object]
STEPS: dict[tuple[Any, str], Half | None] = {(os, name): None for name in ("replace", "fsync", "unlink", "rmdir")}


class Killed(BaseException):
    """Stands for a kill: nothing in the product catches it."""


class Moments:
    """Counts the calls that change what is on disk, and kills at one of them.

    Args:
        steps: the functions to count, as module and name, and for each what does half of its work, if anything does.
    """

    def __init__(self, steps: dict[tuple[Any, str], Half | None]) -> None:
        self._steps = steps

    @contextlib.contextmanager
    def kill(self, number: int, when: str = "after") -> Iterator[list[str]]:
        """Let the nth call be the last, `before` it is made, `half` made or `after` it; yields the names called."""
        called: list[str] = []

        def counting(name: str, real: Callable[..., Any], half: Half | None) -> Callable[..., Any]:
            def step(*arguments: Any, **options: Any) -> Any:
                called.append(name)
                last = len(called) == number
                if last and when == "half" and half is not None:
                    half(*arguments, **options)
                if last and when != "after":
                    raise Killed
                try:
                    result = real(*arguments, **options)
                except OSError:  # such as for a file that is not there: nothing changed
                    called.pop()
                    raise
                if last:
                    raise Killed
                return result

            return step

        with pytest.MonkeyPatch.context() as patch:
            for (module, name), half in self._steps.items():
                patch.setattr(module, name, counting(name, getattr(module, name), half))
            yield called

    def draw(self, total: int, count: int, seed: int) -> list[tuple[int, str]]:
        """Moments at random, in order: the number of a call and whether before, in the middle of or after it."""
        generator = random.Random(seed)
        numbers = sorted(generator.sample(range(1, total + 1), count))
        return [(number, generator.choice(("before", "half", "after"))) for number in numbers]


def after_removal(number: int) -> contextlib.AbstractContextManager[list[str]]:
    """Kill after the nth removal of a file or folder."""
    return Moments({(os, "unlink"): None, (os, "rmdir"): None}).kill(number)


def sigkill_after(seconds: float, work: Callable[[], object]) -> None:
    """Run in a process of its own that is killed after so long, at work or done."""
    process = os.fork()
    if process == 0:
        try:
            work()
            time.sleep(300)
        finally:
            os._exit(1)
    time.sleep(seconds)
    os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def keep_half(path: Path) -> None:
    """Cut a file in the middle."""
    os.truncate(path, path.stat().st_size // 2)
