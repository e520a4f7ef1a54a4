"""Work spread over threads: in order, each with its share of torch's threads, stopped by an error."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from runtime.artifacts.checkpoint import Checkpoint
from runtime.model.families import describe
from runtime.model.stream import LayerStream, LayerTrace
from runtime.threads import spread
from tests import tiny


@pytest.fixture(autouse=True)
def _four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def test_results_come_in_order_and_threads_are_shared_out() -> None:
    seen: list[tuple[str, int, bool]] = []

    def work(item: int) -> int:
        time.sleep(0.01 * (5 - item))
        seen.append((threading.current_thread().name, torch.get_num_threads(), torch.is_grad_enabled()))
        return item * item

    assert list(spread(work, range(5), 2)) == [0, 1, 4, 9, 16]
    assert len({name for name, _, _ in seen}) == 2 and {row[1:] for row in seen} == {(2, False)}
    assert torch.get_num_threads() == 4


@pytest.mark.parametrize(("items", "workers"), [(3, 1), (1, 4), (0, 4)])
def test_one_at_a_time_needs_no_thread(items: int, workers: int) -> None:
    here = threading.current_thread()
    assert list(spread(lambda _: threading.current_thread(), range(items), workers)) == [here] * items


def test_an_error_comes_through_and_what_waits_is_not_begun() -> None:
    begun: list[int] = []

    def work(item: int) -> None:
        begun.append(item)
        time.sleep(0.02)
        if item == 1:
            raise ValueError("item 1")

    with pytest.raises(ValueError, match="item 1"):
        list(spread(work, range(100), 2))
    assert len(begun) < 10 and torch.get_num_threads() == 4


def test_sequences_side_by_side_give_the_same_bits(tmp_path: Path) -> None:
    """And observers hear of them in order."""
    checkpoint = Checkpoint.open(tiny.save_tiny("qwen2_moe", tmp_path))
    ids = [torch.arange(length) for length in (40, 3, 17, 29, 1)]

    def run(workers: int) -> list[torch.Tensor]:
        stream = LayerStream(checkpoint, describe(checkpoint))
        torch.set_num_threads(workers)  # so that each has one
        stream.workers = workers
        hidden = stream.embed(ids)
        for layer in stream.layers():
            order: list[int] = []

            def observe(trace: LayerTrace, order: list[int] = order) -> None:
                order.append(trace.sequence)
                assert len(trace.hidden) == len(ids[trace.sequence])

            hidden = layer.forward(hidden, observe)
            assert order == list(range(5))
        return hidden

    assert all(torch.equal(alone, beside) for alone, beside in zip(run(1), run(3), strict=True))
