"""The engine on a GPU: the embedded model says the same in every way, token for token and bit for bit (H12, H13)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from moespeq_cli.bench.prompts import bench_prompts
from runtime.artifacts.pack import Pack
from runtime.decode.sampling import SamplingSettings
from runtime.engine import Request
from runtime.gpu.engine import GpuEngine
from runtime.model.tokenizer import load_tokenizer
from tests.gpu.runs import Logits, engine_on_gpu, say

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(300),
]

CONTEXT = 512
TOKENS = 10_000


@pytest.fixture(scope="module")
def prompts(embedded: Pack) -> list[list[int]]:
    return [list(prompt.ids) for prompt in bench_prompts(load_tokenizer(embedded.config_folder), 12)]


def engine_of(pack: Pack, slots: int | None = None, graphs: bool = True, **changes: Any) -> GpuEngine:
    size = "100%" if slots is None else str(slots * pack.target_slot_bytes)
    return engine_on_gpu(pack, size, CONTEXT, graphs, **changes)


def texts(engine: GpuEngine, prompts: list[list[int]], most: int, each: int) -> list[list[int]]:
    """Continuations without regard to stop ids, `most` tokens in all."""

    def continued() -> Iterator[list[int]]:
        left = most
        for prompt in prompts:
            count = min(each, left, CONTEXT - len(prompt))
            if count < 1:
                return
            yield list(engine.generate(Request(prompt, count, frozenset(), SamplingSettings())))
            left -= count

    with engine:
        return list(continued())


def test_ten_thousand_tokens_are_the_targets_own(embedded: Pack, prompts: list[list[int]]) -> None:
    alone = texts(engine_of(embedded, speculate=False), prompts, TOKENS, CONTEXT)
    assert sum(map(len, alone)) == TOKENS
    assert texts(engine_of(embedded, slots=40), prompts, TOKENS, CONTEXT) == alone


WAYS: dict[str, dict[str, Any]] = {
    "graphs left out": {"graphs": False, "speculate": False},
    "plain, a few slots": {"slots": 20, "speculate": False, "prefetch": "none", "eviction": "lru"},
    "look-ahead": {"slots": 20, "fetch_rows": 4},
    "all rows of a pass": {"slots": 20, "prefetch_window": 16, "verify_window": 7, "governor": "fixed"},
    "fewer slots than a row needs": {"slots": 3, "verify_window": 3, "governor": "fixed"},
    "everything resident": {"prefetch_window": 8, "verify_window": 4, "governor": "fixed"},
    "half on disk": {"slots": 30, "host_cache_size": "50%"},
}


@pytest.mark.parametrize("way", WAYS)
def test_rows_have_the_same_bits_in_every_way(embedded: Pack, prompts: list[list[int]], way: str) -> None:
    right = logits_of(engine_of(embedded, speculate=False), prompts[:2])
    found = logits_of(engine_of(embedded, **WAYS[way]), prompts[:2])
    common = right.keys() & found.keys()
    assert len(common) > len(right) * 0.9
    assert all(torch.equal(found[text], right[text]) for text in common)


def logits_of(engine: GpuEngine, prompts: list[list[int]]) -> Logits:
    logits: Logits = {}
    with engine:
        for prompt in prompts:
            say(engine, prompt, 100, logits)
    return logits


def test_a_closed_run_leaves_nothing_on_the_gpu(embedded: Pack, prompts: list[list[int]]) -> None:
    """The second and third engine of a process find what the first one found; libraries' work space may have come."""
    taken, most, planned = [], [], 0
    for _ in range(3):
        engine = engine_of(embedded, slots=40)
        engine._toolkit.accelerator.forget_peak()
        before = engine._toolkit.accelerator.memory().tensors
        texts(engine, prompts[:1], 20, 20)
        accelerator, planned = engine._toolkit.accelerator, engine.plan.total_bytes
        most.append(accelerator.memory().most_tensors)
        assert accelerator.memory().tensors < before
        accelerator.forget_peak()
        taken.append(accelerator.memory().taken)
    assert max(taken[1:]) - taken[0] < 64 << 20
    assert max(most) - most[0] < 64 << 20 and max(most) < 1.1 * planned
