"""What a run says when the GPU has less memory than was planned for."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from runtime.errors import PlanError


@contextmanager
def shortage(expected: str, mend: str) -> Iterator[None]:
    """Turn an allocation that the device refuses into a `PlanError`; what was allocated on the way to it is let go.

    Args:
        expected: what the memory is for.
        mend: what to change.

    Raises:
        PlanError: the device refused memory inside.
    """
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        found = str(error).splitlines()[0]
        traceback.clear_frames(error.__traceback__)  # whose variables hold tensors
        raise PlanError(expected=expected, found=found, mend=mend) from error
