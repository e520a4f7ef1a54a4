"""On what a figure was measured."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any


def environment() -> dict[str, Any]:
    """Hardware, versions, command and date of this process, without names of machines, users or folders."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in ("moespeq", "torch", "transformers", "numpy")},
        "command": shlex.join(["moespeq", *sys.argv[1:]]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
