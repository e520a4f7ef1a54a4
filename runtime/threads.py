"""How many threads the arithmetic uses."""

from __future__ import annotations

import os

SMALL_EXPERT_BYTES = 2_000_000
"""Experts below this size are computed by one thread: waking a second one costs more than it computes."""


def sleep_between_operations() -> None:
    """Let idle arithmetic threads sleep instead of spin; call it before torch is imported.

    Spinning threads fight for the processor with the readers, and with whatever else the machine does: profiling 24
    sequences of the embedded model on two busy cores took 92 s with spinning threads, 27 s with sleeping ones and 18 s
    with one thread.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def set_threads(requested: int, expert_bytes: int) -> int:
    """Set torch's threads: as asked for, or one for small experts and one a core for others.

    Args:
        requested: 0 chooses.
        expert_bytes: of one expert of the model.

    Returns:
        The number set.
    """
    import torch

    threads = requested or (1 if expert_bytes < SMALL_EXPERT_BYTES else len(os.sched_getaffinity(0)))
    torch.set_num_threads(threads)
    return threads
