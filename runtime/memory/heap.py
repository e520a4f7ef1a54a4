"""What the C library keeps of freed memory, while many large tensors are built from larger ones."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of mallopt
_OWN_PAGES_BYTES = 1 << 17  # glibc's own threshold before it adapts
_ADAPTED_BYTES = 1 << 25  # the highest that glibc adapts to; twice as much may then stay at the heap's end


def give_back() -> None:
    """Give pages that were freed, between others too, back to the system; where glibc is not, do nothing.

    For the pauses of work that makes and frees much in threads: each thread's heap keeps what was freed in it.
    """
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
    library = ctypes.CDLL(None)
    mallopt, trim = getattr(library, "mallopt", None), getattr(library, "malloc_trim", None)
    if mallopt is None or trim is None:
        yield
        return
    mallopt(_MMAP_THRESHOLD, _OWN_PAGES_BYTES)
    try:
        yield
    finally:
        mallopt(_MMAP_THRESHOLD, _ADAPTED_BYTES)
        mallopt(_TRIM_THRESHOLD, 2 * _ADAPTED_BYTES)
        trim(0)
