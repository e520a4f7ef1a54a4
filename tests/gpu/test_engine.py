"""The engine for a GPU, with the processor in its place: the same text in every way and in any memory (H12, H13)."""

from __future__ import annotations

import copy
import gc
import os
import threading
import time
import weakref
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.artifacts.pack import Pack
from runtime.config import RunSettings
from runtime.decode.sampling import SamplingSettings
from runtime.engine import Request
from runtime.errors import ArtifactError, InputError, PlanError
from runtime.gpu import engine as gpu_engine
from runtime.gpu.blocks import BlockTarget
from runtime.gpu.host_tier import DISK_READS
from runtime.gpu.model import DeviceModel
from runtime.gpu.plan import plan_gpu
from runtime.gpu.target import ROWS, Way
from runtime.kernels.layout import SlotLayout
from runtime.memory.cache import ExpertCache
from runtime.memory.residency import Residency
from runtime.memory.stream import Hold
from tests.decode.conftest import PackOf
from tests.decode.packs import build, prompt_of
from tests.gpu.runs import Logits, say
from tests.gpu.stand_in import TorchKernels, open_gpu

COUNT = 14
FAMILIES = ["qwen2_moe", "mixtral", "deepseek_v2", "phimoe"]


def settings_of(pack: Pack, slots: int | None = None, **changes: Any) -> RunSettings:
    size = "100%" if slots is None else str(slots * pack.target_slot_bytes)
    return RunSettings(expert_cache_size=size, context=128, **changes)


def generate(
    pack: Pack,
    length: int = 20,
    sampling: SamplingSettings | None = None,
    made: list[TorchKernels] | None = None,
    needs_pinned: bool = False,
    gates: bool = False,
    **changes: Any,
) -> tuple[list[int], dict[str, Any], Logits]:
    """Tokens, the report, and the logits of every row whose whole text is known, by that text."""
    logits: Logits = {}
    with open_gpu(pack, settings_of(pack, **changes), made=made, needs_pinned=needs_pinned, gates=gates) as engine:
        tokens = say(engine, prompt_of(length), COUNT, logits, sampling)
        gated = gates and not needs_pinned  # of memory that is not pinned nothing waits on the device
        assert all((way is Way.gated) == gated for _, way in engine._rows._passes)
        return tokens, engine.report(), logits


@cache
def alone(pack: Pack, length: int = 20) -> tuple[list[int], dict[str, Any], Logits]:
    return generate(pack, length, speculate=False)


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


def test_a_gpu_without_the_memory_is_refused_with_what_to_do(pack_of: PackOf, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = pack_of("qwen2_moe", torch.bfloat16)
    empty = torch.empty

    def full(*sizes: Any, **kind: Any) -> Tensor:
        if kind.get("dtype") is torch.uint8 and len(sizes) == 2:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nGPU 0 has ...")
        made: Tensor = empty(*sizes, **kind)
        return made

    before = threading.active_count()
    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(PlanError, match="Tried to allocate") as refused:
        open_gpu(pack, settings_of(pack, 4))
    assert "--expert-cache" in refused.value.mend and "\n" not in refused.value.found
    assert threading.active_count() == before


@pytest.mark.parametrize("part", ["dense", "draft", "work", "prompt"])
def test_memory_that_runs_out_is_said_and_given_back(
    pack_of: PackOf, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """What was made until then goes, even while somebody still looks at the error."""
    pack, made, calls = pack_of("qwen2_moe", torch.bfloat16), [], 0
    before = threading.active_count()

    def fails(inner: Any, at: int) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == at:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.\nGPU 0 has ...")
            found = inner(*arguments, **named)
            if isinstance(found, Tensor):
                made.append(weakref.ref(found))
            return found

        return call

    owner: Any
    owner, name, at = {
        "dense": (Pack, "read_dense", 9),
        "draft": (SlotLayout, "pack_codes", 2),
        "work": (DeviceModel, "rows", 2),
        "prompt": (BlockTarget, "compute", 2),
    }[part]
    monkeypatch.setattr(owner, name, fails(getattr(owner, name), at))
    with pytest.raises(PlanError, match="Tried to allocate") as refused, open_gpu(pack, settings_of(pack, 4)) as engine:
        list(engine.generate(Request(prompt_of(20), 2, frozenset(), SamplingSettings())))
    assert calls == at and refused.value.mend and "\n" not in refused.value.found
    assert threading.active_count() == before
    if part in ("dense", "draft"):
        assert made and not any(tensor() is not None for tensor in made)


@pytest.mark.parametrize("changes", [{}, {"host_cache_size": "50%"}, {"speculate": False}])
def test_a_closed_engine_has_given_its_memory_back(pack_of: PackOf, changes: dict[str, Any]) -> None:
    """At once, not when the collector comes by: the next run makes its own slots at the same time."""
    pack = pack_of("qwen2_moe", torch.bfloat16)
    gc.collect()
    gc.disable()
    try:
        with open_gpu(pack, settings_of(pack, 4, **changes)) as engine:
            list(engine.generate(Request(prompt_of(20), 3, frozenset(), SamplingSettings())))
            parts = engine._parts
            tier: Any = parts.tier
            bank = [] if parts.bank is None else [slots for _, slots, _ in parts.bank._layers]
            kv = [layer.keys for layer in parts.model.kv.layers]
            large = [*parts.model.model.parameters(), *kv, *bank, engine._experts.pool.whole, tier._pool.tensor(0)]
            left = [weakref.ref(tensor) for tensor in large if tensor is not None]
            assert len(left) > 20
            del large, bank, kv
        engine.close()
        assert not [tensor for tensor in left if tensor() is not None] and parts.model._decoder is None
        assert engine.report()["measured_bytes"]["expert_cache"] == 4 * pack.target_slot_bytes
    finally:
        gc.enable()


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


def test_plan_refuses_what_a_gpu_does_not_run(pack_of: PackOf) -> None:
    pack, much = pack_of("qwen2_moe", torch.bfloat16), 8 * 10**9
    settings = settings_of(pack)
    needed = plan_gpu(pack, settings, device_bytes=much).total_bytes
    plan_gpu(pack, settings, device_bytes=needed)
    with pytest.raises(PlanError, match="expert cache within") as refused:
        plan_gpu(pack, settings, device_bytes=needed - 1)
    assert refused.value.mend.endswith("on a GPU: --no-speculate takes less of it, --device cpu none")
    with pytest.raises(PlanError, match=r"host cache of one expert, 24\.6 kB; found 24\.6 kB available"):
        plan_gpu(pack, settings, device_bytes=much, host_bytes=pack.target_slot_bytes - 1)
    with pytest.raises(InputError, match="bfloat16"):
        plan_gpu(pack, settings_of(pack, dtype="float32"), device_bytes=much)
    with pytest.raises(InputError, match="BF16"):
        plan_gpu(pack_of("qwen2_moe", torch.float32), settings, device_bytes=much)


def test_plan_says_what_lies_where(pack_of: PackOf) -> None:
    pack = pack_of("qwen2_moe", torch.bfloat16)
    settings = settings_of(pack, 3, host_cache_size="50%")
    with open_gpu(pack, settings) as engine:
        plan, report = engine.plan, engine.report()
    found, memory = report["measured_bytes"], report["device_memory"]
    assert plan.host_slots == pack.spec.num_records // 2
    assert found == {
        "dense": plan.dense_bytes,
        "draft": plan.draft_bytes,
        "kv": plan.kv_bytes,
        "expert_cache": plan.cache_bytes,
    }
    assert set(memory) == {"tensors", "most_tensors", "taken", "most_taken"}
    assert any("host memory" in name for name, _ in plan.lines())


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


@pytest.mark.parametrize("changes", [{"prefetch": "none"}, {"fetch_rows": 0}, {}])
def test_nothing_is_read_from_disk_ahead_where_nothing_is_to_be_fetched(
    pack_of: PackOf, changes: dict[str, Any]
) -> None:
    pack = pack_of("qwen2_moe", torch.bfloat16)
    with open_gpu(pack, settings_of(pack, 4, host_cache_size="50%", **changes)) as engine:
        list(engine.generate(Request(prompt_of(2), COUNT, frozenset(), SamplingSettings())))
        report = engine.report()
    host = report["host_cache"]
    assert (host["prefetch_reads"] > 0) == (not changes)
    assert host["requests"] >= report["expert_cache"]["demand_reads"] > 0 < host["read_bytes"]


@pytest.mark.parametrize(("slots", "share", "gates"), [(3, "25%", False), (9, "50%", False), (10, "75%", True)])
def test_the_text_is_the_same_however_memory_is_split(pack_of: PackOf, slots: int, share: str, gates: bool) -> None:
    pack = pack_of("qwen2_moe", torch.bfloat16)
    tokens, report, _ = generate(pack, slots=slots, host_cache_size=share, gates=gates, max_parallel_transfers=1)
    assert tokens == alone(pack)[0]
    host, records = report["host_cache"], pack.spec.num_records
    assert host["returned"] > 0 and host["failed_prefetches"] == 0
    if slots + report["plan"]["host_slots"] > records:
        # Then each record is read from disk once, but one that a thread wants just when another takes its slot.
        assert host["demand_reads"] + host["prefetch_reads"] <= records + 3


def test_what_the_disk_may_hold_up_is_brought_by_more_threads(pack_of: PackOf) -> None:
    def readers(**changes: Any) -> int:
        with open_gpu(pack, settings_of(pack, 12, max_parallel_transfers=2, **changes)):
            return sum(thread.name.startswith("moespeq-reader") for thread in threading.enumerate())

    pack = pack_of("qwen2_moe", torch.bfloat16)
    beside_a_layer = 12 - min(ROWS * pack.spec.top_k, pack.spec.num_experts)
    assert 2 < beside_a_layer < DISK_READS
    assert readers(host_cache_size="50%") == DISK_READS + beside_a_layer
    assert readers() == 0
