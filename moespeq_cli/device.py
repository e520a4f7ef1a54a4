"""Where quantize and profile compute."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from runtime.errors import InputError, PlanError


def pick_device(name: str) -> torch.device:
    """The device of a name; `auto` is a GPU where there is one.

    Raises:
        InputError: a device that this torch does not have.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:
        raise InputError(
            expected=f"a device of this torch for --device {name}",
            found=str(error).splitlines()[0],
            mend="pass --device cpu, or leave it out",
        ) from error
    return torch.device(name)


@contextlib.contextmanager
def device_memory() -> Iterator[None]:
    """Tell a GPU whose memory does not hold a layer as an error with a way out."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise PlanError(
            expected="a GPU whose memory holds one decoder layer and what is computed from it",
            found=str(error).splitlines()[0],
            mend="free memory on it, or pass --device cpu",
        ) from error
