"""All parts of the benchmark of a built model, with the processor in the GPU's place."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from moespeq_cli.bench import offload, offload_memory
from moespeq_cli.bench import offload_tables as tables
from moespeq_cli.bench.offload_disk import records_on_disk
from moespeq_cli.bench.offload_run import Asked, decode_built, parse_weights, print_built
from moespeq_cli.bench.synthetic.models import make_config
from moespeq_cli.bench.synthetic.parts import build_parts
from runtime.config import RunSettings
from runtime.errors import InputError, PlanError, StorageError
from runtime.gpu import engine as gpu_engine
from runtime.gpu.accelerator import DeviceMemory
from runtime.gpu.host_tier import Arena
from tests.bench.test_make_model import NARROW
from tests.gpu.stand_in import toolkit

SETTINGS = RunSettings(device="cuda", prefetch_window=6)
SHORT: dict[str, Any] = {"prompts": 1, "prompt_tokens": 6, "max_new_tokens": 3, "part_memory": "70%"}
DEVICE_BYTES = 10**10


def measure(geometry: str, saved: list[dict[str, Any]], sizes: dict[str, Any], **asked: Any) -> dict[str, Any]:
    return decode_built(
        Asked(geometry, 1 if geometry == "phi-3.5-moe" else 2, **SHORT | asked),
        SETTINGS,
        lambda result: saved.append(copy.deepcopy(result)),
        lambda graphs: toolkit(),
        DEVICE_BYTES,
        **NARROW[geometry] | sizes,
    )


def test_every_part_is_saved_row_by_row_and_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved: list[dict[str, Any]] = []
    threads = threading.active_count()
    asked: dict[str, Any] = {
        "windows": [2, 5], "verifies": [0, 2], "weights": [(1.0, 0.0, 0.0)], "first_token": [4], "table_context": 40,
        "disk": tmp_path / "disk", "host_cache": "50%",
    }  # fmt: skip
    sizes = {"num_experts": 8, "num_experts_per_tok": 2}
    result = measure("qwen1.5-moe", saved, sizes, **asked)
    counts = {part: len(result[part]) for part in ("windows", "grid", "first_token", "memory", "disk")}
    assert counts == {"windows": 4, "grid": 1, "first_token": 1, "memory": 5, "disk": 3}
    assert len(saved) == sum(counts.values()) and saved[-1] == result
    assert [len(earlier.get("windows", [])) for earlier in saved[:5]] == [1, 2, 3, 4, 4]
    assert (result["compared"]["ways"], result["compared"]["tokens"]) == (8, 3)
    assert 0 <= result["draft"]["experts_alike"] <= 1
    assert [row["changes"]["verify_window"] for row in result["windows"]] == [0, 2, 0, 2]
    assert result["grid"][0]["changes"]["alpha"] == 1.0
    whole, *halved = result["disk"]
    assert (whole["host_slots"], whole["disk_bytes_per_token"]) == (16, 0)
    for row in halved:
        assert row["host_slots"] == 8 and row["disk_bytes_per_token"] * 3 == row["host_cache"]["read_bytes"] > 0
    assert not list((tmp_path / "disk").iterdir()) and threading.active_count() == threads
    print_built(result)
    printed = capsys.readouterr().out
    assert "8 ways gave the same 3 tokens" in printed and "| window | verify 0 | verify 2 |" in printed
    assert "priority 1/0/0" in printed and "draft and target apart" in printed and "page cache" in printed


@pytest.mark.parametrize("geometry", ["deepseek-v2-lite", "phi-3.5-moe"])
def test_other_families_give_one_text_in_every_way(geometry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compressed keys, routers in float32, heads that share keys; a prompt of two blocks among them."""
    monkeypatch.setattr(gpu_engine, "BLOCK_TOKENS", 16)
    saved: list[dict[str, Any]] = []
    result = measure(geometry, saved, {}, memories=["70%"], first_token=[21])
    assert result["compared"]["ways"] == len(offload.modes()) == len(result["modes"])
    assert result["first_token"][0]["read_bytes"] > 0
    for row in result["modes"]:
        assert row["planned_bytes"] < DEVICE_BYTES
        seconds = row["bytes_per_token"] / result["link_bytes_per_s"]
        assert row["link_share"] == pytest.approx(1e3 * seconds / row["ms_per_token"])


def test_residual_records_go_through_the_same_parts(tmp_path: Path) -> None:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2}
    asked: dict[str, Any] = {"encodings": ["residual"], "prompt_tokens": 3, "max_new_tokens": 2}
    result = measure("qwen1.5-moe", [], sizes, disk=tmp_path, **asked)
    assert [row["encoding"] for row in result["disk"]] == ["residual"] * 3
    assert result["compared"]["ways"] == 3 and result["residual"]["bits_per_weight"] < 12
    assert list(result["host_memory_numa"]) == ["raw", "residual"]
    assert all(set(place) == {"gpu_node", "share_at_it"} for place in result["host_memory_numa"].values())
    assert all(row["disk_bytes_per_token"] > 0 for row in result["disk"][1:])
    assert not list(tmp_path.iterdir())


def test_sharing_saves_what_was_held_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planned and measured, step by step, on a model whose parts are counted here from its configuration."""
    sizes: dict[str, Any] = NARROW["qwen1.5-moe"] | {"num_experts": 8, "num_experts_per_tok": 2}
    config = make_config("qwen1.5-moe", 2, **sizes)
    parts = build_parts(config, toolkit(), 40)
    settings = dataclasses.replace(SETTINGS, context=40)
    prompts = offload.make_prompts(1, 6, 3, 4096)
    sweep = offload.Sweep(parts, settings, prompts, 3, 1, lambda graphs: toolkit(), DEVICE_BYTES)
    reserved: list[int] = []
    monkeypatch.setattr(offload_memory, "_reserve", lambda sizes, device: reserved.append(sum(sizes)) or [])
    rows = offload_memory.memory_table(sweep, "70%", 40, lambda row: None)
    shared_bytes = 2 * 2 * (3 * config.shared_expert_intermediate_size + 1) * config.hidden_size
    kv_bytes = 2 * 2 * 2 * config.hidden_size * 40
    planned = [row["planned_bytes"] for row in rows]
    saved = [before - after for before, after in itertools.pairwise(planned)]
    dense_bytes = parts.model.dense_bytes
    assert saved == [shared_bytes, dense_bytes - shared_bytes, kv_bytes, sweep.draft_bytes]
    assert reserved == [dense_bytes + kv_bytes, dense_bytes - shared_bytes + kv_bytes, kv_bytes, 0, 0]
    assert all(row["refused"] is None and row["peak_bytes"] is not None for row in rows)
    assert tables.memory(rows).count("\n") == len(rows) + 1


def test_a_step_that_does_not_fit_is_planned_only(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = build_parts(make_config("qwen1.5-moe", 1, **NARROW["qwen1.5-moe"] | {"num_experts": 8}), toolkit(), 40)
    sweep = offload.Sweep(parts, SETTINGS, [[5, 6, 7]], 3, 1, lambda graphs: toolkit(), DEVICE_BYTES)

    def full(sizes: list[int], device: torch.device) -> list[torch.Tensor]:
        if sizes:
            raise PlanError(expected="memory", found="none", mend="more")
        return []

    monkeypatch.setattr(offload_memory, "_reserve", full)
    rows = offload_memory.memory_table(sweep, "100%", 20, lambda row: None)
    assert [row["refused"] is None for row in rows] == [False, False, False, True, True]
    assert "planned only" in tables.memory(rows)


def test_memory_of_a_run_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What others took before does not count; what of the plan was there before does."""
    parts = build_parts(make_config("qwen1.5-moe", 1, **NARROW["qwen1.5-moe"] | {"num_experts": 8}), toolkit(), 64)
    tools = toolkit()
    sweep = offload.Sweep(parts, SETTINGS, [[5, 6, 7]], 3, 1, lambda graphs: tools, DEVICE_BYTES)
    here = parts.model.dense_bytes + sweep.draft_bytes
    told = [
        DeviceMemory(here + 1000, here + 1000, here + 50_000, here + 50_000),
        DeviceMemory(0, here + 1700, 0, here + 52_000),
    ]
    monkeypatch.setattr(type(tools.accelerator), "memory", lambda self: told.pop(0))
    figures = sweep.run(offload.modes()[-1], "100%").figures
    assert figures["peak_bytes"] == here + 700 and figures["taken_bytes"] == here + 2000
    assert figures["left_over_bytes"] == 1000


def test_records_come_back_from_the_disk_as_they_were(tmp_path: Path) -> None:
    sizes = {"num_experts": 8, "num_experts_per_tok": 2}
    parts = build_parts(make_config("qwen1.5-moe", 2, **NARROW["qwen1.5-moe"] | sizes), toolkit(), 16)
    assert isinstance(parts.tier, Arena)
    with records_on_disk(parts, tmp_path) as store:
        buffer = torch.zeros(store.max_record_bytes, dtype=torch.uint8)
        for key in parts.model.spec.expert_keys():
            size = store.read_into(key, memoryview(buffer.numpy()))  # which compares the sum
            assert size == parts.store.record_bytes(key) and torch.equal(buffer[:size], parts.tier.record(key)[:size])
    assert not list(tmp_path.iterdir())


def test_a_disk_without_room_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = build_parts(make_config("qwen1.5-moe", 1, **NARROW["qwen1.5-moe"] | {"num_experts": 8}), toolkit(), 16)
    assert isinstance(parts.tier, Arena)
    monkeypatch.setattr("shutil.disk_usage", lambda place: type("Usage", (), {"free": 1000})())
    with pytest.raises(StorageError, match="for the experts") as refused, records_on_disk(parts, tmp_path / "new"):
        pass
    assert refused.value.mend and not list((tmp_path / "new").iterdir())


@pytest.mark.parametrize("text", ["1/2", "a/b/c", "1/1/-1", "1,2,3"])
def test_weights_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(InputError):
        parse_weights(text)
    assert parse_weights(" 0.6/0.3/0.1, 1/0/0 ") == [(0.6, 0.3, 0.1), (1.0, 0.0, 0.0)]
    assert parse_weights("") == []
