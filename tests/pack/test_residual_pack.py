"""Packs of residual records: smaller, verified, and run to the same text as raw ones."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from moespeq_cli.pack.report import report_lines
from moespeq_cli.pack.verify import verify_pack
from runtime.artifacts import residual_decoder
from runtime.artifacts.checkpoint import Checkpoint
from runtime.artifacts.pack import Pack
from runtime.artifacts.quantized import Quantized
from runtime.artifacts.residual import ResidualEncoding
from runtime.artifacts.residual_decoder import work_bytes
from runtime.artifacts.safetensors_file import pread
from runtime.decode.draft_records import DraftRecords
from runtime.errors import ArtifactError
from tests.decode.packs import assert_same, decode, prompt_of
from tests.pack.fixtures import make_pack, save_quantized
from tests.pack.test_damage import change_index
from tests.tiny import save_tiny


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pack]:
    """The same model in both encodings; layer 1 has 8-bit drafts."""
    folder = tmp_path_factory.mktemp("residual")
    model = save_tiny(
        "qwen2_moe", folder / "model", dtype=torch.bfloat16, hidden_size=128, moe_intermediate_size=128,
        num_hidden_layers=3,
    )  # fmt: skip
    quantized = save_quantized(model, folder / "quantized", wide_layers=[1])
    return {name: make_pack(model, quantized, folder / name, 2, encoding=name) for name in ("raw", "residual")}


def test_a_residual_pack_is_smaller_and_verifies(packs: dict[str, Pack]) -> None:
    pack, folder = packs["residual"], packs["residual"].folder.parent
    assert pack.leans_on_draft and not packs["raw"].leans_on_draft
    assert {entry.encoding for entry in pack.records["target"].values()} == {"residual"}
    assert pack.target_slot_bytes < 0.65 * packs["raw"].target_slot_bytes
    found = verify_pack(pack, Checkpoint.open(folder / "model"), Quantized.open(folder / "quantized"))
    assert found.problems == []
    assert found.records_equal_to_source == found.residual_decoded == pack.spec.num_records
    other = verify_pack(packs["raw"])
    assert other.problems == [] and (other.residual_decoded, other.records_equal_to_source) == (0, 0)


def test_the_report_counts_what_the_records_hold(packs: dict[str, Pack]) -> None:
    pack = packs["residual"]
    report = json.loads((pack.folder / "report.json").read_text())
    places, drafts = pack.target_locations(), DraftRecords(pack)
    for layer in pack.spec.moe_layers:
        sums = {"gate_up": [0, 0, 0], "down": [0, 0, 0]}
        keys = [key for key in places if key[0] == layer]
        for key in keys:
            payload = pread(places[key].path, places[key].offset_bytes, places[key].payload_bytes)
            data = torch.frombuffer(payload, dtype=torch.uint8)
            for name, counts in ResidualEncoding().counts(data, pack.target_layout, drafts[key]).items():
                found = (counts.zero_codes, counts.exceptions, counts.block_bytes)
                sums[name] = [a + b for a, b in zip(sums[name], found, strict=True)]
        facts = report["layers"][str(layer)]["target"]
        for name, weights in (("gate_up", 2 * 128 * 128), ("down", 128 * 128)):
            assert [facts["zero_codes"][name], facts["exceptions"][name]] == sums[name][:2]
            assert facts[name] == round(8 * sums[name][2] / (weights * len(keys)), 4)
            assert 8 < facts[name] < facts["record"] < 11
        assert facts["raw_records"] == 0
    assert report["exceptions"]["down"] == sum(
        report["layers"][str(i)]["target"]["exceptions"]["down"] for i in range(3)
    )
    text = report_lines(report)
    assert text[0].endswith(f"; {sum(report['exceptions'].values())} exceptions") and len(text) == 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_sources_of_other_types_are_raw_and_the_report_says_so(tmp_path: Path, dtype: torch.dtype) -> None:
    model = save_tiny("qwen2_moe", tmp_path / "model", dtype=dtype)
    pack = make_pack(model, save_quantized(model, tmp_path / "quantized"), tmp_path / "pack", encoding="residual")
    report = json.loads((pack.folder / "report.json").read_text())
    name = {torch.float16: "F16 weights", torch.float32: "F32 weights"}[dtype]
    assert report["raw_reasons"] == {name: pack.spec.num_records} and not pack.leans_on_draft
    records = pack.spec.num_records
    assert report_lines(report)[-1] == f"{records} of {records} target records are raw: {records} for {name}"
    assert report["layers"]["0"]["target"]["down"] == 8 * dtype.itemsize


def test_a_record_that_contradicts_itself_is_named(packs: dict[str, Pack]) -> None:
    pack, key = packs["residual"], (2, 5)
    drafts = DraftRecords(pack)
    place = pack.target_location(key)
    buffer = torch.frombuffer(
        bytearray(pread(place.path, place.offset_bytes, place.padded_bytes)), dtype=torch.uint8
    )  # fmt: skip
    buffer[0] += 1  # of the first block's start
    with pytest.raises(ArtifactError, match=r"blocks of gate_up .*as target of layer 2, expert 5; found others"):
        pack.decode_target(key, buffer, drafts[key])


def test_verification_decodes_without_the_source_too(packs: dict[str, Pack], tmp_path: Path) -> None:
    """A record that was wrong when it was written has a right checksum."""
    folder = Path(shutil.copytree(packs["residual"].folder, tmp_path / "pack"))
    place = Pack.open(folder).target_location((1, 3))
    data = bytearray(pread(place.path, place.offset_bytes, place.payload_bytes))
    data[0] += 1
    with place.path.open("r+b") as file:
        file.seek(place.offset_bytes)
        file.write(data)

    def mend(index: dict[str, list[dict[str, Any]]]) -> None:
        entry = next(e for e in index["target"] if (e["layer_id"], e["expert_id"]) == (1, 3))
        entry["sha256"] = hashlib.sha256(data).hexdigest()

    change_index(folder, mend)
    problems = verify_pack(Pack.open(folder)).problems
    assert any("target record of layer 1, expert 3: expected a residual record" in problem for problem in problems)


@pytest.mark.parametrize(
    "way",
    [
        {"speculate": False},
        {"prefetch_window": 6, "verify_window": 4, "slots": 2},
        {"prefetch_window": 0, "slots": 5, "dtype": "float32"},
    ],
    ids=["target alone", "speculation in two slots", "no window, float32"],
)
def test_text_and_logits_are_those_of_the_raw_pack(packs: dict[str, Pack], way: dict[str, Any]) -> None:
    runs = {name: decode(pack, prompt_of(9), 12, governor="fixed", **way) for name, pack in packs.items()}
    assert_same(runs["residual"], runs["raw"])


def test_the_drafts_that_records_lean_on_are_planned_and_measured(packs: dict[str, Pack]) -> None:
    pack = packs["residual"]
    report = decode(pack, prompt_of(3), 2, speculate=False).report
    records = pack.spec.num_records * pack.draft_slot_bytes
    assert report["measured_bytes"]["draft"] == records
    assert report["plan"]["draft_bytes"] == records + work_bytes(pack.target_layout)
    assert decode(packs["raw"], prompt_of(3), 2, speculate=False).report["measured_bytes"]["draft"] == 0


def test_a_run_that_numpy_decodes_gives_the_same_text_and_says_so(
    packs: dict[str, Pack], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = decode(packs["residual"], prompt_of(9), 4, speculate=False)
    monkeypatch.setenv("MOESPEQ_NATIVE", "0")
    residual_decoder._find_decoder.cache_clear()
    try:
        plain = decode(packs["residual"], prompt_of(9), 4, speculate=False)
        raw = decode(packs["raw"], prompt_of(9), 4, speculate=False)
    finally:
        residual_decoder._find_decoder.cache_clear()
    assert_same(plain, compiled)
    assert plain.report["slow_decode"] == "MOESPEQ_NATIVE is 0" and plain.report["decode_s"] > 0
    assert raw.report["slow_decode"] is None
    assert plain.report["plan"]["draft_bytes"] > compiled.report["plan"]["draft_bytes"]


def test_threads_are_chosen_by_the_weights_not_by_the_record(
    packs: dict[str, Pack], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    monkeypatch.setattr("runtime.engine.set_threads", lambda _, expert_bytes: sizes.append(expert_bytes))
    for pack in packs.values():
        decode(pack, prompt_of(3), 1)
    assert sizes[0] == sizes[1] == packs["raw"].target_slot_bytes


def test_a_pack_whose_drafts_keep_their_weights_is_raw_throughout(tmp_path: Path) -> None:
    model = save_tiny("qwen2_moe", tmp_path / "model", dtype=torch.bfloat16, moe_intermediate_size=40)
    pack = make_pack(model, save_quantized(model, tmp_path / "quantized"), tmp_path / "pack", encoding="residual")
    assert pack.manifest.encoding == "residual" and not pack.leans_on_draft
