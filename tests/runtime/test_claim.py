"""Output folders: claimed by one process at a time, cleared so that a kill spoils nothing."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runtime.artifacts.folder import claim_output
from runtime.artifacts.manifest import Journal, is_finished
from runtime.errors import ArtifactError, StorageError
from tests.kills import Killed, after_removal


def fill(folder: Path, finished: bool) -> None:
    (folder / "model").mkdir(parents=True)
    for name in ("a.safetensors", "z.safetensors", "model/config.json", "report.json.part"):
        (folder / name).write_text("data")
    (folder / "link").symlink_to(folder / "model")
    (folder / ("manifest.json" if finished else "progress.json")).write_text('{"settings": {"a": 1}, "done": {}}')


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("force", [True, False])
def test_clearing_killed_after_any_removal_is_finished_by_the_next_claim(
    finished: bool, force: bool, tmp_path: Path
) -> None:
    for number in itertools.count(1):
        folder = tmp_path / str(number)
        fill(folder, finished)
        try:
            with after_removal(number), claim_output(folder, force=True):
                break
        except Killed:
            assert not is_finished(folder)
            names = {path.name for path in folder.iterdir()} - {".lock"}
            assert "progress.json" in names or not names  # what is left is known as an artifact's
        with claim_output(folder, force=force):
            assert [path.name for path in folder.iterdir()] == [".lock"]
            assert Journal(folder, {"a": 2}).done == {}
    assert number > 7


def test_a_folder_is_whole_until_its_manifest_goes(tmp_path: Path) -> None:
    """A kill between the mark and the first removal leaves the finished artifact, which only --force clears."""
    fill(tmp_path / "out", finished=True)
    with pytest.MonkeyPatch.context() as patch:

        def unlink(*_: object, **__: object) -> None:
            raise Killed

        patch.setattr(os, "unlink", unlink)
        with pytest.raises(Killed), claim_output(tmp_path / "out", force=True):
            pass
    with claim_output(tmp_path / "out"):
        assert is_finished(tmp_path / "out") and (tmp_path / "out" / "z.safetensors").is_file()
    with claim_output(tmp_path / "out", force=True):
        assert [path.name for path in (tmp_path / "out").iterdir()] == [".lock"]


def test_a_stopped_run_is_not_cleared_without_force(tmp_path: Path) -> None:
    fill(tmp_path / "out", finished=False)
    with claim_output(tmp_path / "out"):
        assert (tmp_path / "out" / "a.safetensors").is_file()
        assert Journal(tmp_path / "out", {"a": 1}).done == {}


def test_a_second_claim_is_refused_naming_the_process(tmp_path: Path) -> None:
    with claim_output(tmp_path), pytest.raises(ArtifactError, match=f"process {os.getpid()} at work"):
        claim_output(tmp_path).__enter__()
    with claim_output(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("third", [False, True])
def test_a_lock_whose_name_went_meanwhile_keeps_nobody_out(third: bool, tmp_path: Path) -> None:
    """The first holder ends, and maybe a third comes, between the second's opening of the lock and its locking."""
    with contextlib.ExitStack() as first, contextlib.ExitStack() as newcomer, pytest.MonkeyPatch.context() as patch:
        first.enter_context(claim_output(tmp_path))
        real = fcntl.flock

        def flock(*arguments: Any) -> None:
            patch.setattr(fcntl, "flock", real)
            first.close()
            if third:
                newcomer.enter_context(claim_output(tmp_path))
            real(*arguments)

        patch.setattr(fcntl, "flock", flock)
        if third:
            with pytest.raises(ArtifactError, match="no other process"):
                claim_output(tmp_path).__enter__()
        else:
            with claim_output(tmp_path), pytest.raises(ArtifactError, match="no other process"):
                claim_output(tmp_path).__enter__()


def test_a_lock_removed_by_hand_is_not_taken_from_the_next(tmp_path: Path) -> None:
    with contextlib.ExitStack() as first:
        first.enter_context(claim_output(tmp_path))
        (tmp_path / ".lock").unlink()
        with claim_output(tmp_path):
            first.close()
            with pytest.raises(ArtifactError, match="no other process"):
                claim_output(tmp_path).__enter__()


def test_a_filesystem_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(StorageError, match="file locks at"):
        claim_output(tmp_path).__enter__()


CONTENDER = """
import sys
from pathlib import Path
from runtime.artifacts.folder import claim_output
from runtime.errors import ArtifactError
folder, turns = Path(sys.argv[1]), 0
while turns < 200:
    try:
        with claim_output(folder):
            (folder / "inside").touch(exist_ok=False)
            (folder / "inside").unlink()
            turns += 1
    except ArtifactError:
        pass
"""


def test_processes_take_turns(tmp_path: Path) -> None:
    processes = [subprocess.Popen([sys.executable, "-c", CONTENDER, str(tmp_path)]) for _ in range(3)]
    assert [process.wait(timeout=60) for process in processes] == [0, 0, 0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "body",
    ["", "[]", "3", '{"settings": [], "done": {}}', '{"settings": {}, "done": []}', '{"done": {"a": 3}}', "[" * 99999],
)
def test_a_progress_file_that_is_none_is_named(body: str, tmp_path: Path) -> None:
    (tmp_path / "progress.json").write_text(body)
    with pytest.raises(ArtifactError, match=r"progress\.json") as caught:
        Journal(tmp_path, {})
    assert "--force" in caught.value.mend
    with claim_output(tmp_path):  # to be refused by the journal, not before
        pass
    with claim_output(tmp_path, force=True):
        assert Journal(tmp_path, {}).done == {}


def test_what_a_killed_writer_left_half_written_is_swept(tmp_path: Path) -> None:
    """The safetensors library writes beside its file first, under a name of its own."""
    (tmp_path / ".tmpYwx34t").write_bytes(b"half")
    (tmp_path / "kept.safetensors").write_bytes(b"whole")
    with claim_output(tmp_path):
        assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "kept.safetensors"]
