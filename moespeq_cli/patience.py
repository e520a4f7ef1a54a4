"""Ctrl-C while a large library is being imported takes effect when that has ended.

Libraries that are written in C may swallow the interrupt, or leave themselves half imported, so that the command goes
on without having been stopped and fails later. One import takes a second or two.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType

LARGE = frozenset({"cupy", "numpy", "safetensors", "tokenizers", "torch", "transformers"})


def import_patiently() -> None:
    """Hold interrupts back during imports of the libraries in LARGE, from now on."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds what the other finders find."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in LARGE:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(fullname, path, target) for finder in others if hasattr(finder, "find_spec"))
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Patient(spec.loader)
        return spec


class _Patient(Loader):
    """Another loader, which the module has for its own when it is loaded."""

    def __init__(self, inner: Loader) -> None:
        self._inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._inner
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        with _interrupts_held():
            self._inner.exec_module(module)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """An interrupt inside is raised behind; the outermost of several counts, and only what interrupts as usual."""
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not usual or threading.current_thread() is not threading.main_thread():
        yield
        return
    came = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if came:
            raise KeyboardInterrupt
