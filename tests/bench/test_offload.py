"""Decoding of a built model, ways side by side, with the processor in the GPU's place."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from moespeq_cli.bench import offload
from moespeq_cli.bench import offload_tables as tables
from moespeq_cli.bench.offload_compare import Comparison
from moespeq_cli.bench.offload_compare import routing as routing_of
from moespeq_cli.bench.offload_kernels import TOKEN_ORDER
from moespeq_cli.bench.synthetic.models import make_config
from moespeq_cli.bench.synthetic.parts import build_parts
from runtime.config import RunSettings
from runtime.errors import InputError
from runtime.gpu.engine import Parts
from runtime.gpu.host_tier import Arena
from runtime.kernels.layout import SlotLayout
from runtime.kernels.reference import dequantize
from tests.gpu.stand_in import TorchKernels, toolkit

SMALL: dict[str, Any] = {
    "vocab_size": 4200, "hidden_size": 128, "moe_intermediate_size": 128, "intermediate_size": 128,
    "shared_expert_intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "num_experts": 8,
    "num_experts_per_tok": 2, "max_position_embeddings": 256,
}  # fmt: skip
SETTINGS = RunSettings(device="cuda", context=96, prefetch_window=6, governor="fixed")


@pytest.fixture(scope="module")
def parts() -> Parts:
    return build_parts(make_config("qwen1.5-moe", 2, **SMALL), toolkit(), 96)


def sweep_of(parts: Parts, repeats: int = 1, **changes: Any) -> offload.Sweep:
    prompts = offload.make_prompts(2, 12, 3, 4096)
    settings = dataclasses.replace(SETTINGS, **changes)
    return offload.Sweep(parts, settings, prompts, 6, repeats, lambda graphs: toolkit(), 10**10)


def test_built_draft_is_the_rounded_target(parts: Parts) -> None:
    """The bank's experts are those of the arena, to the nearest code."""
    assert isinstance(parts.tier, Arena) and parts.bank is not None
    kernels, slots, _ = parts.bank._layers[1]
    layout: SlotLayout = kernels._layout  # type: ignore[attr-defined]
    gate_up, down, _ = layout.unpack_codes(slots)
    exact = SlotLayout(layout.shape, offload_form())
    for expert_id in range(8):
        weights, down_weights, _ = exact.views_bf16(parts.tier.record((1, expert_id))[None])
        for codes, right in ((gate_up, weights), (down, down_weights)):
            found = dequantize(codes, layout.form)[expert_id]
            step = codes.scales[expert_id].double().repeat_interleave(128, -1)
            assert bool(((found - right[0].double()).abs() <= 0.51 * step).all())


def offload_form() -> Any:
    from runtime.kernels.shape import WeightForm

    return WeightForm("bf16")


def test_every_way_gives_one_text_and_its_figures(parts: Parts) -> None:
    sweep = sweep_of(parts)
    share = sweep.draft_bytes / sweep.expert_bytes
    memory = f"{100 * share + 40:.0f}%"
    told: list[dict[str, Any]] = []
    ways = [*offload.modes(), *offload.ABLATIONS]
    comparison = Comparison()
    rows = comparison.run(sweep, [memory], ways, told.append)
    compared = comparison.as_json()
    routing = compared["routing"]
    assert (compared["ways"], compared["prompts"], compared["tokens"]) == (len(ways), 2, 12)
    assert rows == told and [row["mode"] for row in rows] == [way.name for way in ways]
    by_name = {row["mode"].split(":")[0]: row for row in rows}
    slots = {name: row["num_slots"] for name, row in by_name.items()}
    assert slots["SM"] > slots["SC"] == slots["lookahead"]
    assert by_name["SM"]["planned_bytes"] - by_name["lookahead"]["planned_bytes"] < sweep.expert_bytes / 16
    for row in rows:
        assert row["new_tokens"] == 12 and row["same_text"]
        assert row["expert_cache"]["read_bytes"] >= row["own_bound_bytes_per_token"] * 12 > 0
    assert routing["rows"] == 12 and 0 < routing["entropy"] <= 1 and 0 <= routing["neighbours"] <= 1
    assert tables.ways(rows).count("\n") == len(rows) + 1


def test_token_order_computes_the_rows_of_a_pass_alone_and_those_of_a_prompt_together(parts: Parts) -> None:
    made: list[TorchKernels] = []
    prompts = offload.make_prompts(1, 12, 3, 4096)
    sweep = offload.Sweep(parts, SETTINGS, prompts, 3, 1, lambda graphs: toolkit(made), 10**10)
    sweep.run(offload.Mode("token order", {}, kernels=TOKEN_ORDER), "100%")
    assert {rows for rows, _ in made[-1].calls} == {1, 11}


def test_another_text_is_said_of_a_way_that_may_give_one(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep, run = sweep_of(parts), offload.Sweep.run

    def other(self: offload.Sweep, mode: offload.Mode, memory: str) -> offload.Outcome:
        found = run(self, mode, memory)
        return found if mode.same_text else dataclasses.replace(found, tokens=[[7]])

    monkeypatch.setattr(offload.Sweep, "run", other)
    comparison, look = Comparison(), offload.modes()[-1]
    rows = comparison.run(sweep, ["100%"], [look, dataclasses.replace(look, same_text=False)], lambda row: None)
    assert [row["same_text"] for row in rows] == [True, False] and comparison.as_json()["ways"] == 1


def test_memory_below_the_draft_is_refused(parts: Parts) -> None:
    with pytest.raises(InputError, match="what the draft takes"):
        sweep_of(parts).settings(offload.modes()[-1], "5%")


def test_too_little_memory_is_refused_before_anything_is_measured(parts: Parts) -> None:
    told: list[dict[str, Any]] = []
    with pytest.raises(InputError, match="what the draft takes"):
        Comparison().run(sweep_of(parts), ["100%", "5%"], offload.modes(), told.append)
    assert not told


def test_everything_resident_reads_nothing_while_decoding(parts: Parts) -> None:
    sweep = sweep_of(parts)
    row = sweep.run(offload.Mode("all", {}, all_memory=True), "100%").figures
    assert row["expert_cache"]["read_bytes"] == 0 and row["hit_rate"] == 1


def test_first_token_needs_the_prompts_experts(parts: Parts) -> None:
    sweep = sweep_of(parts)
    share = sweep.draft_bytes / sweep.expert_bytes
    row = offload.first_token(sweep, f"{100 * share + 60:.0f}%", 40)
    assert row["tokens"] == 40 and row["ms"] >= row["prefill_ms"] > 0 < row["recording_ms"]
    assert row["read_bytes"] >= 4 * parts.store.max_record_bytes
    assert tables.first_tokens([row]).startswith("| prompt |")


def test_a_way_that_changes_the_text_reports_nothing(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = sweep_of(parts)
    run = sweep.run

    def lying(mode: offload.Mode, memory: str) -> offload.Outcome:
        found = run(mode, memory)
        return dataclasses.replace(found, tokens=[[*found.tokens[0][:-1], 7], *found.tokens[1:]])

    ways = offload.modes()[:2]
    first = run(ways[0], "100%")
    monkeypatch.setattr(sweep, "run", lambda mode, memory: first if mode is ways[0] else lying(mode, memory))
    told: list[dict[str, Any]] = []
    with pytest.raises(RuntimeError, match="changed the text"):
        Comparison().run(sweep, ["100%"], ways, told.append)
    assert len(told) == 1


def test_routing_figures_of_known_rows() -> None:
    even = [[(0, 0), (0, 1)], [(0, 2), (0, 3)]]
    assert routing_of(even, 1, 4) == {"rows": 2, "entropy": pytest.approx(1.0), "neighbours": 0.0}
    assert routing_of([even[0], even[0]], 1, 4)["neighbours"] == 1.0
    assert routing_of([even[0], even[0]], 1, 4)["entropy"] == pytest.approx(0.5)


def test_prompts_are_the_same_every_time() -> None:
    assert offload.make_prompts(2, 5, 3, 100) == offload.make_prompts(2, 5, 3, 100)
    assert torch.tensor(offload.make_prompts(3, 50, 3, 100)).min() >= 3
