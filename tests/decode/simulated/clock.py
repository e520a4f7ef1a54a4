"""A clock that moves when it is told to, in the place of the one that `runtime` reads."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from runtime.memory.window import Window


class Clock:
    """Virtual seconds.

    Attributes:
        now: since the simulation began.
    """

    def __init__(self) -> None:
        self.now = 0.0

    def spend(self, seconds: float) -> None:
        """So much time goes by."""
        self.now += seconds

    def until(self, moment: float) -> None:
        """Go on to a moment, if it is not over."""
        self.now = max(self.now, moment)


@contextmanager
def in_virtual_time(clock: Clock, announcing: Callable[[], None]) -> Iterator[None]:
    """Every module of `runtime` reads this clock, and an announcement costs what `announcing` spends.

    The modules say `time.perf_counter()`, so each gets a `time` of its own, which has nothing else: whatever asks for
    another clock, or would sleep, fails.
    """
    virtual, plain = SimpleNamespace(perf_counter=lambda: clock.now), Window.announce

    def announce(window: Window, *arguments: Any) -> None:
        announcing()
        plain(window, *arguments)

    with ExitStack() as undo:
        for name, module in list(sys.modules.items()):
            if name.startswith("runtime.") and getattr(module, "time", None) is time:
                undo.enter_context(mock.patch.object(module, "time", virtual))
        undo.enter_context(mock.patch.object(Window, "announce", announce))
        yield
