"""Output folders and odd places, through the commands: who may write, what a full disk leaves, what names may hold."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from runtime.artifacts.folder import claim_output
from tests.cli.conftest import Command
from tests.tiny import save_tiny

STAGES = ("quantize", "profile", "pack")
QUICK = {"quantize": ("--method", "rtn", "--samples", 2, "--seq-len", 16), "profile": ("--samples", 3, "--seq-len", 16)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("qwen2_moe", tmp_path_factory.mktemp("outputs") / "model", dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def quantized(model: Path) -> Path:
    from tests.pack.fixtures import save_quantized

    return save_quantized(model, model.parent / "quantized")


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moespeq_cli.profile.pictures.available", lambda: False)


def ask(stage: str, model: Path, quantized: Path, out: Path) -> list[object]:
    more = {"profile": ("--quantized", "none"), "pack": ("--quantized", quantized)}.get(stage, ())
    return [stage, "--model", model, "--out", out, *QUICK.get(stage, ()), *more]


@pytest.mark.parametrize("stage", STAGES)
def test_a_second_process_is_refused_with_the_number_of_the_first(
    stage: str, moespeq: Command, model: Path, quantized: Path, tmp_path: Path
) -> None:
    """The first is a process of its own that holds the folder until it is told to end."""
    out = tmp_path / "out"
    ready, end = os.pipe(), os.pipe()
    first = os.fork()
    if first == 0:
        with claim_output(out):
            os.write(ready[1], b"x")
            os.read(end[0], 1)
        os._exit(0)
    try:
        os.read(ready[0], 1)
        done = moespeq(*ask(stage, model, quantized, out))
        assert (done.status, done.stdout) == (1, "") and "Traceback" not in done.stderr
        assert f"process {first} at work" in done.stderr
        assert [path.name for path in out.iterdir()] == [".lock"]
    finally:
        os.write(end[1], b"x")
        os.waitpid(first, 0)
    assert moespeq(*ask(stage, model, quantized, out)).status == 0


@pytest.fixture
def size_limit() -> Iterator[None]:
    """No file above 2000 bytes: the closest to a full disk that needs no disk of its own."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("stage", STAGES)
def test_a_disk_that_takes_no_more_leaves_nothing_that_passes_for_whole(
    stage: str, moespeq: Command, model: Path, quantized: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    out = tmp_path / "out"
    request.getfixturevalue("size_limit")
    done = moespeq(*ask(stage, model, quantized, out))
    assert (done.status, done.stdout) == (1, ""), done
    assert "File too large" in done.stderr and str(out) in done.stderr and "Traceback" not in done.stderr
    assert not (out / "manifest.json").exists()


@pytest.mark.parametrize("stage", STAGES)
def test_room_is_looked_for_before_any_work(
    stage: str, moespeq: Command, model: Path, quantized: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    done = moespeq(*ask(stage, model, quantized, tmp_path / "out"))
    assert (done.status, done.stdout) == (1, "") and "free in" in done.stderr
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("stage", STAGES)
def test_a_dry_run_tells_and_writes_nothing(
    stage: str, moespeq: Command, model: Path, quantized: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moespeq_cli.estimate.PROBE_S", 0.01)
    done = moespeq(*ask(stage, model, quantized, tmp_path / "out"), "--dry-run", "--json")
    told = json.loads(done.stdout)
    assert done.status == 0 and told["dry_run"] is True and told["path"] == str(tmp_path / "out")
    size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    assert told["read_bytes"] > 0.9 * size and told["peak_memory_bytes"] > 500e6 and told["seconds"] > 0
    for word in ("memory ", "disk ", "time ", "estimated"):
        assert word in done.stderr
    assert list(tmp_path.iterdir()) == []
    done = moespeq(*ask(stage, model, quantized, tmp_path / "out"))
    written = sum(path.stat().st_size for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert done.status == 0 and written <= told["disk_bytes"]


WHOLE = """
import contextlib, io, json, os, sys
from moespeq_cli.app import main
if sys.argv[2]:
    assert not os.access(sys.argv[2], os.W_OK)
results = []
for arguments in json.loads(sys.argv[1]):
    arguments = [os.fsdecode(bytes.fromhex(argument)) for argument in arguments]  # as the shell would pass them
    text = io.TextIOWrapper(io.BytesIO(), encoding=sys.stdout.encoding, errors=sys.stdout.errors)
    with contextlib.redirect_stdout(text):
        try:
            main(arguments)
            status = 0
        except SystemExit as end:
            status = int(end.code or 0)
    text.flush()
    results.append([status, text.buffer.getvalue().decode("latin-1")])
print(json.dumps(results))
"""


def heed_permissions() -> None:
    """Take from root, in a process about to start a program, what lets it write where the mode says no."""
    bounding_set_drop, dac_override = 24, 1
    ctypes.CDLL(None).prctl(bounding_set_drop, dac_override, 0, 0, 0)


def all_stages(model: str, place: str, read_only: str = "", **environment: str) -> list[tuple[int, str]]:
    """Exit status and stdout of quantize, profile, pack and run, in one new process that may not write `read_only`."""
    os.makedirs(place, exist_ok=True)
    common = ["--artifacts", place]
    asked = [
        ["quantize", "--model", model, *common, *map(str, QUICK["quantize"])],
        ["profile", "--model", model, *common, *map(str, QUICK["profile"])],
        ["pack", "--model", model, *common],
        ["run", "--model", model, *common, "-p", "ab", "-n", "4", "--json"],
    ]
    done = subprocess.run(
        [sys.executable, "-c", WHOLE, json.dumps([[os.fsencode(a).hex() for a in line] for line in asked]), read_only],
        capture_output=True,
        preexec_fn=heed_permissions,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "MPLCONFIGDIR": place} | environment,
        timeout=120,
    )
    sys.stderr.write(done.stderr.decode(errors="replace"))
    assert done.returncode == 0 and b"Traceback" not in done.stderr, done.stderr.decode(errors="replace")
    return [(status, text) for status, text in json.loads(done.stdout)]


def test_odd_names_in_the_plainest_locale_and_a_model_that_nobody_may_write_to(model: Path, tmp_path: Path) -> None:
    """All stages with spaces, Cyrillic and an emoji in the names, under LC_ALL=C, on a folder that is read-only."""
    odd = tmp_path / "моя модель 🦀"
    source = Path(shutil.copytree(model, odd / "model"))
    for path in source.iterdir():
        path.chmod(0o444)
    source.chmod(0o555)
    before = {path.name: path.stat().st_mtime_ns for path in source.iterdir()}
    done = all_stages(str(source), str(odd / "a b"), str(source), LC_ALL="C")
    assert [status for status, _ in done] == [0, 0, 0, 0], done
    assert {path.name: path.stat().st_mtime_ns for path in source.iterdir()} == before
    source.chmod(0o755)
    for stage in ("quantized", "profile", "pack"):
        assert (odd / "a b" / stage / "manifest.json").is_file()
    assert len(json.loads(done[3][1])["token_ids"]) == 4


@pytest.mark.parametrize("stage", STAGES)
def test_names_that_are_no_utf8_are_refused(
    stage: str, moespeq: Command, model: Path, quantized: Path, tmp_path: Path
) -> None:
    """Libraries under the stages take no other; the same where Python was told that UTF-8 is ASCII."""
    odd = tmp_path / os.fsdecode(b"caf\xe9")
    odd.mkdir()
    for asked in (ask(stage, odd, quantized, tmp_path / "out"), ask(stage, model, quantized, odd / "out")):
        done = moespeq(*asked)
        assert (done.status, done.stdout) == (1, "") and "names of folders in UTF-8" in done.stderr, done
        assert "caf\\udce9" in done.stderr and not (odd / "out").exists()
