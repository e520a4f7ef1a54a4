"""What memory an engine for a GPU takes, refuses, gives back and shares with the disk."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.artifacts.pack import Pack
from runtime.decode.sampling import SamplingSettings
from runtime.engine import Request
from runtime.errors import InputError, PlanError
from runtime.gpu.blocks import BlockTarget
from runtime.gpu.host_tier import DISK_READS
from runtime.gpu.model import DeviceModel
from runtime.gpu.plan import plan_gpu
from runtime.gpu.target import ROWS
from runtime.kernels.layout import SlotLayout
from tests.decode.conftest import PackOf
from tests.decode.packs import prompt_of
from tests.gpu.engines import COUNT, alone, generate, settings_of
from tests.gpu.stand_in import open_gpu


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
