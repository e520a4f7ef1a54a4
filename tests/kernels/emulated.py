"""The kernel for few tokens on the host: its own source on the emulated machine of `emulator/simt.hpp`."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import shutil
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from runtime.kernels.compile import kernel_folder
from runtime.kernels.layout import SlotLayout
from tests.kernels.host import cxx

EMULATOR = Path(__file__).parent / "emulator"
HEADERS = (
    "activation.cuh",
    "expert_layer.cuh",
    "few_tokens.cuh",
    "layout.cuh",
    "roles.cuh",
    "teams.cuh",
    "residual.cuh",
)  # common.cuh is the machine's own
MACHINE = ("simt", "common")  # compiled once
LATE, AT_ONCE, RANDOM = range(3)  # when copies land


@dataclass(frozen=True, slots=True)
class Emulated:
    """A compiled variant.

    Attributes:
        library: with `run_experts` and `shared_bytes`.
        layout: of its slots.
        max_pairs: of one launch.
    """

    library: ctypes.CDLL
    layout: SlotLayout
    max_pairs: int

    def run(
        self,
        pool: Tensor,
        slot_of: Tensor,
        x: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        *,
        grid: int = 2,
        resident: int | None = None,
        copies: int = RANDOM,
        seed: int = 0,
        first_claim: int = 1,
        pairs: Tensor | None = None,
        resume: bool = False,
        state: Tensor | None = None,
        h: Tensor | None = None,
        late: bool = False,
    ) -> Tensor:
        """y bfloat16 [calls, M, H] for x [calls, M, H]: the calls run side by side.

        All that it reads or writes but the pool lies at a fence of its own meanwhile; `fenced` makes such a pool.

        Args:
            late: nothing that the kernel ahead may write is there before a thread has waited for it.

        Raises:
            AssertionError: the kernel failed or did not end; the message says how.
        """
        calls, tokens = x.shape[:2]
        inner = self.layout.shape.moe_intermediate_size
        state = torch.zeros(calls, 2, dtype=torch.int32) if state is None else state
        h = torch.full((calls, 2, self.max_pairs, inner), -1, dtype=torch.int16) if h is None else h
        y = torch.full_like(x, float("nan"))
        inputs = [fenced(tensor) for tensor in (x, top_k_index, top_k_weights, slot_of)]
        written = (state, h, y, pairs)
        places = [None if tensor is None else fenced(tensor) for tensor in written]
        arguments = [pointer(place) for place in (*inputs, pool, *places)]
        self.library.run_experts.restype = ctypes.c_char_p
        self.library.come_late(int(late))
        fault = self.library.run_experts(
            calls,
            grid,
            grid if resident is None else resident,
            copies,
            seed,
            *arguments,
            tokens,
            int(resume),
            first_claim,
        )
        assert fault is None, fault.decode()
        for tensor, place in zip(written, places, strict=True):
            if tensor is not None and place is not None:
                tensor.copy_(place)
        return y


def pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    assert tensor is None or tensor.is_contiguous()
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def build(
    layout: SlotLayout,
    defines: dict[str, int | str],
    folder: Path,
    arch: int = 900,
    source: str = "moe_small.cu",
    edit: tuple[str, str] | None = None,
) -> Emulated:
    """Compile a kernel for few tokens for the host; the arguments are those of `library`.

    Args:
        layout: of the slots that it will read.
    """
    return Emulated(library("experts.cpp", source, defines, folder, arch, edit), layout, int(defines["MAX_PAIRS"]))


def library(
    main: str,
    source: str,
    defines: dict[str, int | str],
    folder: Path,
    arch: int = 900,
    edit: tuple[str, str] | None = None,
) -> ctypes.CDLL:
    """Compile `source` for the host.

    Args:
        main: the file of the emulator that runs it.
        source: the file of the kernel folder.
        defines: its macros.
        folder: where compiled libraries are kept.
        arch: what `__CUDA_ARCH__` says.
        edit: a text of the source or its headers and what to put in its place, to plant a fault.
    """
    texts = {name: (kernel_folder() / name).read_text(encoding="utf-8") for name in (source, *HEADERS)}
    if edit is not None:
        assert sum(text.count(edit[0]) for text in texts.values()) == 1, f"{edit[0]!r} once in {source} and its headers"
        texts = {name: text.replace(*edit) for name, text in texts.items()}
    emulator = [f.read_text(encoding="utf-8") for f in sorted(EMULATOR.iterdir())]
    key = hashlib.sha256(repr((main, texts, emulator, sorted(defines.items()), arch)).encode()).hexdigest()[:16]
    target = folder / f"{key}.so"
    if not target.exists():
        base = machine(folder)
        with tempfile.TemporaryDirectory(dir=folder) as name:
            work = Path(name)
            shutil.copy(EMULATOR / main, work)
            for own, text in texts.items():
                (work / own).write_text(text, encoding="utf-8")
            options = [f"-D__CUDA_ARCH__={arch}", f'-DKERNEL_FILE="{source}"']
            options += [f"-DKERNEL_NAME={source.removesuffix('.cu')}"]
            options += [f"-D{macro}={value}" for macro, value in defines.items()]
            options += ["-I.", f"-I{base}", "-include", str(base / "common.cuh"), "-shared", "-o", "made.so"]
            compile_in(work, ["-O1", *options, main, *(str(base / f"{name}.o") for name in MACHINE)])
            os.replace(work / "made.so", target)
    return ctypes.CDLL(str(target))


def fenced(tensor: Tensor) -> Tensor:
    """A copy that ends where a page begins that cannot be read or written; one is ahead of its first page, too."""
    page, size = mmap.PAGESIZE, tensor.numel() * tensor.element_size()
    pages = -(-size // page) * page
    area = mmap.mmap(-1, pages + 2 * page)
    copy = torch.frombuffer(area, dtype=torch.uint8)[page + pages - size : page + pages]
    copy = copy.view(tensor.dtype).view(tensor.shape).copy_(tensor)
    protect = ctypes.CDLL(None).mprotect
    for fence in (copy.data_ptr() + size - pages - page, copy.data_ptr() + size):
        assert protect(ctypes.c_void_p(fence), page, 0) == 0
    return copy


def machine(folder: Path) -> Path:
    """A folder with what all kernels share, compiled once: the machine, and its headers in the compiler's own form."""
    base = folder / "machine"
    if not base.exists():
        with tempfile.TemporaryDirectory(dir=folder) as name:
            work = Path(name) / "machine"
            shutil.copytree(EMULATOR, work)
            for part in MACHINE:
                compile_in(work, ["-O2", "-c", f"{part}.cpp", "-o", f"{part}.o"])
            compile_in(work, ["-O1", "-x", "c++-header", "common.cuh", "-o", "common.cuh.gch"])
            with suppress(OSError):  # another process was first
                work.rename(base)
    return base


def compile_in(folder: Path, options: list[str]) -> None:
    # A machine that jumps from stack to stack: libc's own check of jumps, on by default in some systems, would end it.
    # And gcc would let all libraries of a process share the shared memory of a template, whose size differs.
    own = [] if "clang" in Path(cxx()).name else ["-fno-gnu-unique"]
    command = [cxx(), "-U_FORTIFY_SOURCE", "-std=c++17", "-fPIC", "-w", *own, *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
