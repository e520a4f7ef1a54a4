"""Kill each stage many times, let it go on, and compare every byte with a run that nothing stopped.

    python -m tests.kill_runs --kills 50 --json docs/benchmarks/kills.json

Two kinds of kill, all by SIGKILL to a process at work: at moments drawn at random from the length of a whole run, and
right after each rename. Every killed run is repeated until it ends; the folder may then hold nothing but the bytes of
an uninterrupted one (quantize, profile) or them and a report with other times in it (pack).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.kills import sigkill_after


@dataclass(frozen=True)
class Stage:
    """A stage as it is repeated: `work(out)` begins or goes on; `contents(out)` is what counts of the result."""

    name: str
    work: Callable[[Path], object]
    contents: Callable[[Path], dict[str, bytes]]


@dataclass
class Tally:
    """What the kills of one stage met."""

    kills: int = 0
    unfinished: int = 0  # of them, those that left no manifest
    resumed_equal: int = 0


def all_but(*names: str) -> Callable[[Path], dict[str, bytes]]:
    """Reads every file below a folder but those of these names."""

    def contents(folder: Path) -> dict[str, bytes]:
        files = (path for path in folder.rglob("*") if path.is_file() and path.name not in names)
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}

    return contents


def at_random(stage: Stage, kills: int, room: Path, seed: int = 0) -> Tally:
    """Kill at `kills` moments within the length of a whole run, and repeat after each."""
    stage.work(room / "first")  # whatever is imported on the way is imported now
    started = time.perf_counter()
    stage.work(room / "whole")
    seconds, whole = time.perf_counter() - started, stage.contents(room / "whole")
    generator, tally = random.Random(seed), Tally()
    while tally.kills < kills:
        out = room / "out"
        sigkill_after(generator.uniform(0, seconds), partial(stage.work, out))
        _go_on(stage, out, whole, tally)
    return tally


def after_each_rename(stage: Stage, room: Path) -> Tally:
    """Kill after the first rename, then after the second one of a new run, and so on to the last."""
    stage.work(room / "whole")
    whole, tally = stage.contents(room / "whole"), Tally()
    while True:
        out = room / "out"
        if not _killed_after_rename(tally.kills + 1, partial(stage.work, out)):
            shutil.rmtree(out)
            return tally
        _go_on(stage, out, whole, tally)


def _go_on(stage: Stage, out: Path, whole: dict[str, bytes], tally: Tally) -> None:
    tally.kills += 1
    tally.unfinished += not (out / "manifest.json").exists()
    stage.work(out)
    found = stage.contents(out)
    different = sorted(name for name in {*found, *whole} if found.get(name) != whole.get(name))
    assert not different, f"{stage.name}: other bytes in {', '.join(different)} after kill {tally.kills}"
    tally.resumed_equal += 1
    shutil.rmtree(out)


def _killed_after_rename(number: int, work: Callable[[], object]) -> bool:
    """Run in a process of its own that kills itself after its nth rename; whether there were so many."""
    process = os.fork()
    if process == 0:
        rename, left = os.replace, number

        def replace(source: Any, target: Any) -> None:
            nonlocal left
            rename(source, target)
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        os.replace = replace  # type: ignore[assignment]
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(process, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the work itself failed"
    return os.WIFSIGNALED(status)


def stages(room: Path) -> list[Stage]:
    """The three commands on a tiny model with a dense layer and three with experts."""
    import torch

    from tests.tiny import save_tiny

    torch.set_num_threads(1)
    model = save_tiny("deepseek_v3", room / "model", dtype=torch.bfloat16, num_hidden_layers=4, n_routed_experts=16)
    text = room / "text.txt"
    text.write_text("Rain had come over the hills in the night, and nobody on deck spoke of it. " * 20)
    quantized = room / "quantized"
    common = ["--model", model, "--data", text, "--seq-len", 64]
    command("quantize", *common, "--out", quantized)
    return [
        Stage("quantize", lambda out: command("quantize", *common, "--out", out), all_but(".lock")),
        Stage(
            "profile",
            lambda out: command("profile", *common, "--quantized", quantized, "--out", out),
            all_but(".lock"),
        ),
        Stage(
            "pack",
            lambda out: command(
                "pack",
                "--model",
                model,
                "--quantized",
                quantized,
                "--encoding",
                "residual",
                "--shards",
                2,
                "--out",
                out,
            ),
            all_but(".lock", "report.json"),
        ),
    ]


def command(*arguments: object) -> None:
    """Run `moespeq` in this process; it has to succeed."""
    from moespeq_cli.app import main as moespeq

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as told:
        try:
            moespeq([str(argument) for argument in arguments])
        except SystemExit as end:
            assert not end.code, told.getvalue()


def main() -> None:
    """Run all of it and write the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--stage", choices=["quantize", "profile", "pack"], help="one of them only")
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for stage in stages(Path(folder)):
            if arguments.stage not in (None, stage.name):
                continue
            place = Path(folder) / stage.name
            started = time.perf_counter()
            random_kills = at_random(stage, arguments.kills, place / "random")
            rename_kills = after_each_rename(stage, place / "renames")
            found[stage.name] = {
                "at_random": vars(random_kills),
                "after_each_rename": vars(rename_kills),
                "seconds": round(time.perf_counter() - started, 1),
            }
            print(stage.name, json.dumps(found[stage.name]), flush=True)
    command = f"python -m tests.kill_runs --kills {arguments.kills} --json FILE"
    arguments.json.write_text(json.dumps({"command": command, "stages": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
