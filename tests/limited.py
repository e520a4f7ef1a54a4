"""Run commands under a memory limit and write what each took: memory, bytes read and written, seconds, layer by layer.

    python -m tests.limited --memory-gb 8 --json FILE -- quantize --model MODEL ... -- profile --model MODEL ...

Needs Linux with a memory cgroup that may be written (root), version 1 or 2. The limit holds for the page cache too, so
nothing is hidden there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

GROUPS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))
LIMITS = ("memory.limit_in_bytes", "memory.max")


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """A cgroup in which processes have no more than this."""
    root = next(group for group in GROUPS if (group / "cgroup.procs").is_file())
    group = root / f"moespeq-{os.getpid()}"
    group.mkdir()
    try:
        limit = next(group / name for name in LIMITS if (group / name).exists())
        limit.write_text(str(limit_bytes))
        yield group
    finally:
        group.rmdir()


def run(arguments: Sequence[str], group: Path) -> dict[str, Any]:
    """One `moespeq` command inside the group."""
    started = time.perf_counter()

    def enter() -> None:
        (group / "cgroup.procs").write_text(str(os.getpid()))

    command = [sys.executable, "-m", "moespeq_cli", *arguments, "--json"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=enter, errors="replace"
    )
    assert process.stderr is not None and process.stdout is not None
    said: list[dict[str, Any]] = []
    for line in process.stderr:
        sys.stderr.write(line)
        seconds = round(time.perf_counter() - started, 1)
        said.append({"at_seconds": seconds, "at_cpu_seconds": _cpu_seconds(process.pid), "line": line.rstrip()})
    result = process.stdout.read()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # what it read stands in /proc until it is waited for
    counts = dict(line.split(": ") for line in Path(f"/proc/{process.pid}/io").read_text().splitlines())
    _, status, usage = os.wait4(process.pid, 0)
    return {
        "command": "moespeq " + " ".join(arguments),
        "exit_status": os.waitstatus_to_exitcode(status),
        "seconds": round(time.perf_counter() - started, 1),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "peak_resident_bytes": usage.ru_maxrss * 1024,
        "read_by_the_program_bytes": int(counts["rchar"]),
        "written_by_the_program_bytes": int(counts["wchar"]),
        "said": said,
        "result": json.loads(result) if result.strip() else None,
    }


def _cpu_seconds(pid: int) -> float | None:
    with contextlib.suppress(FileNotFoundError):  # it has just ended
        user, system = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
        return round((int(user) + int(system)) / os.sysconf("SC_CLK_TCK"), 1)
    return None


def main() -> None:
    """Run what stands behind each `--`, one after the other, and stop at the first that fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory-gb", type=float, required=True)
    parser.add_argument("--json", type=Path, required=True)
    commands: list[list[str]] = []
    for argument in sys.argv[1:]:
        if argument == "--":
            commands.append([])
        elif commands:
            commands[-1].append(argument)
    own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    options = parser.parse_args(own)
    limit_bytes = int(options.memory_gb * 1e9)
    done: list[dict[str, Any]] = []
    with memory_group(limit_bytes) as group:
        for command in commands:
            done.append(run(command, group))
            body = {"limit_bytes": limit_bytes, "cpu_count": os.cpu_count(), "runs": done}
            options.json.write_text(json.dumps(body, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            if done[-1]["exit_status"]:
                raise SystemExit(1)


if __name__ == "__main__":
    main()
