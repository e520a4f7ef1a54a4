"""How fast copies to a GPU are when nothing else is to be done."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from runtime.gpu.accelerator import Accelerator


def copy_bytes_per_s(accelerator: Accelerator, sources: Sequence[Tensor]) -> float:
    """Bytes a second of copies one after the other, as a run starts them.

    Args:
        accelerator: where to.
        sources: uint8, pinned: the memory that a run copies from. A buffer made for the purpose may lie in that of
            another processor, and came at 47 GB/s where experts came at 55.
    """
    to = torch.empty(max(map(len, sources)), dtype=torch.uint8, device=accelerator.device)
    accelerator.catch_up()  # kernels that built a model may still read what lay there
    accelerator.start_copy(to[: len(sources[0])], sources[0]).wait()
    started = time.perf_counter()
    landings = [accelerator.start_copy(to[: len(source)], source) for source in sources]
    for landing in landings:
        landing.wait()
    return sum(map(len, sources)) / (time.perf_counter() - started)
