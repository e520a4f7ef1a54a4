"""The engine for a GPU, with the processor in its place: the same text in every way and in any memory (H12, H13)."""

from __future__ import annotations

import copy
import os
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.artifacts.pack import Pack
from runtime.config import RunSettings
from runtime.decode.sampling import SamplingSettings
from runtime.engine import Request
from runtime.errors import ArtifactError, PlanError
from runtime.gpu import engine as gpu_engine
from runtime.gpu.target import ROWS
from runtime.memory.cache import ExpertCache
from runtime.memory.residency import Residency
from runtime.memory.stream import Hold
from tests.decode.conftest import PackOf
from tests.decode.packs import build, prompt_of
from tests.gpu.engines import COUNT, alone, generate, settings_of
from tests.gpu.stand_in import TorchKernels, open_gpu

FAMILIES = ["qwen2_moe", "mixtral", "deepseek_v2", "phimoe"]


WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "classic": {"prefetch_window": 5, "verify_window": 4, "governor": "fixed"},
    "few slots": {"slots": 3},
    "fewer slots than a row needs": {"slots": 1, "verify_window": 3, "governor": "fixed"},
    "a pass of all rows": {"slots": 6, "prefetch_window": 12, "verify_window": 11, "governor": "fixed"},
    "half on disk": {"slots": 4, "host_cache_size": "50%"},
    "memory that cannot be pinned": {"slots": 4, "needs_pinned": True},
    "one in host memory": {"slots": 4, "host_cache_size": "12.5%"},
    "plain, lru": {"slots": 4, "speculate": False, "prefetch": "none", "eviction": "lru"},
    "history": {"slots": 4, "prefetch": "history", "eviction": "priority"},
    "gates": {"gates": True, "slots": 12},
    "gates, as few slots as they need": {"gates": True, "slots": 9, "max_parallel_transfers": 1},
    "gates, plain, lru": {"gates": True, "slots": 12, "speculate": False, "prefetch": "none", "eviction": "lru"},
    "gates, a pass of all rows": {
        "gates": True, "slots": 12, "prefetch_window": 12, "verify_window": 11, "governor": "fixed",
    },
    "gates, half on disk": {"gates": True, "slots": 12, "host_cache_size": "50%"},
    "no gates, as memory cannot be pinned": {"gates": True, "slots": 12, "needs_pinned": True},
}  # fmt: skip


CASES = [(FAMILIES[0], way) for way in WAYS] + [
    (kind, way) for kind in FAMILIES[1:] for way in ("whole", "fewer slots than a row needs", "gates")
]


@pytest.mark.parametrize(("kind", "way"), CASES)
def test_same_text_in_every_way(pack_of: PackOf, kind: str, way: str) -> None:
    pack = pack_of(kind, torch.bfloat16)
    tokens, report, logits = generate(pack, **WAYS[way])
    wanted, _, right = alone(pack)
    assert tokens == wanted
    known = right.keys() & logits.keys()
    assert len(known) > COUNT // 2
    assert all(torch.equal(logits[text], right[text]) for text in known)
    slots = WAYS[way].get("slots")
    assert report["plan"]["num_slots"] == (pack.spec.num_records if slots is None else slots)


def test_a_prompt_of_one_token_and_one_longer_than_a_block(pack_of: PackOf, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = pack_of("qwen2_moe", torch.bfloat16)
    assert generate(pack, 1, slots=2)[0] == alone(pack, 1)[0]
    monkeypatch.setattr(gpu_engine, "BLOCK_TOKENS", 16)
    whole = generate(pack, 41, speculate=False)[0]
    assert generate(pack, 41, slots=2)[0] == whole


def test_seed_gives_one_text_with_and_without_speculation(pack_of: PackOf) -> None:
    pack = pack_of("qwen2_moe", torch.bfloat16)
    sampling = SamplingSettings(temperature=0.8, top_p=0.9, seed=7)
    assert generate(pack, sampling=sampling, slots=5)[0] == generate(pack, sampling=sampling, speculate=False)[0]


def test_a_seed_under_rejection_gives_one_text_whatever_is_resident(pack_of: PackOf) -> None:
    """Its text depends on what is drafted, so how far is not decided by what happens to be in slots."""
    pack = pack_of("qwen2_moe", torch.bfloat16)
    sampling = SamplingSettings(temperature=0.9, seed=3, rule="rejection")
    assert generate(pack, sampling=sampling)[0] == generate(pack, sampling=sampling, slots=5)[0]


def test_agrees_with_the_processors_own_engine(pack_of: PackOf) -> None:
    """Other kernels, other roundings: the logits of the first row are close, not equal."""
    from tests.decode.packs import decode

    pack = pack_of("qwen2_moe", torch.bfloat16)
    right = decode(pack, prompt_of(20), 1, speculate=False).logits[19]
    _, _, logits = alone(pack)
    found = logits[tuple(prompt_of(20))]
    assert torch.allclose(found, right.float(), atol=0.1, rtol=0.05)
    assert torch.nn.functional.cosine_similarity(found, right.float(), dim=0) > 0.999


def test_rows_that_nobody_asked_for_bring_no_experts(pack_of: PackOf) -> None:
    pack = pack_of("qwen2_moe", torch.bfloat16)
    made: list[TorchKernels] = []
    _, report, _ = generate(pack, made=made, slots=6, speculate=False)
    top_k, layers = pack.spec.top_k, len(pack.spec.moe_layers)
    passes = [call for call in made[-1].calls[2:] if call[0] == ROWS and call[1] > 0]
    assert max(experts for _, experts in passes) == top_k
    cache_stats = report["expert_cache"]
    assert cache_stats["requests"] >= COUNT * layers * top_k


def test_experts_that_are_here_are_computed_while_others_come(pack_of: PackOf) -> None:
    """A layer of which a part is missing is launched twice, the second time with all of it or what was missing."""
    pack = pack_of("qwen2_moe", torch.bfloat16)
    made: list[TorchKernels] = []
    generate(pack, made=made, slots=4, speculate=False, prefetch="none", eviction="lru")
    assert any(0 < experts < pack.spec.top_k for rows, experts in made[-1].calls if rows == ROWS)


def test_a_shard_cut_while_running_ends_the_text_and_leaves_no_thread(tmp_path: Path) -> None:
    pack = build(tmp_path, "qwen2_moe", torch.bfloat16)
    before = threading.active_count()
    with open_gpu(pack, settings_of(pack, 3, speculate=False, host_cache_size="25%")) as engine:
        tokens = engine.generate(Request(prompt_of(20), COUNT, frozenset(), SamplingSettings()))
        next(tokens)
        for shard in pack.folder.glob("target-*.safetensors"):
            os.truncate(shard, 4096)
        with pytest.raises(ArtifactError, match=r"target-\d+\.safetensors \(layer"):
            list(tokens)
    assert threading.active_count() == before


@pytest.mark.parametrize("where", ["prompt", "rows"])
@pytest.mark.parametrize("changes", [{}, {"host_cache_size": "25%"}, {"needs_pinned": True}])
def test_ctrl_c_leaves_no_thread_and_the_next_text_is_right(
    pack_of: PackOf, where: str, changes: dict[str, Any]
) -> None:
    pack, needs_pinned = pack_of("qwen2_moe", torch.bfloat16), bool(changes.get("needs_pinned"))
    settings = settings_of(pack, 4, **{name: value for name, value in changes.items() if name != "needs_pinned"})
    before = threading.active_count()
    with open_gpu(pack, settings, needs_pinned=needs_pinned) as engine:
        part: Any = engine._blocks if where == "prompt" else engine._rows
        name = "compute" if where == "prompt" else "routed"
        compute, calls = getattr(part, name), 0

        def interrupted(*arguments: Any) -> Tensor:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise KeyboardInterrupt
            found: Tensor = compute(*arguments)
            return found

        setattr(part, name, interrupted)
        request = Request(prompt_of(20), COUNT, frozenset(), SamplingSettings())
        with pytest.raises(KeyboardInterrupt):
            list(engine.generate(request))
        setattr(part, name, compute)
        assert list(engine.generate(request)) == alone(pack)[0]
    assert threading.active_count() == before


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("owner", "name"), [(Residency, "claim"), (ExpertCache, "hold"), (Hold, "close")])
def test_ctrl_c_between_having_and_holding_costs_no_slot(
    pack_of: PackOf, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    """Each time at another place, as often as there are slots: nothing that nobody holds may stay taken."""
    pack = pack_of("qwen2_moe", torch.bfloat16)
    request = Request(prompt_of(4), 2, frozenset(), SamplingSettings())
    inner, left = getattr(owner, name), 0

    def interrupted(*arguments: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0 and name == "close":  # before it; of the others after it, before the caller has what it gives
            raise KeyboardInterrupt
        found = inner(*arguments)
        if left == 0:
            raise KeyboardInterrupt
        return found

    with open_gpu(pack, settings_of(pack, 2, prefetch_window=2)) as engine:
        wanted = list(engine.generate(request))
        monkeypatch.setattr(owner, name, interrupted)
        for place in range(1, 4):
            left = place
            with pytest.raises(KeyboardInterrupt):
                list(engine.generate(request))
        left = 0
        assert list(engine.generate(request)) == wanted
        assert not engine.cache._tickets.open and not engine.cache._residency.pins


def test_a_run_begins_with_the_experts_that_a_profile_used_most(pack_of: PackOf) -> None:
    pack = pack_of("qwen2_moe", torch.bfloat16)
    keys = pack.spec.expert_keys()
    hot = keys[1::3][:4]
    warm = copy.copy(pack)
    warm.heat = {key: 0.9 if key in hot else 0.1 for key in keys}
    with open_gpu(warm, settings_of(pack, 4)) as engine:
        for _ in range(100):
            engine.cache.poll()
        assert set(engine.cache.resident_slots()) == set(hot)
        request = Request(prompt_of(20), COUNT, frozenset(), SamplingSettings())
        assert list(engine.generate(request)) == alone(pack)[0]
    with open_gpu(warm, settings_of(pack, 4, warm=False)) as engine:
        engine.cache.poll()
        assert engine.cache.num_resident == 0


def test_threads_are_those_that_were_asked_for(pack_of: PackOf) -> None:
    pack, before = pack_of("qwen2_moe", torch.bfloat16), torch.get_num_threads()
    try:
        with open_gpu(pack, settings_of(pack, 3, speculate=False, threads=before + 1)) as engine:
            assert engine.report()["threads"] == before + 1
    finally:
        torch.set_num_threads(before)


def test_recording_is_timed_once_and_apart(pack_of: PackOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes before the first text, so neither that text's time nor the loading has it."""
    pack = pack_of("qwen2_moe", torch.bfloat16)
    with open_gpu(pack, settings_of(pack, 4)) as engine:
        accelerator = engine._toolkit.accelerator
        record = accelerator.record

        def slow(*arguments: Any, **named: Any) -> Any:
            time.sleep(0.2)
            return record(*arguments, **named)

        monkeypatch.setattr(accelerator, "record", slow)
        request = Request(prompt_of(20), 3, frozenset(), SamplingSettings())
        list(engine.generate(request))
        first = engine.report()["recording_s"]
        list(engine.generate(request))
        assert first >= 0.4 and engine.report()["recording_s"] - first < 0.2


def damaged(folder: Path) -> Pack:
    """A pack with one record whose bytes are not those that its checksum is of."""
    pack = build(folder, "qwen2_moe", torch.bfloat16)
    shard = max(pack.folder.glob("target-*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-5000:-4000] = bytes(1000)
    shard.write_bytes(content)
    return pack


@pytest.mark.parametrize(
    ("check", "host_cache", "met"),
    [("all", "50%", True), ("auto", "50%", True), ("first-use", "50%", False), ("first-use", "100%", True)],
)
def test_checksums_are_compared_at_once_where_that_is_asked_for(
    tmp_path: Path, check: str, host_cache: str, met: bool
) -> None:
    """Host memory for all experts is filled, and so checked, at once whatever is asked for."""
    pack = damaged(tmp_path)
    settings = settings_of(pack, 3, host_cache_size=host_cache, speculate=False, check=check)
    before = threading.active_count()
    with pytest.raises(ArtifactError, match="sha256") if met else nullcontext():
        open_gpu(pack, settings).close()
    assert threading.active_count() == before


def test_a_damaged_record_met_while_all_are_loaded_leaves_no_thread(tmp_path: Path) -> None:
    pack = damaged(tmp_path)
    before = threading.active_count()
    with pytest.raises(ArtifactError, match="sha256"):
        open_gpu(pack, settings_of(pack, host_cache_size="50%", speculate=False, check="first-use"))
    assert threading.active_count() == before


def test_a_pass_that_could_not_be_recorded_is_recorded_the_next_time(
    pack_of: PackOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service goes on with the next prompt after a `PlanError`."""
    pack = pack_of("qwen2_moe", torch.bfloat16)
    request = Request(prompt_of(20), COUNT, frozenset(), SamplingSettings())
    with open_gpu(pack, settings_of(pack, 4, speculate=False)) as engine:

        def full(*_: Any, **__: Any) -> Any:
            raise PlanError(expected="memory of the GPU for the passes", found="none", mend="less --context")

        with monkeypatch.context() as patch:
            patch.setattr(engine._toolkit.accelerator, "record", full)
            for _ in range(2):
                with pytest.raises(PlanError, match="for the passes"):
                    list(engine.generate(request))
        assert list(engine.generate(request)) == alone(pack)[0]


def test_a_context_shorter_than_a_pass_has_rows(pack_of: PackOf) -> None:
    pack = pack_of("qwen2_moe", torch.bfloat16)
    settings = RunSettings(expert_cache_size=str(3 * pack.target_slot_bytes), context=ROWS - 3)
    with open_gpu(pack, settings) as engine:
        request = Request(prompt_of(3), COUNT, frozenset(), SamplingSettings())
        tokens = list(engine.generate(request))
    assert tokens == generate(pack, 3, speculate=False)[0][:2]
