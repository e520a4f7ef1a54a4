"""Ctrl-C ends `moespeq run` wherever it arrives."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from types import FrameType

import pytest

from runtime.artifacts.pack import Pack
from tests.decode.packs import decode
from tests.decode.scripted import save_scripted

MOMENTS = 8
PATIENCE_S = 20.0  # a run that goes on takes minutes, and one that ends a second, or ten on a busy machine

# One process makes a short run, so that everything is imported, and then forks a whole run for each moment. Only the
# first goes through the end of the interpreter, which takes a second.
SCRIPT = """
import contextlib, io, json, os, select, signal, sys, time
from moespeq_cli.app import main

moments, patience, arguments = json.loads(sys.argv[1])
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
    main([*arguments, "-n", "2"])
runs = []
for number, moment in enumerate(moments):
    text, stdout = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(stdout, 1)
        os.close(stdout)
        try:
            main(arguments)
        except SystemExit as end:
            if number:
                os._exit(int(end.code or 0))
            raise
        sys.exit(0)
    os.close(stdout)
    decoding = bool(os.read(text, 1))
    time.sleep(moment)
    os.kill(pid, signal.SIGINT)
    sent, ended, length = time.monotonic(), False, 1
    while not ended and time.monotonic() < sent + patience:
        if select.select([text], [], [], 0.01)[0]:
            piece = os.read(text, 65536)
            length, ended = length + len(piece), not piece
    if not ended:
        os.kill(pid, signal.SIGKILL)
    os.close(text)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    runs.append((decoding, length, ended, status))
print(json.dumps(runs))
"""


def test_an_interrupt_at_any_moment_of_decoding_ends_the_run(tmp_path: Path) -> None:
    letters = range(ord("a"), ord("z") + 1)
    alphabet = {letter: letter + 1 if letter + 1 in letters else letters[0] for letter in letters}
    pack = save_scripted(tmp_path, alphabet, max_position_embeddings=16384)
    count = 16000
    ask = ["run", "--pack", str(pack.folder), "--raw", "-p", "a", "-n", str(count)]
    settings = ["--expert-cache", str(3 * pack.target_slot_bytes), "--context", "16384", "--threads", "1"]
    generator = random.Random()
    moments = [generator.uniform(0, 0.15) for _ in range(MOMENTS)]
    told = json.dumps([moments, PATIENCE_S, ask + settings])
    done = subprocess.run([sys.executable, "-c", SCRIPT, told], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    runs = json.loads(done.stdout)
    assert len(runs) == MOMENTS
    for moment, (decoding, length, ended, status) in zip(moments, runs, strict=True):
        story = f"{moment:.4f} s into decoding: {length} letters, status {status}\n{done.stderr}"
        assert decoding and ended and status != 0, story
        assert length < count, story
    for trace in ("Exception ignored", "Traceback"):
        assert trace not in done.stderr, done.stderr


@pytest.mark.parametrize("speculate", [True, False])
def test_decoding_runs_no_destructor(tiny: Pack, speculate: bool) -> None:
    """Python discards what a destructor raises, and an interrupt that arrives in one with it."""
    destroyed: set[str] = set()

    def watch(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name == "__del__":
            destroyed.add(frame.f_code.co_qualname)

    sys.setprofile(watch)
    try:
        run = decode(tiny, list(b"What now?"), 12, slots=3, speculate=speculate)
    finally:
        sys.setprofile(None)
    assert len(run.tokens) == 12 and not destroyed


def test_an_interrupt_while_libraries_are_read_shows_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt\n")
    done = subprocess.run(
        [sys.executable, "-m", "moespeq_cli", "--version"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


SWALLOWED = """
import os, signal, time
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.05)
except BaseException:
    pass  # as a library in C does
whole = True
"""


@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_an_interrupt_that_a_library_swallows_ends_the_command(tmp_path: Path, library: str) -> None:
    (tmp_path / f"{library}.py").write_text(SWALLOWED)
    if library == "numpy":  # inside another large one, which would go on without it
        (tmp_path / "torch.py").write_text("try:\n    import numpy\nexcept ImportError:\n    pass\n")
    done = subprocess.run(
        [sys.executable, "-m", "moespeq_cli", "run", "--artifacts", str(tmp_path / "none"), "-p", "a"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (130, "") and done.stderr in ("", "stopped\n")


def test_large_libraries_are_imported_whole_and_know_their_own_loader(tmp_path: Path) -> None:
    (tmp_path / "cupy.py").write_text(SWALLOWED)
    script = (
        "import json, signal, sys\n"
        "from moespeq_cli.patience import import_patiently\n"
        "import_patiently(), import_patiently()\n"
        "try:\n"
        "    import cupy\n"
        "except KeyboardInterrupt:\n"
        "    interrupted = True\n"
        "usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler\n"
        "import numpy, importlib.resources\n"
        "ignored = signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "import cupy\n"  # a background job's: nobody interrupts
        "print(json.dumps([interrupted, usual, cupy.whole, type(numpy.__spec__.loader).__name__,\n"
        "    importlib.resources.files('numpy').is_dir()]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert json.loads(done.stdout or "null") == [True, True, True, "SourceFileLoader", True], done.stderr
