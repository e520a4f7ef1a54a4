"""The GPU that is there in the place of an older one: it takes that one's way through plans and kernels.

Sources are compiled to PTX for the older capability, so that its branches are taken, and the driver translates that for
the GPU that is there. What this shows is that the code for it computes the right thing, not how fast it would be.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from runtime.kernels import cache, device
from runtime.kernels import compile as compiling
from runtime.kernels.compile import Source
from runtime.kernels.cubin import Cubin
from runtime.kernels.device import Gpu

SMEM_PER_BLOCK_BYTES = {(8, 0): 163 << 10, (8, 6): 99 << 10, (8, 9): 99 << 10}
"""By compute capability, as CUDA's programming guide has it."""


def capability_of(text: str) -> tuple[int, int]:
    """From an option such as `8.0`."""
    known = {f"{major}.{minor}": (major, minor) for major, minor in SMEM_PER_BLOCK_BYTES}
    if text not in known:
        raise pytest.UsageError(f"--gpu-capability: expected one of {', '.join(known)}, found {text}")
    return known[text]


@contextmanager
def as_older_gpu(capability: tuple[int, int]) -> Iterator[None]:
    """Every GPU is one of this capability, for as long as the block lasts."""
    real, compiled = device._gpu, compiling._compiled

    def older(index: int) -> Gpu:
        smem_bytes = SMEM_PER_BLOCK_BYTES[capability]
        return dataclasses.replace(real(index), capability=capability, smem_per_block_bytes=smem_bytes)

    def translated(source: Source, arch: str) -> tuple[Cubin, Path]:
        return compiled(source, arch)[0], _ptx_file(source, arch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "_gpu", older)
        patch.setattr(compiling, "_compiled", translated)
        yield


def _ptx_file(source: Source, arch: str) -> Path:
    arch = arch.replace("sm_", "compute_")
    chosen = tuple(option for option in compiling.options(source, arch) if not option.startswith("--ptxas"))
    text = compiling._read(source)
    name = hashlib.sha256(repr((source.name, text, chosen)).encode()).hexdigest()
    path = cache.cache_folder() / f"{name}.ptx"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        cache._write(path, _run_nvrtc(source.name, text, chosen))
    return path


def _run_nvrtc(name: str, text: str, chosen: tuple[str, ...]) -> bytes:
    with compiling._cupy() as cupy, compiling._program(cupy.cuda.nvrtc, name, text, chosen) as program:
        ptx: str | bytes = cupy.cuda.nvrtc.getPTX(program)
    return ptx if isinstance(ptx, bytes) else ptx.encode()
