"""Artifacts that a disk or a person changed: a `MoespeqError`, or what was there before; never another result."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moespeq_cli.profile.build import ProfileJob
from moespeq_cli.profile.build import build as build_profile
from moespeq_cli.profile.measure import TextSequence
from moespeq_cli.profile.tune import tune
from moespeq_cli.quantize.sensitive import choose_layers
from runtime.artifacts.checkpoint import Checkpoint
from runtime.artifacts.manifest import FileEntry
from runtime.artifacts.pack import Pack
from runtime.artifacts.profile import Profile
from runtime.artifacts.quantized import Quantized
from runtime.artifacts.record import DraftRecord
from runtime.artifacts.safetensors_file import pread, read_header
from runtime.config import RunSettings
from runtime.decode.sampling import SamplingSettings
from runtime.engine import Request
from runtime.errors import MoespeqError
from runtime.model.families import PROJECTIONS, describe
from runtime.opening import open_folder
from runtime.run_plan import plan_run
from tests.decode.packs import prompt_of
from tests.fuzz.mutations import SEEDS, bounded, changed, damage
from tests.pack.fixtures import make_pack, plan_for, save_quantized
from tests.tiny import save_tiny

torch.set_num_threads(1)
SETTINGS = RunSettings(context=64, prefetch_window=3, verify_window=2, governor="fixed")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its quantized artifact and its pack."""
    room = tmp_path_factory.mktemp("artifacts")
    model = save_tiny("qwen2_moe", room / "model", dtype=torch.bfloat16)
    make_pack(model, save_quantized(model, room / "quantized"), room / "pack", encoding="residual")
    return room


@pytest.fixture(scope="module")
def text(made: Path) -> list[int]:
    return say(made / "pack")


def say(folder: Path) -> list[int]:
    """Four tokens of the pack's model."""
    with open_folder(folder, SETTINGS) as engine:
        return list(engine.generate(Request(prompt_of(6), 4, frozenset(), SamplingSettings())))


@pytest.fixture(scope="module")
def profile(made: Path) -> Path:
    """A profile of the model, with the draft and sensitivity, after which a pack is striped and a run is tuned."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moespeq_cli.profile.pictures.available", lambda: False)
        checkpoint = Checkpoint.open(made / "model")
        texts = [TextSequence(f"kind {i % 2}", torch.tensor(prompt_of(20))) for i in range(4)]
        quantized = Quantized.open(made / "quantized")
        job = ProfileJob(checkpoint, describe(checkpoint), texts, "known", quantized, "float32", 80, 80)
        return build_profile(job, made / "profile").folder


FILES = [
    "manifest.json", "records.json", "report.json", "dense.safetensors", "target-0000.safetensors",
    "draft-0000.safetensors", "model/config.json", "model/tokenizer.json", "model/generation_config.json",
]  # fmt: skip


@bounded(25)
@given(name=st.sampled_from(FILES), seed=SEEDS)
def test_a_damaged_pack_says_the_same_or_is_refused(name: str, seed: int, made: Path, text: list[int]) -> None:
    """Every file of it; a disk that changes bytes does not change checksums to match."""
    path = made / "pack" / name
    before = path.read_bytes()
    path.write_bytes(damage(before, seed))
    try:
        assert say(made / "pack") == text
    except MoespeqError:
        pass
    finally:
        path.write_bytes(before)


def vouched(folder: Path, name: str, body: Any) -> None:
    """Write a file of an artifact and let the manifest vouch for it, as somebody who means harm would."""
    (folder / name).write_bytes(body if isinstance(body, bytes) else json.dumps(body).encode())
    manifest = json.loads((folder / "manifest.json").read_text())
    entry = FileEntry.of(folder / name)
    manifest["files"][name] = {"size_bytes": entry.size_bytes, "sha256": entry.sha256}
    (folder / "manifest.json").write_text(json.dumps(manifest))


@bounded(40)
@given(data=st.data())
def test_an_index_of_records_stays_inside_its_files(data: st.DataObject, made: Path) -> None:
    pack, name = made / "pack", data.draw(st.sampled_from(["records.json", "manifest.json"]))
    before = {file: (pack / file).read_bytes() for file in ("records.json", "manifest.json")}
    body = data.draw(changed(json.loads(before[name])))
    try:
        if name == "records.json":
            vouched(pack, name, body)
        else:
            (pack / name).write_text(json.dumps(body))
        opened = Pack.open(pack)
        plan_run(opened, SETTINGS)
        for locations in (opened.target_locations(), opened.draft_locations()):
            for location in locations.values():
                assert location.path.parent == pack
                assert 0 <= location.offset_bytes <= location.path.stat().st_size - location.padded_bytes
                assert (
                    len(pread(location.path, location.offset_bytes, location.payload_bytes)) == location.payload_bytes
                )
    except MoespeqError:
        pass
    finally:
        for file, text in before.items():
            (pack / file).write_bytes(text)


@bounded(40)
@given(side=st.sampled_from(["target", "draft"]), number=st.integers(0, 15), seed=SEEDS)
def test_a_record_vouched_for_gives_weights_of_its_shape(side: str, number: int, seed: int, made: Path) -> None:
    """With checksums that match, what is in it cannot be known to be wrong; but nothing outside it is touched."""
    pack = Pack.open(made / "pack")
    key = pack.spec.expert_keys()[number]
    payloads = {}
    for name, place in (("target", pack.target_location(key)), ("draft", pack.draft_location(key))):
        payload = bytes(pread(place.path, place.offset_bytes, place.payload_bytes))
        payloads[name] = bytearray(damage(payload, seed) or b"\0" if name == side else payload)
    target, draft = (torch.frombuffer(payloads[name], dtype=torch.uint8) for name in ("target", "draft"))
    try:
        decoded = pack.decode_target(key, target, DraftRecord(pack.draft_layout(key[0]), draft))
        shapes = {name: tuple(tensor.shape) for name, tensor in decoded.items()}
        assert shapes == {"gate_up": (128, 64), "down": (64, 64)}
    except MoespeqError:
        pass


@bounded(40)
@given(number=st.integers(0, 99), seed=SEEDS)
def test_a_quantized_folder_reads_as_before_or_is_refused(number: int, seed: int, made: Path) -> None:
    folder = made / "quantized"
    names = sorted(path.name for path in folder.iterdir() if path.suffix in (".json", ".safetensors"))
    name = names[number % len(names)]
    before = (folder / name).read_bytes()
    wanted = Quantized.open(folder).linear(1, 5, "down_proj").dequantized(torch.float32)
    (folder / name).write_bytes(damage(before, seed))
    try:
        opened = Quantized.open(folder, verify=True)
        for projection in PROJECTIONS:
            opened.linear(1, 5, projection)
        assert torch.equal(opened.linear(1, 5, "down_proj").dequantized(torch.float32), wanted)
    except MoespeqError:
        pass
    finally:
        (folder / name).write_bytes(before)


@pytest.mark.parametrize("name", ["routing.safetensors", "sensitivity.safetensors"])
@bounded(25)
@given(number=st.integers(0, 99), seed=SEEDS)
def test_a_profile_vouched_for_says_something_or_is_refused(
    name: str, number: int, seed: int, made: Path, profile: Path
) -> None:
    """Whatever a tensor of it counts or records: a pack is planned, a layer chosen and a run tuned by it, or not."""
    before = {file: (profile / file).read_bytes() for file in ("manifest.json", name)}
    infos = sorted(read_header(profile / name, "").values(), key=lambda info: info.name)
    info, body = infos[number % len(infos)], before[name]
    values = damage(body[info.start : info.end], seed)[: info.end - info.start].ljust(info.end - info.start, b"\xff")
    try:
        vouched(profile, name, body[: info.start] + values + body[info.end :])
        with contextlib.suppress(MoespeqError):
            plan = plan_for(made / "model", made / "quantized", made / "elsewhere", shards=2, profile=profile)
            assert all(len(layer) == plan.spec.num_experts for layer in plan.placements.values())
        with contextlib.suppress(MoespeqError):
            digest = Checkpoint.open(made / "model").digest
            assert len(choose_layers(profile, 0.5, digest).layers) == 1
        assert tune(Profile.open(profile, verify=True), "50%").window >= 1
    except MoespeqError:
        pass
    finally:
        for file, content in before.items():
            (profile / file).write_bytes(content)


def test_nothing_was_left_changed(made: Path, text: list[int], tmp_path: Path) -> None:
    """The tests above put back what they changed: or they would have compared with something else."""
    shutil.copytree(made / "pack", tmp_path / "pack")
    assert say(tmp_path / "pack") == text
