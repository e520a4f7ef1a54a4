"""The one family of errors that a user can cause and mend."""

from __future__ import annotations

import functools
import textwrap
from typing import Any


class MoespeqError(Exception):
    """What was expected, what was found, and how to mend it.

    The command line prints the message and the hint without a traceback and exits with status 1.
    """

    def __init__(self, *, expected: str, found: str, mend: str) -> None:
        super().__init__(f"expected {expected}; found {found}")
        self.expected = expected
        self.found = found
        self.mend = mend

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled with its keywords, so that it survives the way from a worker process; `Exception` knows none."""
        again = functools.partial(type(self), expected=self.expected, found=self.found, mend=self.mend)
        return again, (), self.__dict__


class InputError(MoespeqError):
    """A model folder, a text or an option that cannot be used."""


class ArtifactError(MoespeqError):
    """An artifact of an earlier stage that is unfinished, damaged, or made for something else."""


class ShapeError(MoespeqError):
    """A tensor whose shape or dimension does not fit."""


class PlanError(MoespeqError):
    """A request that does not fit in memory or in the model's context."""


class StorageError(MoespeqError):
    """A disk that is full, read-only or failing."""


class KernelError(MoespeqError):
    """A CUDA kernel that this machine cannot compile, load or launch."""


def brief(error: Exception) -> str:
    """What another program raised, as one line of at most 300 characters for a message of ours."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", 300, placeholder=" ...")
