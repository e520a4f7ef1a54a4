"""How fast copies to a GPU are when nothing else is to be done."""

from __future__ import annotations

import time

import torch

from runtime.gpu.accelerator import Accelerator

_BYTES, _COPIES = 16 << 20, 16


def copy_bytes_per_s(accelerator: Accelerator, num_bytes: int = _BYTES) -> float:
    """Bytes a second of copies from pinned memory, one after the other, as a run starts them.

    Args:
        accelerator: where to.
        num_bytes: of each of 16 copies.
    """
    source = accelerator.host((num_bytes,), torch.uint8)
    to = torch.empty(num_bytes, dtype=torch.uint8, device=accelerator.device)
    accelerator.start_copy(to, source).wait()
    started = time.perf_counter()
    landings = [accelerator.start_copy(to, source) for _ in range(_COPIES)]
    for landing in landings:
        landing.wait()
    return _COPIES * num_bytes / (time.perf_counter() - started)
