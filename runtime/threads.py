"""How many threads the arithmetic uses."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

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


def spread(work: Callable[[Item], Result], items: Sequence[Item], workers: int) -> Iterator[Result]:
    """`map(work, items)` by several threads that share torch's threads among them.

    Two threads with an operation each compute more than one operation cut in two: no step waits for the other half.
    What comes out is what one thread would have made.

    Args:
        work: called with one item after another; gradients are off unless it turns them on.
        items: in order.
        workers: how many at once; 1 does without threads.

    Yields:
        The results in the order of the items.
    """
    import torch

    threads = torch.get_num_threads()
    count = min(workers, len(items))
    if count <= 1:
        yield from map(work, items)
        return

    def begin() -> None:
        torch.set_num_threads(max(1, threads // count))
        torch.set_grad_enabled(False)

    with ThreadPoolExecutor(count, initializer=begin) as pool:
        try:
            yield from pool.map(work, items)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)  # after an error or an interrupt, only what has begun ends
            torch.set_num_threads(threads)
