"""On what a figure was measured."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import tomllib
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def environment() -> dict[str, Any]:
    """Hardware, versions, command and date of this process, without names of machines, users or folders."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in ("moespeq", "torch", "transformers", "numpy")},
        "command": shlex.join(["moespeq", *map(_without_folder, sys.argv[1:])]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def gpu_environment() -> dict[str, Any]:
    """The current GPU and what drives it: name, driver, CUDA, CuPy, NUMA node, and the sizes that figures depend on."""
    import torch

    from runtime.kernels.device import numa_node

    facts = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "gpu": facts.name,
        "compute_capability": f"{facts.major}.{facts.minor}",
        "num_sms": facts.multi_processor_count,
        "memory_bytes": facts.total_memory,
        "l2_bytes": facts.L2_cache_size,
        "numa_node": numa_node(),
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "cupy": next((found for name in _CUPY if (found := _version(name)) != UNKNOWN), UNKNOWN),
    }


def _without_folder(word: str) -> str:
    """An argument; of an absolute path only its last part."""
    return Path(word).name if word.startswith("/") else word


UNKNOWN = "unknown"
_CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy")


def _version(package: str) -> str:
    """Of an installed package; of moespeq in a checkout that is not installed, what its project file says."""
    try:
        return version(package)
    except PackageNotFoundError:
        project = Path(__file__).parents[2] / "pyproject.toml"
        if package != "moespeq" or not project.is_file():
            return UNKNOWN
        return str(tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"])


def _driver() -> str:
    """Version of the GPU's driver."""
    try:
        first = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()[0]
        return next(word for word in first.split() if word[0].isdigit() and "." in word)
    except (OSError, IndexError, StopIteration):
        pass
    try:
        ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(ask, capture_output=True, text=True, check=True, timeout=30).stdout.split()[0]
    except (OSError, IndexError, subprocess.SubprocessError):
        return UNKNOWN


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
