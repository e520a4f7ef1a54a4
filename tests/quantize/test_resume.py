"""Stopped at any moment and repeated, the work ends in the same bytes; with other settings it is refused."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import random
import shutil
import time
from functools import partial
from pathlib import Path
from typing import TextIO

import pytest
import torch
from safetensors.torch import save_file

from moespeq_cli.quantize import build, folder
from moespeq_cli.quantize.plan import QuantizeOptions
from runtime.artifacts.quantized import Quantized
from runtime.errors import ArtifactError
from tests.kills import STEPS, Killed, Moments, after_removal, keep_half, sigkill_after
from tests.tiny import save_tiny


class Stop(Exception):
    """Stands for a kill."""


def options(model: Path, out: Path, text: Path, **others: object) -> QuantizeOptions:
    settings = {"data": text, "seq_len": 48, "min_tokens": 4} | others
    return QuantizeOptions(model=str(model), out=out, **settings)  # type: ignore[arg-type]


def contents(folder: Path) -> dict[str, bytes]:
    """All files but the lock, which a kill may leave and which counts for nothing."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


def again(work: build.Work, out: Path, force: bool = False) -> None:
    """Run what is prepared into another folder."""
    moved = dataclasses.replace(work.options, out=out, force=force)
    build.quantize(moved, work=dataclasses.replace(work, options=moved))


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense layer and two with experts."""
    return save_tiny("deepseek_v3", tmp_path_factory.mktemp("deep"), dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def whole(deep: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The bytes of an uninterrupted run."""
    out = tmp_path_factory.mktemp("whole") / "quantized"
    build.quantize(options(deep, out, text))
    return contents(out)


def test_stopped_again_and_again_it_ends_in_the_same_bytes(
    deep: Path, text: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt is let a little further, stopped now before a rename, now after it, until one comes through."""
    real = os.replace
    out = tmp_path / "quantized"
    calls = {"seen": 0, "stop_at": 0, "after": False}

    def replace(source: object, target: object) -> None:
        calls["seen"] += 1
        if calls["seen"] == calls["stop_at"]:
            if calls["after"]:
                real(source, target)  # type: ignore[call-overload]
            raise Stop
        real(source, target)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "replace", replace)
    stops = 0
    finished = False
    while not finished:
        calls.update(seen=0, stop_at=1 + stops // 2, after=stops % 2 == 1)
        try:
            build.quantize(options(deep, out, text))
            finished = True
        except Stop:
            stops += 1
            if not (out / "manifest.json").exists():
                with pytest.raises(ArtifactError):
                    Quantized.open(out)
    assert stops >= 10
    assert contents(out) == whole


def test_stopped_once_after_each_rename_it_ends_in_the_same_bytes(
    deep: Path, text: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.replace
    left = 0

    def replace(source: object, target: object) -> None:
        nonlocal left
        left -= 1
        real(source, target)  # type: ignore[call-overload]
        if left == 0:
            raise Stop

    monkeypatch.setattr(os, "replace", replace)
    for renames in itertools.count(1):
        out = tmp_path / f"stopped-{renames}"
        left = renames
        try:
            build.quantize(options(deep, out, text))
        except Stop:
            build.quantize(options(deep, out, text))
            assert contents(out) == whole, f"stopped after rename {renames}"
        else:
            break
    assert renames > 15


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("finished", [False, True])
def test_stopped_after_each_removal_of_force_it_starts_over(
    finished: bool, force: bool, deep: Path, text: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    """Over an earlier result, and over an unfinished one of other settings."""
    before = tmp_path / "before"
    with pytest.MonkeyPatch.context() as patch:
        if not finished:
            patch.setattr(build, "_finish", lambda *_: (_ for _ in ()).throw(Stop()))
        with contextlib.suppress(Stop):
            build.quantize(options(deep, before, text, bits=8, method="rtn"))
    files = len(list(before.iterdir()))
    work = build.prepare(options(deep, before, text, force=True))
    for removals in range(1, files + 1):
        out = tmp_path / f"stopped-{removals}"
        shutil.copytree(before, out)
        with after_removal(removals), pytest.raises(Killed):
            again(work, out, force=True)
        if removals in (1, files // 2, files):
            again(work, out, force)
            assert contents(out) == whole, f"stopped after removal {removals}"
        else:  # the rest is the same work: see only that it begins
            with pytest.MonkeyPatch.context() as patch, pytest.raises(Stop):
                patch.setattr(build, "_copy_dense", lambda *_: (_ for _ in ()).throw(Stop()))
                again(work, out, force)


def test_stopped_while_solving_it_goes_on_at_that_layer(
    deep: Path, text: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "quantized"
    real = build.LayerQuantizer.quantize

    def stop_in_layer_two(self: build.LayerQuantizer, layer_id: int, *rest: object) -> object:
        if layer_id == 2:
            raise Stop
        return real(self, layer_id, *rest)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(build.LayerQuantizer, "quantize", stop_in_layer_two)
        with pytest.raises(Stop):
            build.quantize(options(deep, out, text))
    said: list[str] = []
    build.quantize(options(deep, out, text), said.append)
    assert "going on at layer 2 of 2" in said
    assert contents(out) == whole


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"group_size": 32}, "--group-size"),
        ({"seq_len": 32}, "calibration text"),
        ({"bits": 8}, "--bits"),
        ({}, "model"),
    ],
)
def test_other_settings_are_refused_in_the_middle_and_at_the_end(
    change: dict[str, object],
    named: str,
    deep: Path,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "quantized"
    other = deep if change else save_tiny("deepseek_v3", tmp_path / "other", seed=7, dtype=torch.bfloat16)
    with monkeypatch.context() as patch:
        patch.setattr(build, "_quantize_layers", lambda *_: (_ for _ in ()).throw(Stop()))
        with pytest.raises(Stop):
            build.quantize(options(deep, out, text))
    with pytest.raises(ArtifactError, match=named):
        build.quantize(options(other, out, text, **change))
    build.quantize(options(deep, out, text))
    before = contents(out)
    with pytest.raises(ArtifactError, match=named) as caught:
        build.quantize(options(other, out, text, **change))
    assert "--force" in caught.value.mend and contents(out) == before
    build.quantize(options(other, out, text, force=True, **change))
    assert contents(out) != before


def test_repeating_a_finished_run_changes_nothing(deep: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "quantized"
    build.quantize(options(deep, out, text))
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    said: list[str] = []
    build.quantize(options(deep, out, text), said.append)
    assert "already there" in said[-1]
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == before


def test_a_finished_layer_that_changed_meanwhile_is_noticed(
    deep: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "quantized"
    with monkeypatch.context() as patch:
        patch.setattr(build, "_finish", lambda *_: (_ for _ in ()).throw(Stop()))
        with pytest.raises(Stop):
            build.quantize(options(deep, out, text))
    shard = sorted(out.glob("model-*.safetensors"))[-1]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(ArtifactError, match=shard.name):
        build.quantize(options(deep, out, text))


def save_half(tensors: dict[str, torch.Tensor], path: Path, **options: object) -> None:
    save_file(tensors, path, **options)
    keep_half(path)


def copy_half(source: Path, target: Path) -> None:
    target.write_bytes(source.read_bytes()[: source.stat().st_size // 2])


def dump_half(value: object, handle: TextIO, **options: object) -> None:
    text = json.dumps(value, **options)  # type: ignore[arg-type]
    handle.write(text[: len(text) // 2])
    handle.flush()


def test_stopped_at_random_moments_it_ends_in_the_same_bytes(
    deep: Path, text: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    """Before, in the middle of or after any call that changes what is on disk."""
    moments = Moments(
        STEPS | {(folder, "save_file"): save_half, (shutil, "copyfile"): copy_half, (json, "dump"): dump_half}
    )
    work = build.prepare(options(deep, tmp_path, text))
    with moments.kill(0) as called:
        again(work, tmp_path / "counted")
    assert contents(tmp_path / "counted") == whole and set(called) >= {"replace", "fsync", "save_file", "dump"}
    for number, when in moments.draw(len(called), 8, seed=11):
        out = tmp_path / f"{number}-{when}"
        with moments.kill(number, when), pytest.raises(Killed):
            again(work, out)
        again(work, out)
        assert contents(out) == whole, f"stopped {when} call {number}, {called[number - 1]}"


def test_killed_at_random_moments_it_ends_in_the_same_bytes(
    deep: Path, text: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    """Real kills, of the first run and of the one that goes on."""
    work = build.prepare(options(deep, tmp_path, text))
    start = time.perf_counter()
    again(work, tmp_path / "timed")
    seconds = time.perf_counter() - start
    generator = random.Random(5)
    for attempt in range(5):
        out = tmp_path / str(attempt)
        for _ in range(2):
            sigkill_after(generator.uniform(0.05, 0.9) * seconds, partial(again, work, out))
            if not (out / "manifest.json").exists():
                with pytest.raises(ArtifactError):
                    Quantized.open(out)
        again(work, out)
        assert contents(out) == whole
