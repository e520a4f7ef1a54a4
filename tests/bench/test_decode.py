"""The sweeps on a tiny model: one text in all modes, and no figure below what a clairvoyant cache reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from moespeq_cli.bench import decode as sweep
from moespeq_cli.bench.bound import check_reads, passes, record_bytes
from moespeq_cli.bench.prompts import BenchPrompt
from runtime.artifacts.pack import Pack
from runtime.config import RunSettings
from runtime.engine import Engine, Request
from runtime.errors import InputError
from runtime.memory.stats import CacheStats
from tests.decode.packs import build, prompt_of
from tests.pack.fixtures import make_pack, save_quantized
from tests.tiny import save_tiny

torch.set_num_threads(1)

PROMPTS = [BenchPrompt("maths", tuple(prompt_of(9))), BenchPrompt("code", tuple(prompt_of(4, seed=90)))]
BASE = RunSettings(context=64, threads=1)
NEW_TOKENS = 6


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    """Two layers of eight experts, top-2."""
    return build(tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="module")
def memory(pack: Pack) -> dict[str, Any]:
    sizes = [str(pack.target_slot_bytes), "40%", "100%"]
    return sweep.sweep_memory({"raw": pack}, BASE, PROMPTS, NEW_TOKENS, frozenset(), sizes, 1, lambda: None)


def test_every_mode_at_every_size_has_a_row(memory: dict[str, Any]) -> None:
    assert memory["same_tokens"] and memory["new_tokens"] == NEW_TOKENS * len(PROMPTS)
    assert len(memory["rows"]) == 3 * len(sweep.MODES)
    assert {row["new_tokens"] for row in memory["rows"]} == {memory["new_tokens"]}
    lines = sweep.memory_table(memory).splitlines()
    assert len(lines) == 2 + len(memory["rows"])
    assert {line.count("|") for line in lines} == {9}
    for mode in sweep.MODES:
        assert sum(f"| {mode.name} |" in line for line in lines) == 3


def test_no_mode_reads_less_than_its_passes_need_and_none_without_a_draft_less_than_row_by_row(
    memory: dict[str, Any],
) -> None:
    for row in memory["rows"]:
        assert row["total_bytes_per_token"] >= row["own_bound_bytes_per_token"] > 0
        if row["mode"].startswith("no draft"):
            assert row["total_bytes_per_token"] >= row["clairvoyant_bytes_per_token"]
            assert row["own_bound_bytes_per_token"] == row["clairvoyant_bytes_per_token"]


def test_bound_and_reads_are_one_where_nothing_is_evicted_or_guessed(pack: Pack, memory: dict[str, Any]) -> None:
    full = [row for row in memory["rows"] if row["cache"] == "100%" and row["mode"] == "no draft, LRU"]
    assert full[0]["total_bytes_per_token"] == full[0]["clairvoyant_bytes_per_token"]  # both count the prompts
    assert full[0]["prefill_read_bytes"] > 0
    assert full[0]["total_bytes_per_token"] * full[0]["new_tokens"] <= pack.spec.num_records * record_bytes(pack)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pack]:
    """One model in both encodings."""
    folder = tmp_path_factory.mktemp("pair")
    model = save_tiny("qwen2_moe", folder / "model", dtype=torch.bfloat16, hidden_size=128, moe_intermediate_size=128)
    quantized = save_quantized(model, folder / "quantized")
    return {name: make_pack(model, quantized, folder / name, encoding=name) for name in ("raw", "residual")}


@pytest.mark.parametrize("same_total", [False, True])
def test_two_packs_take_turns_in_one_memory(pair: dict[str, Pack], same_total: bool) -> None:
    modes = sweep.find_modes(["no draft, LRU", "look-ahead"])
    calls: list[None] = []
    result = sweep.sweep_memory(
        pair, BASE, PROMPTS[:1], NEW_TOKENS, frozenset(), ["30%"], 2, lambda: calls.append(None), same_total, modes
    )
    rows = result["rows"]
    assert len(calls) == len(rows) == 4 and result["same_tokens"] and result["same_total_memory"] is same_total
    raw_bytes = pair["raw"].spec.num_records * pair["raw"].target_slot_bytes
    for raw, residual in zip(rows[::2], rows[1::2], strict=True):
        assert (raw["pack"], residual["pack"]) == ("raw", "residual") and raw["mode"] == residual["mode"]
        planned = [sum(row["planned_bytes"][part] for part in ("draft", "cache")) for row in (raw, residual)]
        if same_total:
            assert abs(planned[0] - planned[1]) < pair["raw"].target_slot_bytes
        else:
            assert planned[1] > planned[0]  # its drafts stay in memory
            for row, name in ((raw, "raw"), (residual, "residual")):
                assert row["num_slots"] == int(0.3 * raw_bytes) // pair[name].target_slot_bytes
            assert residual["total_bytes_per_token"] < raw["total_bytes_per_token"]
        assert residual["decode_ms_per_token"] > 0 and residual["cpu_ms_per_token"] > 0
    table = sweep.memory_table(result).splitlines()
    assert table[0].startswith("| cache | mode | records | experts in it |")
    assert [line.split("|")[3].strip() for line in table[2:]] == ["raw", "residual"] * 2
    assert {line.count("|") for line in table} == {13}


def test_windows_give_the_same_text_and_tables_of_all_cells(pack: Pack) -> None:
    calls: list[None] = []
    grid = sweep.sweep_windows(
        pack, BASE, PROMPTS[:1], NEW_TOKENS, frozenset(), "40%", [1, 4], [0, 2], lambda: calls.append(None)
    )
    assert grid["same_tokens"] and len(calls) == 4
    assert [(row["window"], row["verify"]) for row in grid["rows"]] == [(1, 0), (1, 2), (4, 0), (4, 2)]
    for row in grid["rows"]:
        assert row["total_bytes_per_token"] >= row["own_bound_bytes_per_token"] > 0
    table = sweep.window_table(grid, "total_bytes_per_token", 1e-6, 2).splitlines()
    assert table[0] == "| window | verify 0 | verify 2 |" and [line[:4] for line in table[2:]] == ["| 1 ", "| 4 "]
    assert not any("| -" in line for line in table[2:])


def test_a_mode_that_changes_the_text_stops_the_sweep(pack: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgetful(Engine):
        def generate(self, request: Request) -> Iterator[int]:
            for token in super().generate(request):
                yield token if self.settings.eviction == "lru" else token + 1

    monkeypatch.setattr(sweep, "Engine", Forgetful)
    modes = (sweep.Mode("wrong", {"eviction": "lfu"}),)
    with pytest.raises(RuntimeError, match="wrong at 100% changed the text"):
        sweep.sweep_memory({"raw": pack}, BASE, PROMPTS[:1], 2, frozenset(), ["100%"], 1, lambda: None, modes=modes)
    with pytest.raises(RuntimeError, match="window 1, verify 0 changed the text"):
        sweep.sweep_windows(pack, BASE, PROMPTS[:1], 2, frozenset(), "100%", [1], [0], lambda: None)


def test_a_mode_that_is_not_known_is_refused_with_those_that_are() -> None:
    assert sweep.find_modes(None) == sweep.MODES
    with pytest.raises(InputError, match=r"a mode among: no draft, LRU; .*look-ahead"):
        sweep.find_modes(["faster"])


def test_fewer_reads_than_the_demands_need_are_refused() -> None:
    trace = [[(0, 1), (0, 2)], [(1, 1)], [(0, 1)]]
    assert check_reads(trace, 3, CacheStats(demand_reads=2, prefetch_reads=1)) == 3
    with pytest.raises(RuntimeError, match="2 reads counted where no cache of 3 slots needs fewer than 3"):
        check_reads(trace, 3, CacheStats(demand_reads=2))


def test_rows_of_a_pass_ask_together() -> None:
    rows = [[(0, 1), (0, 2)], [(0, 2), (0, 3)], [(1, 1)], [(1, 1)], [], [(0, 1)]]
    assert passes(rows) == [[(0, 1), (0, 2), (0, 2), (0, 3)], [(1, 1), (1, 1)], [(0, 1)]]


@pytest.mark.parametrize("verify_window", [0, 3])
def test_an_engine_s_trace_is_what_its_cache_was_asked(
    pack: Pack, monkeypatch: pytest.MonkeyPatch, verify_window: int
) -> None:
    asked: list[set[tuple[int, int]]] = []

    class Watched(Engine):
        def generate(self, request: Request) -> Iterator[int]:
            if not asked:
                stream = self.cache.stream
                self.cache.stream = lambda keys: (asked.append(set(keys)), stream(keys))[1]  # type: ignore[method-assign]
            return super().generate(request)

    monkeypatch.setattr(sweep, "Engine", Watched)
    settings = dataclasses.replace(BASE, verify_window=verify_window, governor="fixed", expert_cache_size="40%")
    found = sweep.measure(pack, settings, PROMPTS[:1], NEW_TOKENS, frozenset(), 1)
    assert [set(demand) for demand in passes(found.trace)] == asked
    assert len(asked) % len(pack.spec.moe_layers) == 0
