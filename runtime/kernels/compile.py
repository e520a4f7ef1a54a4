"""From a file of `cuda/` to a module on the GPU: NVRTC through CuPy, no nvcc, and no GPU until `load`."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.errors import KernelError
from runtime.kernels import cache
from runtime.kernels.cubin import Cubin, Resources, read_cubin, with_its_end
from runtime.kernels.device import current_gpu

_INSTALL = "pip install 'moespeq[cuda]'"


@dataclass(frozen=True, slots=True)
class Source:
    """A file of the kernel folder with the values that it is compiled for.

    Attributes:
        name: the file, such as `route.cu`.
        defines: macros and their values, in the order in which they are passed.
        hopper: uses instructions of sm_90a (such as wgmma), so that compute capability 9.0 compiles for that.
    """

    name: str
    defines: tuple[tuple[str, int | str], ...] = ()
    hopper: bool = False


@dataclass(frozen=True, slots=True)
class Module:
    """Kernels on the current GPU.

    Attributes:
        raw: the `cupy.RawModule`.
        source: what it was compiled from.
        resources: what each kernel needs, by name.
    """

    raw: Any
    source: Source
    resources: dict[str, Resources]


def kernel_folder() -> Path:
    """Where the `.cu` and `.cuh` files are: `runtime/_cuda` in a wheel, `cuda` in a checkout."""
    runtime = Path(__file__).parent.parent
    wheel, checkout = runtime / "_cuda", runtime.parent / "cuda"
    for folder in (wheel, checkout):
        if folder.is_dir():
            return folder
    raise KernelError(
        expected="the kernel sources", found=f"neither {wheel} nor {checkout}", mend="install moespeq again"
    )


def headers_digest() -> str:
    """16 hexadecimal digits that change with the name or the text of any `.cuh` file."""
    total = hashlib.sha256()
    for path in sorted(kernel_folder().glob("*.cuh")):
        total.update(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()[:16]


def options(source: Source, arch: str) -> tuple[str, ...]:
    """What NVRTC is told; as it names the headers by their digest, the options cover all but the source's own text.

    Args:
        arch: such as `sm_80` or `sm_90a`.

    Raises:
        KernelError: CUDA's headers are not installed.
    """
    return (
        f"-arch={arch}",
        "-std=c++17",
        "-default-device",
        f"-I{kernel_folder()}",
        f"-I{cuda_headers()}",
        f"-DHEADERS_{headers_digest()}",
        *(f"-D{name}={value}" for name, value in source.defines),
        "--ptxas-options=-v",  # the bytes of spills are in the log only,
        "--no-cache",  # which is empty when NVRTC takes the code from the driver's cache instead of running ptxas
    )


@functools.cache
def cuda_headers() -> Path:
    """The folder of cuda_bf16.h: NVIDIA's Python packages, or else a toolkit; first one that is whole.

    Raises:
        KernelError: there is none.
    """
    found = [folder for folder in _header_folders() if (folder / "cuda_bf16.h").is_file()]
    whole = [folder for folder in found if (folder / "crt" / "mma.h").is_file()]
    for folder in whole + found:
        return folder
    raise KernelError(
        expected="CUDA's headers (cuda_bf16.h), from NVIDIA's Python packages, CUDA_HOME or /usr/local/cuda",
        found="none of them",
        mend=_INSTALL,
    )


def _header_folders() -> Iterator[Path]:
    try:
        import nvidia
    except ImportError:
        pass
    else:
        yield from (Path(root) / "cu13" / "include" for root in nvidia.__path__)
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if name in os.environ:
            yield Path(os.environ[name]) / "include"
    yield Path("/usr/local/cuda/include")


def compile_cubin(source: Source, arch: str) -> Cubin:
    """Machine code for an architecture, from the cache on disk if it was compiled before; needs no GPU.

    Args:
        arch: such as `sm_80` or `sm_90a`.

    Raises:
        KernelError: CuPy, NVRTC or CUDA's headers are missing, or the source does not compile; then with the log.
        StorageError: the cache cannot be written.
    """
    return _compiled(source, arch)[0]


def load(source: Source) -> Module:
    """The kernels of a source on torch's current GPU.

    Raises:
        KernelError: no GPU that will do, or see `compile_cubin`.
    """
    gpu = current_gpu()
    cubin, path = _compiled(source, _arch(source, gpu.capability))
    with _cupy() as cupy, cupy.cuda.Device(gpu.index):
        return Module(cupy.RawModule(path=str(path)), source, cubin.resources)


def _arch(source: Source, capability: tuple[int, int]) -> str:
    """The newest architecture that NVRTC knows and the GPU runs: of the same generation, and no newer."""
    if source.hopper and capability == (9, 0):
        return "sm_90a"
    with _cupy() as cupy:
        known = [number for number in cupy.cuda.nvrtc.getSupportedArchs() if number // 10 == capability[0]]
    fitting = [number for number in known if number % 10 <= capability[1]]
    if not fitting:
        raise KernelError(
            expected=f"an NVRTC that compiles for compute capability {capability[0]}.{capability[1]}",
            found="one that does not know it",
            mend="install a newer nvidia-cuda-nvrtc",
        )
    return f"sm_{max(fitting)}"


def _compiled(source: Source, arch: str) -> tuple[Cubin, Path]:
    text = _read(source)
    chosen = options(source, arch)
    with _cupy() as cupy:
        key = _key(source.name, text, chosen, cupy.cuda.nvrtc.getVersion())
        found = cache.find(key)
        if found is not None:
            return found
        cubin = _run_nvrtc(cupy.cuda.nvrtc, source.name, text, chosen)
    return cubin, cache.store(key, cubin)


def _key(name: str, text: str, chosen: tuple[str, ...], version: tuple[int, int]) -> str:
    return hashlib.sha256(repr((name, text, chosen, version)).encode()).hexdigest()


def _read(source: Source) -> str:
    path = kernel_folder() / source.name
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise KernelError(
            expected=f"the kernel source {path}", found=str(error), mend="install moespeq again"
        ) from error


def _run_nvrtc(nvrtc: Any, name: str, text: str, chosen: tuple[str, ...]) -> Cubin:
    with _program(nvrtc, name, text, chosen) as program:
        return read_cubin(with_its_end(nvrtc.getCUBIN(program)), nvrtc.getProgramLog(program))


@contextmanager
def _program(nvrtc: Any, name: str, text: str, chosen: tuple[str, ...]) -> Iterator[Any]:
    """What NVRTC has compiled, to take code and log from."""
    program = nvrtc.createProgram(text, name, [], [])
    try:
        nvrtc.compileProgram(program, chosen)
        yield program
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program).strip("\0 \n")
        raise KernelError(
            expected=f"{name} to compile with {' '.join(chosen)}",
            found=f"{error}\n{log}",
            mend="this is a fault of moespeq or of the CUDA that is installed; please report it with this message",
        ) from error
    finally:
        nvrtc.destroyProgram(program)


@contextmanager
def _cupy() -> Iterator[Any]:
    """CuPy, with a word on what is missing if it or NVRTC is not there."""
    try:
        import cupy
        from cuda.pathfinder import DynamicLibNotFoundError  # CuPy finds libraries by it
    except ImportError as error:
        raise KernelError(expected="CuPy, for CUDA kernels", found=str(error), mend=_INSTALL) from error
    try:
        yield cupy
    except DynamicLibNotFoundError as error:
        raise KernelError(expected="NVRTC, CUDA's compiler library", found=str(error), mend=_INSTALL) from error
