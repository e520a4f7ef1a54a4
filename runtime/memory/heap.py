"""What the C library keeps of freed memory, while many large tensors are built from larger ones."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # parameters of mallopt
_OWN_PAGES_BYTES = 1 << 17  # glibc's own threshold before it adapts
_ADAPTED_BYTES = 1 << 25  # the highest that glibc adapts to; twice as much may then stay at the heap's end


def share_one() -> None:
    """Let threads from now on take memory from one heap; where glibc is not, do nothing.

    glibc gives threads heaps of their own, and what is freed in one is of no use to the others. Quantising 24 layers
    took 5.9 GB so, with every layer a little more, and 4.7 from one heap.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_ARENA_MAX, 1)


def give_back() -> None:
    """Give pages that were freed, between others too, back to the system; where glibc is not, do nothing."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@contextlib.contextmanager
def freed_at_once() -> Iterator[None]:
    """Give memory of large tensors back to the system as soon as they are freed; where glibc is not, do nothing.

    glibc adapts to the largest block that was freed and then takes smaller ones from its heap. There, what is kept
    lies between what was freed, and neither can be given back: an INT4 bank of 80 MB, built expert by expert, took 190.
    Afterwards blocks up to 32 MB come from the heap, as they would once glibc has adapted.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        yield
        return
    mallopt(_MMAP_THRESHOLD, _OWN_PAGES_BYTES)
    try:
        yield
    finally:
        mallopt(_MMAP_THRESHOLD, _ADAPTED_BYTES)
        mallopt(_TRIM_THRESHOLD, 2 * _ADAPTED_BYTES)
        give_back()
