"""Residual records on a GPU, with the processor in its place: the text and the logits of raw ones, bit by bit (H12)."""

from __future__ import annotations

import gc
import hashlib
import shutil
import threading
import weakref
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runtime import opening
from runtime.artifacts.pack import Pack
from runtime.artifacts.record import DraftFormat, LinearFormat
from runtime.artifacts.safetensors_file import pread
from runtime.config import RunSettings
from runtime.decode.sampling import SamplingSettings
from runtime.engine import Request
from runtime.errors import ArtifactError, InputError, PlanError, ShapeError
from runtime.gpu.bank import bank_form
from runtime.gpu.board import SlotBoard
from runtime.gpu.engine import GpuEngine
from runtime.gpu.plan import plan_gpu, refuse
from runtime.gpu.residual_facts import ResidualFacts, directory_bytes
from runtime.kernels import device
from runtime.kernels.layout import SlotLayout
from runtime.kernels.shape import ExpertShape, WeightForm
from tests.decode.packs import prompt_of
from tests.gpu.residual_packs import Packs, packs_of
from tests.gpu.runs import Logits, say
from tests.gpu.stand_in import HostPool, TorchResidual, open_gpu
from tests.pack.fixtures import save_quantized
from tests.pack.test_damage import change_index
from tests.tiny import make_model, save_model

COUNT = 10
SORTED_ROWS = 128 * 2 * (2 * 128 + 2 * 128 + 4 * 128)  # bytes, of 128 tokens
RAW = {(1, 3), *((2, expert) for expert in range(8))}  # in the mixed pack


def build(folder: Path, wild: set[tuple[int, int]] | None = None, wide_layers: tuple[int, ...] = ()) -> Packs:
    """One model in both encodings, with experts whose records do not become shorter."""
    model = make_model(
        "qwen2_moe", dtype=torch.bfloat16, hidden_size=128, moe_intermediate_size=128, num_hidden_layers=3
    )
    with torch.no_grad():
        for layer, expert in wild or ():
            experts = model.model.layers[layer].mlp.experts
            for name in ("gate_up_proj", "down_proj"):
                weights: nn.Parameter = getattr(experts, name)
                weights[expert, :, torch.arange(128) % 32 != 0] *= 1e-20
    source = save_model(model, folder / "model")
    quantized = save_quantized(source, folder / "quantized", wide_layers=wide_layers)
    return packs_of(source, quantized, folder)


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> Packs:
    return build(tmp_path_factory.mktemp("residual"))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Packs:
    """A layer of residual records, one of which one is raw, and one of raw records."""
    made = build(tmp_path_factory.mktemp("mixed"), RAW)
    found = {key for key, entry in made.residual.records["target"].items() if entry.encoding == "raw"}
    assert found == RAW
    return made


def slot_bytes(pack: Pack) -> int:
    """Device memory of a slot."""
    spec, facts = pack.spec, ResidualFacts.of(pack)
    shape = ExpertShape(spec.num_experts, spec.top_k, spec.hidden_size, spec.moe_intermediate_size)
    return pack.target_slot_bytes + (0 if facts is None else directory_bytes(shape))


def open_with(
    pack: Pack,
    slots: int | None = None,
    needs_pinned: bool = False,
    records: list[TorchResidual] | None = None,
    gates: bool = False,
    **changes: Any,
) -> GpuEngine:
    size = "100%" if slots is None else str(slots * slot_bytes(pack))
    settings = RunSettings(expert_cache_size=size, context=128, **changes)
    return open_gpu(pack, settings, needs_pinned=needs_pinned, records=records, gates=gates)


def generate(pack: Pack, length: int = 20, **changes: Any) -> tuple[list[int], dict[str, Any], Logits]:
    logits: Logits = {}
    with open_with(pack, **changes) as engine:
        return say(engine, prompt_of(length), COUNT, logits), engine.report(), logits


@cache
def alone(pack: Pack, length: int = 20) -> tuple[list[int], dict[str, Any], Logits]:
    return generate(pack, length, speculate=False)


WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "plain, everything resident": {"speculate": False},
    "plain, lru": {"slots": 5, "speculate": False, "prefetch": "none", "eviction": "lru"},
    "look-ahead": {"slots": 7, "prefetch_window": 6, "verify_window": 4, "governor": "fixed"},
    "fewer slots than a row needs": {"slots": 1, "verify_window": 3, "governor": "fixed"},
    "half on disk": {"slots": 4, "host_cache_size": "50%"},
    "memory that cannot be pinned": {"slots": 4, "needs_pinned": True},
    "gates": {"gates": True, "slots": 13, "prefetch_window": 6, "verify_window": 4, "governor": "fixed"},
    "gates, plain, half on disk": {"gates": True, "slots": 12, "speculate": False, "host_cache_size": "50%"},
}


@pytest.mark.parametrize(
    ("which", "way"),
    [*(("packs", way) for way in WAYS), *(("mixed", way) for way in ("whole", "look-ahead", "plain, lru", "gates"))],
)
def test_text_and_logits_are_those_of_the_raw_pack(request: pytest.FixtureRequest, which: str, way: str) -> None:
    packs: Packs = request.getfixturevalue(which)
    tokens, report, logits = generate(packs.residual, **WAYS[way])
    wanted, right_report, right = alone(packs.raw)
    assert tokens == wanted
    known = right.keys() & logits.keys()
    assert len(known) > COUNT // 2
    assert all(torch.equal(logits[text], right[text]) for text in known)
    slots = WAYS[way].get("slots", packs.raw.spec.num_records)
    assert report["plan"]["num_slots"] == slots
    assert report["plan"]["draft_bytes"] == report["measured_bytes"]["draft"] > 0
    assert (
        report["measured_bytes"]["expert_cache"] == report["plan"]["cache_bytes"] == slots * slot_bytes(packs.residual)
    )
    assert right_report["measured_bytes"]["draft"] == 0


@pytest.mark.parametrize("length", [1, 13, 40])
def test_prompts_of_every_length_end_in_the_same_logits(mixed: Packs, length: int) -> None:
    """Up to 16 tokens are computed from records, more of them from decoded ones."""
    wanted, _, right = alone(mixed.raw, length)
    for slots in (3, None):
        tokens, _, logits = generate(mixed.residual, length, slots=slots, speculate=False)
        assert tokens == wanted
        assert all(torch.equal(logits[text], right[text]) for text in right.keys() & logits.keys())


@pytest.mark.parametrize("count", [1, 3, 8])
def test_experts_are_decoded_a_few_at_a_time(
    packs: Packs, mixed: Packs, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    slot = SlotLayout(ExpertShape(8, 2, 128, 128), WeightForm("bf16")).slot_bytes
    monkeypatch.setattr("runtime.gpu.residual_facts._SCRATCH_BYTES", count * slot)
    for both, slots, sets in ((packs, None, 0), (packs, 5, 0), (mixed, None, 1)):
        tokens, report, logits = generate(both.residual, 40, slots=slots)
        wanted, right_report, right = alone(both.raw, 40)
        assert tokens == wanted
        assert all(torch.equal(logits[text], right[text]) for text in right.keys() & logits.keys())
        more = report["plan"]["workspace_bytes"] - right_report["plan"]["workspace_bytes"]
        assert more == count * slot + sets * SORTED_ROWS


@pytest.mark.parametrize("slots", [7, None])
def test_more_records_than_are_checked_between_two_waits(
    packs: Packs, monkeypatch: pytest.MonkeyPatch, slots: int | None
) -> None:
    monkeypatch.setattr("runtime.gpu.admission._BATCH", 3)
    monkeypatch.setattr("runtime.gpu.admission._LAUNCHES", 3)
    assert generate(packs.residual, 40, slots=slots)[0] == alone(packs.raw, 40)[0]


def test_fewer_bytes_come(packs: Packs) -> None:
    way = {"slots": 4, "speculate": False, "prefetch": "none", "eviction": "lru"}
    read = {pack.manifest.encoding: generate(pack, **way)[1]["expert_cache"] for pack in packs}
    ratio = packs.residual.target_slot_bytes / packs.raw.target_slot_bytes
    assert ratio < 0.65
    assert read["residual"]["demand_reads"] == read["raw"]["demand_reads"] > 0
    assert read["residual"]["read_bytes"] == read["raw"]["read_bytes"] * ratio
    with open_with(packs.residual, slots=4) as engine:
        lines = dict(engine.plan.lines())
        assert engine.plan.host_bytes == packs.residual.spec.num_records * packs.residual.target_slot_bytes
        assert lines["all target experts, on disk"] in lines["experts in host memory"]


def test_raw_records_are_computed_by_a_launch_of_their_own(mixed: Packs) -> None:
    records: list[TorchResidual] = []
    with open_with(mixed.residual, records=records, speculate=False) as engine:
        list(engine.generate(Request(prompt_of(20), COUNT, frozenset(), SamplingSettings())))
    calls = [call for one in records for call in one.calls]
    assert any(raw and residual for _, residual, raw in calls) and any(not raw for _, _, raw in calls)


def corrupted(pack: Pack, folder: Path, key: tuple[int, int]) -> Pack:
    """A pack one of whose records was wrong when it was written: its checksum is right."""
    shutil.copytree(pack.folder, folder)
    place = Pack.open(folder).target_location(key)
    data = bytearray(pread(place.path, place.offset_bytes, place.payload_bytes))
    data[0] += 1  # of the first block's start
    with place.path.open("r+b") as file:
        file.seek(place.offset_bytes)
        file.write(data)

    def mend(index: dict[str, list[dict[str, Any]]]) -> None:
        entry = next(e for e in index["target"] if (e["layer_id"], e["expert_id"]) == key)
        entry["sha256"] = hashlib.sha256(data).hexdigest()

    change_index(folder, mend)
    return Pack.open(folder)


@pytest.mark.parametrize("length", [1, 20])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"slots": 4},
        {"slots": 4, "host_cache_size": "50%"},
        {"slots": 4, "speculate": False},
        {"gates": True, "slots": 12},
    ],
    ids=["whole", "few slots", "half on disk", "plain", "gates"],
)
def test_a_record_that_contradicts_itself_ends_the_text_by_name(
    packs: Packs, tmp_path: Path, length: int, changes: dict[str, Any]
) -> None:
    """Before a token that was computed from it is handed out, and whenever it is used again."""
    prompt = prompt_of(length)
    with open_with(packs.residual, speculate=False) as engine:
        uses = used_experts(engine, prompt)
    key = max(uses, key=lambda key: uses[key])
    pack = corrupted(packs.residual, tmp_path / "pack", key)
    before = threading.active_count()
    with open_with(pack, **changes) as engine:
        for _ in range(2):
            found: list[int] = []
            with pytest.raises(ArtifactError, match=rf"layer {key[0]}, expert {key[1]}.*blocks that do not"):
                found.extend(engine.generate(Request(prompt, COUNT, frozenset(), SamplingSettings())))
            assert not found if length == 20 else len(found) <= uses[key]
    assert threading.active_count() == before


def test_tokens_before_the_first_use_of_such_a_record_come(packs: Packs, tmp_path: Path) -> None:
    prompt = prompt_of(1)
    with open_with(packs.residual, speculate=False) as engine:
        uses = used_experts(engine, prompt)
    key = max(uses, key=lambda key: uses[key])
    assert uses[key] > 1
    plain = {"slots": 4, "speculate": False, "prefetch": "none"}
    found: list[int] = []
    with open_with(corrupted(packs.residual, tmp_path / "pack", key), **plain) as engine, pytest.raises(ArtifactError):
        for token in engine.generate(Request(prompt, COUNT, frozenset(), SamplingSettings())):
            found.append(token)
    assert found == alone(packs.raw, 1)[0][: uses[key]]


def used_experts(engine: GpuEngine, prompt: list[int]) -> dict[tuple[int, int], int]:
    """The row of a text's decoding that uses each expert first."""
    rows: list[Any] = []
    inner = engine.rows

    def kept(*arguments: Any) -> Any:
        found = inner(*arguments)
        rows.extend(found[1])
        return found

    engine.rows = kept  # type: ignore[method-assign]
    list(engine.generate(Request(prompt, COUNT, frozenset(), SamplingSettings())))
    return {key: number for number, row in reversed(list(enumerate(rows))) for key in row}


def test_interrupts_leave_an_engine_that_says_the_same(packs: Packs) -> None:
    with open_with(packs.residual, slots=4) as engine:
        request = Request(prompt_of(20), COUNT, frozenset(), SamplingSettings())
        admission: Any = engine._experts._admission  # type: ignore[attr-defined]
        queue, calls = admission.queue, 0

        def interrupted(*arguments: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == 4:
                raise KeyboardInterrupt
            queue(*arguments)

        admission.queue = interrupted
        with pytest.raises(KeyboardInterrupt):
            list(engine.generate(request))
        assert list(engine.generate(request)) == alone(packs.raw)[0]


@pytest.mark.parametrize("gates", [False, True])
def test_an_interrupt_between_two_layers_of_records_admits_none_that_was_not_looked_at(
    packs: Packs, monkeypatch: pytest.MonkeyPatch, gates: bool
) -> None:
    admit = HostPool.admit
    for last in (2, 5):
        calls = 0

        def interrupted(self: HostPool, *arguments: Any, last: int = last) -> None:
            nonlocal calls
            calls += 1
            if calls == last and threading.current_thread() is threading.main_thread():
                raise KeyboardInterrupt
            admit(self, *arguments)

        with open_with(packs.residual, slots=13, gates=gates) as engine:
            request = Request(prompt_of(20), COUNT, frozenset(), SamplingSettings())
            with monkeypatch.context() as patch:
                patch.setattr(HostPool, "admit", interrupted)
                with suppress(KeyboardInterrupt):
                    list(engine.generate(request))
            assert list(engine.generate(request)) == alone(packs.raw)[0]


def test_faults_in_a_pass_that_was_given_up_are_looked_for_again(packs: Packs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slots may have been overwritten: a sound pack may not be called damaged for that."""
    admit, told, listed = HostPool.admit, SlotBoard.told, 0

    def overwritten(self: HostPool, slots: Tensor, bank: Tensor, size: Tensor, faults: Tensor) -> None:
        nonlocal listed
        admit(self, slots, bank, size, faults)
        if threading.current_thread() is not threading.main_thread():  # behind a gate
            faults[slots >= 0] += 1
            listed += int((slots >= 0).sum())

    def interrupted(self: SlotBoard, place: int) -> list[int]:
        if listed:
            raise KeyboardInterrupt
        return told(self, place)

    with open_with(packs.residual, slots=13, gates=True, speculate=False) as engine, monkeypatch.context() as patch:
        request = Request(prompt_of(20), COUNT, frozenset(), SamplingSettings())
        patch.setattr(HostPool, "admit", overwritten)
        patch.setattr(SlotBoard, "told", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(engine.generate(request))
        patch.undo()
        assert list(engine.generate(request)) == alone(packs.raw)[0]


GPU = device.Gpu(0, "a GPU", (9, 0), 132, 232_448)
OLDER = device.Gpu(0, "an older GPU", (8, 0), 108, 166_912)


def test_what_the_kernels_do_not_compute_is_refused_by_name(
    packs: Packs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = RunSettings(context=64)
    assert refuse(packs.residual, settings, GPU) == refuse(packs.raw, settings, OLDER)
    with pytest.raises(InputError, match=r"compute capability 9\.0 or newer.*an older GPU"):
        refuse(packs.residual, settings, OLDER)
    with pytest.raises(ShapeError, match="shared memory"):
        refuse(packs.residual, settings, device.Gpu(0, "a small one", (9, 0), 1, 10_000))
    wide = build(tmp_path, wide_layers=(1,)).residual
    with pytest.raises(InputError, match=r"INT8 in groups of 128.* in layer 1 of"):
        plan_gpu(wide, settings, device_bytes=8 * 10**9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(device, "current_gpu", lambda: GPU)
    monkeypatch.setattr(opening, "find_spec", lambda name: object())
    assert opening.choose_device(packs.residual, settings).is_gpu
    chosen = opening.choose_device(wide, settings)
    assert not chosen.is_gpu and "INT4 codes" in str(chosen.refused)


def test_the_plan_counts_bank_directory_and_scratch(packs: Packs) -> None:
    settings = RunSettings(expert_cache_size="50%", context=64, speculate=False)
    plan = plan_gpu(packs.residual, settings, device_bytes=8 * 10**9)
    assert plan.num_slots == packs.residual.spec.num_records // 2 and plan.draft_bytes > 0
    assert plan.directory_bytes == directory_bytes(ExpertShape(8, 2, 128, 128)) == (16 + 8) * 80
    assert plan.slot_bytes == packs.residual.target_slot_bytes + plan.directory_bytes
    with pytest.raises(PlanError, match="expert cache within"):
        plan_gpu(packs.residual, settings, device_bytes=plan.total_bytes - 1)


@pytest.mark.parametrize(
    ("gate_up", "down", "form"),
    [
        ((4, 128), (4, 128), WeightForm("int4", 128)),  # of 256 and 128 columns: the embedded model
        ((4, 256), (4, 128), WeightForm("int4", -1)),
        ((4, 64), (4, 128), WeightForm("bf16")),
        ((4, 32), (4, 32), WeightForm("int4", 32)),
        ((4, 16), (4, 16), WeightForm("bf16")),
        ((8, 256), (8, 128), WeightForm("int8", -1)),
        ((8, 128), (4, 128), WeightForm("bf16")),
        ((0, 0), (0, 0), WeightForm("bf16")),
    ],
)
def test_a_bank_is_codes_where_one_group_size_fits_both_linears(
    packs: Packs, gate_up: tuple[int, int], down: tuple[int, int], form: WeightForm
) -> None:
    spec = packs.raw.spec.__class__("mixtral", 1, (0,), 8, 2, 256, 128, "BF16", False, 0)
    assert bank_form(DraftFormat(LinearFormat(*gate_up), LinearFormat(*down)), spec) == form


def test_a_closed_engine_has_given_its_memory_back(packs: Packs) -> None:
    """Slots, their directories and the scratch slots too, and at once."""
    settings = RunSettings(expert_cache_size="40%", context=128)
    gc.collect()
    gc.disable()
    try:
        with open_gpu(packs.residual, settings) as engine:
            list(engine.generate(Request(prompt_of(5), 2, frozenset(), SamplingSettings())))
            experts: Any = engine._experts
            parts = experts.pool.whole, experts._directory, experts._scratch
            left = [weakref.ref(part) for part in parts]
            size = experts.num_bytes
            del parts
        assert not [part for part in left if part() is not None]
        assert engine.report()["measured_bytes"]["expert_cache"] == size
    finally:
        gc.enable()
