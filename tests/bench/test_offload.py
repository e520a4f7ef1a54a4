"""Decoding of a built model, ways side by side, with the processor in the GPU's place."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from moespeq_cli.app import main
from moespeq_cli.bench import offload
from moespeq_cli.bench import offload_tables as tables
from moespeq_cli.bench.decode_command import _encodings
from moespeq_cli.bench.offload_compare import Comparison
from moespeq_cli.bench.offload_compare import routing as routing_of
from moespeq_cli.bench.offload_kernels import TOKEN_ORDER
from moespeq_cli.bench.synthetic.models import make_config
from moespeq_cli.bench.synthetic.parts import _residual, build_encodings
from runtime.config import RunSettings
from runtime.errors import InputError
from runtime.gpu.geometry import expert_shape
from runtime.gpu.host_tier import Arena
from runtime.gpu.parts import Parts
from runtime.kernels.layout import SlotLayout
from runtime.kernels.reference import dequantize
from tests.gpu.stand_in import HostPool, TorchKernels, toolkit

SMALL: dict[str, Any] = {
    "vocab_size": 4200, "hidden_size": 128, "moe_intermediate_size": 128, "intermediate_size": 128,
    "shared_expert_intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "num_experts": 8,
    "num_experts_per_tok": 2, "max_position_embeddings": 256,
}  # fmt: skip
SETTINGS = RunSettings(device="cuda", context=96, prefetch_window=6, governor="fixed")


@pytest.fixture(scope="module")
def made() -> dict[str, Parts]:
    return build_encodings(make_config("qwen1.5-moe", 2, **SMALL), toolkit(), 96, residual=True)


@pytest.fixture(scope="module")
def parts(made: dict[str, Parts]) -> Parts:
    return made["raw"]


def sweep_of(parts: Parts, repeats: int = 1, residual: Parts | None = None, **changes: Any) -> offload.Sweep:
    prompts = offload.make_prompts(2, 12, 3, 4096)
    settings = dataclasses.replace(SETTINGS, **changes)
    return offload.Sweep(parts, settings, prompts, 6, repeats, lambda graphs: toolkit(), 10**10, residual)


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


def test_residual_records_beside_raw_ones(made: dict[str, Parts]) -> None:
    """The same text out of the same memory, with more experts in slots and fewer bytes for each."""
    sweep = sweep_of(made["raw"], residual=made["residual"])
    memory = f"{100 * sweep.draft_bytes / sweep.expert_bytes + 40:.0f}%"
    ways = offload.modes(["raw", "residual"])
    assert [way.encoding for way in ways[-3:]] == ["raw", "residual", "residual"]
    rows = Comparison().run(sweep, [memory], [ways[0], *ways[-3:]], lambda row: None)
    sm, raw, plain, residual = rows
    assert [row["encoding"] for row in rows] == ["raw", "raw", "residual", "residual"]
    records = sweep.records()
    slot = records["record_bytes"] + records["directory_bytes"]
    assert raw["num_slots"] < residual["num_slots"] == plain["num_slots"]
    assert residual["planned_bytes"] - plain["planned_bytes"] == 0
    for row in (plain, residual):
        reads = row["expert_cache"]["demand_reads"] + row["expert_cache"]["prefetch_reads"]
        assert row["expert_cache"]["read_bytes"] <= reads * records["record_bytes"]
        total = sm["num_slots"] * made["raw"].store.max_record_bytes
        assert total - slot < row["num_slots"] * slot + sweep.draft_bytes <= total + slot
    assert 8.4 < records["bits_per_weight"] < 11 and records["raw_records"] == 0
    assert records["bits_per_weight"] == pytest.approx(8 * mean_record(made["residual"]) / (3 * 128 * 128))


def mean_record(parts: Parts) -> float:
    assert parts.residual is not None
    lengths = parts.residual.payload_bytes.values()
    return sum(lengths) / len(lengths)


def test_built_records_decode_to_the_raw_ones(made: dict[str, Parts]) -> None:
    raw, residual = made["raw"].tier, made["residual"].tier
    bank, facts = made["residual"].bank, made["residual"].residual
    assert isinstance(raw, Arena) and isinstance(residual, Arena) and bank is not None and facts is not None
    for (layer_id, expert_id), length in list(facts.payload_bytes.items())[::5]:
        layout, codes = bank.layer(layer_id)
        pool = HostPool.of(layout, residual.record((layer_id, expert_id))[None], codes)
        faults = torch.zeros(1, dtype=torch.int32)
        pool.admit(torch.zeros(1, dtype=torch.int32), torch.tensor([expert_id]), torch.tensor([length]), faults)
        assert not faults.any() and torch.equal(pool.weights(0, expert_id), raw.record((layer_id, expert_id)))


def test_a_record_that_is_no_shorter_is_raw(made: dict[str, Parts]) -> None:
    raw = made["raw"]
    exact = SlotLayout(expert_shape(raw.model.spec, raw.activation), offload_form())
    key, records = (1, 2), {}
    for other in raw.model.spec.expert_keys():
        longer = other == key
        records[other] = torch.ones(exact.payload_bytes if longer else 70_000, dtype=torch.uint8)
    parts = _residual(raw, records, exact)
    assert parts.residual is not None and set(parts.residual.payload_bytes) == set(raw.model.spec.expert_keys()) - {key}
    assert parts.store.max_record_bytes == parts.store.record_bytes(key) == exact.slot_bytes
    assert isinstance(parts.tier, Arena) and isinstance(raw.tier, Arena)
    assert torch.equal(parts.tier.record(key)[: exact.payload_bytes], raw.tier.record(key)[: exact.payload_bytes])


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


def test_encodings_are_named_apart_or_together_and_others_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert _encodings(None) == ["raw"]
    assert _encodings(["raw,residual", "raw"]) == _encodings(["raw", "residual"]) == ["raw", "residual"]
    with pytest.raises(SystemExit):
        main(["bench", "decode", "--geometry", "qwen1.5-moe", "--encoding", "zip"])
    assert "--encoding of raw, residual; found 'zip'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--encoding", "residual"], "--encoding together with --geometry"),
        (["--disk", "/tmp"], "--disk together with --geometry"),
        (["--no-ablations"], "--ablations together with --geometry"),
        (["--geometry", "qwen1.5-moe", "--expert-cache", "25%"], "--expert-cache without --geometry"),
    ],
)
def test_an_option_of_the_other_kind_of_model_is_refused(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="1"):
        main(["bench", "decode", *options])
    assert said in capsys.readouterr().err
