"""Stopped runs: killed anywhere, they resume to the bytes of an uninterrupted one, or refuse (H11)."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from moespeq_cli.pack.build import build_pack, find_finished
from runtime.artifacts.pack import Pack
from runtime.errors import ArtifactError, StorageError
from tests.kills import STEPS, Killed, Moments, after_removal, sigkill_after
from tests.pack.fixtures import contents, plan_for, save_profile, save_quantized
from tests.tiny import save_tiny


@pytest.fixture(scope="module")
def whole(model: Path, quantized: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a run that nothing stopped."""
    out = tmp_path_factory.mktemp("whole") / "pack"
    build_pack(plan_for(model, quantized, out, shards=2))
    assert "progress.json" not in contents(out) and ".lock" not in contents(out)
    return contents(out)


def dies_after(count: int) -> Callable[[], None]:
    """A progress callback that kills after `count` experts."""
    left = iter(range(count))

    def advance() -> None:
        if next(left, None) is None:
            raise Killed

    return advance


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 16, 23])
def test_resumes_after_any_expert(
    model: Path, quantized: Path, tmp_path: Path, whole: dict[str, bytes], count: int
) -> None:
    plan = plan_for(model, quantized, tmp_path / "pack", shards=2)
    with pytest.raises(Killed):
        build_pack(plan, advance=dies_after(count))
    with pytest.raises(ArtifactError, match=r"progress\.json but no manifest\.json"):
        Pack.open(plan.folder)
    assert find_finished(plan) is None
    build_pack(plan)
    assert contents(plan.folder) == whole


def test_done_layers_are_not_written_again(model: Path, quantized: Path, tmp_path: Path) -> None:
    plan = plan_for(model, quantized, tmp_path / "pack", shards=2)
    with pytest.raises(Killed):
        build_pack(plan, advance=dies_after(17))  # in the third of three layers
    written: list[int] = []
    whole = os.pwrite

    def counting(fd: int, data: bytes, offset: int) -> int:
        written.append(len(data))
        return whole(fd, data, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", counting)
        build_pack(plan)
    assert len(written) == 2 * 8 + 4  # one layer's records and four headers, no dense part


def dies_at_rename(number: int, late: bool) -> Callable[[Path, Path], None]:
    """An `os.replace` that kills before its nth rename, or right after it."""
    rename = os.replace
    left = number

    def replace(source: Path, target: Path) -> None:
        nonlocal left
        left -= 1
        if left == 0 and not late:
            raise Killed
        rename(source, target)
        if left == 0:
            raise Killed

    return replace


@pytest.mark.parametrize("late", [False, True])
def test_resumes_around_every_rename(
    model: Path, quantized: Path, tmp_path: Path, whole: dict[str, bytes], late: bool
) -> None:
    """The journal's start, the dense part, three layers, four shards, the report and the manifest."""
    for number in range(1, 12):
        plan = plan_for(model, quantized, tmp_path / str(number), shards=2)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "replace", dies_at_rename(number, late))
            with pytest.raises(Killed):
                build_pack(plan)
        assert (find_finished(plan) is not None) == (late and number == 11)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "replace", dies_at_rename(12, late))  # there is no twelfth
            build_pack(plan)
        assert contents(plan.folder) == whole


def test_starts_over_after_any_removal_of_force(
    model: Path, quantized: Path, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    """Repeated with --force and without it in turn."""
    before = tmp_path / "before"
    build_pack(plan_for(model, quantized, before, shards=3))
    removals = len(list(before.rglob("*")))
    for number in range(1, removals + 1):
        plan = plan_for(model, quantized, tmp_path / str(number), shards=2)
        shutil.copytree(before, plan.folder)
        with after_removal(number), pytest.raises(Killed):
            build_pack(plan, force=True)
        build_pack(plan, force=number % 2 == 1)
        assert contents(plan.folder) == whole


def write_half(handle: int, data: bytes, offset: int) -> None:
    os.pwrite(handle, bytes(data)[: len(data) // 2], offset)


def test_resumes_after_random_moments(model: Path, quantized: Path, tmp_path: Path, whole: dict[str, bytes]) -> None:
    """Before, in the middle of or after any call that changes what is on disk."""
    moments = Moments(STEPS | {(os, "pwrite"): write_half, (shutil, "copyfile"): None})
    with moments.kill(0) as called:
        build_pack(plan_for(model, quantized, tmp_path / "counted", shards=2))
    assert contents(tmp_path / "counted") == whole and set(called) >= {"replace", "fsync", "pwrite"}
    for number, when in moments.draw(len(called), 8, seed=11):
        plan = plan_for(model, quantized, tmp_path / f"{number}-{when}", shards=2)
        with moments.kill(number, when), pytest.raises(Killed):
            build_pack(plan)
        build_pack(plan)
        assert contents(plan.folder) == whole, f"stopped {when} call {number}, {called[number - 1]}"


def test_resumes_after_sigkill(model: Path, quantized: Path, tmp_path: Path, whole: dict[str, bytes]) -> None:
    """Real kills at random moments, of the first run and of the one that goes on."""
    start = time.perf_counter()
    build_pack(plan_for(model, quantized, tmp_path / "timed", shards=2))
    seconds = time.perf_counter() - start
    generator = random.Random(5)
    for attempt in range(5):
        plan = plan_for(model, quantized, tmp_path / str(attempt), shards=2)
        for _ in range(2):
            sigkill_after(generator.uniform(0.05, 0.9) * seconds, partial(build_pack, plan))
            if not (plan.folder / "manifest.json").exists():
                with pytest.raises(ArtifactError):
                    Pack.open(plan.folder)
        build_pack(plan)
        assert contents(plan.folder) == whole


def test_resuming_with_other_settings_is_refused(model: Path, quantized: Path, tmp_path: Path) -> None:
    out = tmp_path / "pack"
    with pytest.raises(Killed):
        build_pack(plan_for(model, quantized, out, shards=2), advance=dies_after(9))
    other = save_tiny("qwen2_moe", tmp_path / "other", seed=1, dtype=torch.bfloat16, num_hidden_layers=3)
    profile = save_profile(model, tmp_path / "profile", torch.ones(3, 8, 8, dtype=torch.int64))
    changed = {
        "shards": plan_for(model, quantized, out, shards=3),
        "quantized": plan_for(model, save_quantized(model, tmp_path / "wide", group_size=64), out, shards=2),
        "profile": plan_for(model, quantized, out, shards=2, profile=profile),
        "model": plan_for(other, save_quantized(other, tmp_path / "other-quantized"), out, shards=2),
    }
    for name, plan in changed.items():
        with pytest.raises(ArtifactError, match=f"{name} = "):
            build_pack(plan)
    build_pack(changed["shards"], force=True)
    assert Pack.open(out).manifest.num_shards == 3


def test_resuming_over_a_shard_that_lost_bytes_is_refused(model: Path, quantized: Path, tmp_path: Path) -> None:
    plan = plan_for(model, quantized, tmp_path / "pack", shards=2)
    with pytest.raises(Killed):
        build_pack(plan, advance=dies_after(9))
    os.truncate(plan.folder / "target-0001.safetensors", 10_000)
    with pytest.raises(ArtifactError, match=r"target-0001.safetensors with the \d+ bytes"):
        build_pack(plan)


def test_finished_pack_is_kept_or_refused(
    model: Path, quantized: Path, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    plan = plan_for(model, quantized, tmp_path / "pack", shards=2)
    first = build_pack(plan)
    before = (plan.folder / "target-0000.safetensors").stat().st_mtime_ns
    assert build_pack(plan) == first
    assert (plan.folder / "target-0000.safetensors").stat().st_mtime_ns == before
    with pytest.raises(ArtifactError, match="no finished pack"):
        build_pack(plan_for(model, quantized, plan.folder, shards=1))
    os.truncate(plan.folder / "draft-0000.safetensors", 5000)
    with pytest.raises(ArtifactError, match=r"draft-0000.safetensors of \d+ bytes; found 5000") as damaged:
        build_pack(plan)
    assert "--force" in damaged.value.mend
    build_pack(plan, force=True)
    assert contents(plan.folder) == whole


@pytest.mark.parametrize("after", [0, 3, 20, 53])
def test_full_disk_leaves_no_manifest_and_says_so(
    model: Path, quantized: Path, tmp_path: Path, whole: dict[str, bytes], after: int
) -> None:
    plan = plan_for(model, quantized, tmp_path / "pack", shards=2)
    write = os.pwrite
    count = 0

    def pwrite(fd: int, data: bytes, offset: int) -> int:
        nonlocal count
        count += 1
        if count > after:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        with pytest.raises(StorageError, match="a full disk"):
            build_pack(plan)
    assert not (plan.folder / "manifest.json").exists()
    build_pack(plan)
    assert contents(plan.folder) == whole


def test_file_size_limit_leaves_no_manifest_and_says_so(model: Path, quantized: Path, tmp_path: Path) -> None:
    plan = plan_for(model, quantized, tmp_path / "pack")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
    try:
        with pytest.raises(StorageError, match="a file size limit"):
            build_pack(plan)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not (plan.folder / "manifest.json").exists()


def test_too_little_space_is_told_before_any_work(
    model: Path, quantized: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_for(model, quantized, tmp_path / "pack")
    usage = shutil.disk_usage(tmp_path)._replace(free=10**5)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(StorageError, match="MB free"):
        build_pack(plan)
    assert list(plan.folder.iterdir()) == []
