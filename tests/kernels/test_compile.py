"""Every kernel source compiles without a GPU and within its registers; the cache knows what a cubin was made from."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runtime.errors import KernelError, StorageError
from runtime.kernels import cache
from runtime.kernels import compile as compiling
from runtime.kernels.catalog import CATALOG, EVERYWHERE, HOPPER, Entry
from runtime.kernels.compile import Source, compile_cubin, headers_digest, kernel_folder, options
from runtime.kernels.cubin import Resources, read_cubin

ROOT = Path(__file__).parent.parent.parent
SCALE = """#include "factor.cuh"
extern "C" __global__ void scale(float* x, int n) {
    __shared__ float line[64];
    line[threadIdx.x % 64] = x[0];
    __syncthreads();
    if (int(threadIdx.x) < n) x[threadIdx.x] *= FACTOR * MORE * line[n % 64];
}
"""
SPILL = """extern "C" __global__ void __launch_bounds__(1024, 2) spill(const float* a, float* b, int n) {
    float x[64];
    for (int i = 0; i < 64; ++i) x[i] = a[i * n + threadIdx.x];
    for (int round = 0; round < n; ++round) {
#pragma unroll
        for (int i = 0; i < 64; ++i) x[i] = x[i] * x[(i + 17) % 64] + 1;
    }
    for (int i = 0; i < 64; ++i) b[i * n + threadIdx.x] = x[i];
}
"""


def cases() -> list[Any]:
    return [pytest.param(entry, arch, id=f"{_label(entry.source)}-{arch}") for entry in CATALOG for arch in entry.archs]


def _label(source: Source) -> str:
    return f"{source.name}[{','.join(f'{name}={value}' for name, value in source.defines)}]"


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize(("entry", "arch"), cases())
def test_compiles_within_its_registers(entry: Entry, arch: str) -> None:
    resources = compile_cubin(entry.source, arch).resources
    assert resources, "no kernel in it"
    for name, needs in resources.items():
        assert needs.registers <= entry.max_registers, f"{name} of {entry.source}: {needs}"
        assert needs.spill_bytes <= entry.max_spill_bytes, f"{name} of {entry.source}: {needs}"


def test_every_source_is_in_the_catalog() -> None:
    sources = {path.name for path in kernel_folder().glob("*.cu")}
    for archs in (EVERYWHERE[:1], EVERYWHERE[1:] + HOPPER):
        assert {entry.source.name for entry in CATALOG if set(archs) & set(entry.archs)} == sources, archs


def test_sources_are_found_in_a_checkout() -> None:
    assert kernel_folder() == ROOT / "cuda"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Kernels and an empty cache of this test alone."""
    kernels = tmp_path / "cuda"
    kernels.mkdir()
    (kernels / "scale.cu").write_text(SCALE, encoding="utf-8")
    (kernels / "factor.cuh").write_text("#define FACTOR 2.0f\n", encoding="utf-8")
    monkeypatch.setattr(compiling, "kernel_folder", lambda: kernels)
    monkeypatch.setenv("MOESPEQ_CACHE_DIR", str(tmp_path / "cache"))
    return kernels


SOURCE = Source("scale.cu", (("MORE", 3),))


@pytest.fixture
def compiled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the sources that NVRTC was run on, growing."""
    names: list[str] = []
    real = compiling._run_nvrtc

    def counting(nvrtc: Any, name: str, text: str, chosen: tuple[str, ...]) -> Any:
        names.append(name)
        return real(nvrtc, name, text, chosen)

    monkeypatch.setattr(compiling, "_run_nvrtc", counting)
    return names


@pytest.mark.usefixtures("nvrtc")
class TestCache:
    def test_compiles_once(self, compiled: list[str]) -> None:
        first = compile_cubin(SOURCE, "sm_80")
        assert compile_cubin(SOURCE, "sm_80") == first
        assert compiled == ["scale.cu"]
        assert first.data.startswith(b"\x7fELF")
        assert first.resources["scale"].parameter_bytes == (8, 4)

    def test_a_header_changes_the_cubin(self, folder: Path, compiled: list[str]) -> None:
        before = compile_cubin(SOURCE, "sm_80")
        (folder / "factor.cuh").write_text("#define FACTOR 4.0f\n", encoding="utf-8")
        after = compile_cubin(SOURCE, "sm_80")
        assert len(compiled) == 2
        assert before.data != after.data

    def test_source_values_and_architecture_count(self, folder: Path, compiled: list[str]) -> None:
        compile_cubin(SOURCE, "sm_80")
        compile_cubin(Source("scale.cu", (("MORE", 5),)), "sm_80")
        compile_cubin(SOURCE, "sm_90")
        (folder / "scale.cu").write_text(SCALE.replace("*=", "+="), encoding="utf-8")
        compile_cubin(SOURCE, "sm_80")
        assert len(compiled) == 4

    def test_the_version_of_nvrtc_counts(self, compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        from cupy.cuda import nvrtc

        compile_cubin(SOURCE, "sm_80")
        monkeypatch.setattr(nvrtc, "getVersion", lambda: (13, 99))
        compile_cubin(SOURCE, "sm_80")
        assert len(compiled) == 2

    @pytest.mark.parametrize("suffix", ["json", "cubin"])
    @pytest.mark.parametrize("left", ["", "half", "none", '{"sha256": 5}', '{"sha256": "x", "resources": []}', "[]"])
    def test_a_torn_file_is_made_again(self, compiled: list[str], suffix: str, left: str) -> None:
        first = compile_cubin(SOURCE, "sm_80")
        (path,) = cache.cache_folder().glob(f"*.{suffix}")
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2] if left == "half" else left.encode())
        if left == "none":
            path.unlink()
        assert compile_cubin(SOURCE, "sm_80") == first
        assert len(compiled) == 2
        assert path.read_bytes() == whole

    def test_resources_of_another_version_are_made_again(self, compiled: list[str]) -> None:
        compile_cubin(SOURCE, "sm_80")
        (path,) = cache.cache_folder().glob("*.json")
        entry = json.loads(path.read_text(encoding="utf-8"))
        del entry["resources"]["scale"]["registers"]
        path.write_text(json.dumps(entry), encoding="utf-8")
        assert compile_cubin(SOURCE, "sm_80").resources["scale"].registers > 0
        assert len(compiled) == 2

    def test_processes_fill_it_at_once(self, folder: Path) -> None:
        code = (
            "from pathlib import Path\n"
            "from runtime.kernels import compile\n"
            f"compile.kernel_folder = lambda: Path({str(folder)!r})\n"
            "input()\n"
            "for more in range(5): compile.compile_cubin(compile.Source('scale.cu', (('MORE', more),)), 'sm_80')\n"
        )
        processes = [
            subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
            for _ in range(2)
        ]
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(b"\n")
            process.stdin.flush()
        for process in processes:
            _, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors.decode()
        names = [path.suffix for path in cache.cache_folder().iterdir()]
        assert (names.count(".json"), names.count(".part")) == (5, 0)
        for path in cache.cache_folder().glob("*.json"):
            assert cache.find(path.stem) is not None

    def test_a_folder_that_cannot_be_written_is_named(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").write_text("", encoding="utf-8")
        monkeypatch.setenv("MOESPEQ_CACHE_DIR", str(tmp_path / "file"))
        with pytest.raises(StorageError, match=r"to keep compiled kernels in .*file/kernels") as error:
            compile_cubin(SOURCE, "sm_80")
        assert "MOESPEQ_CACHE_DIR" in error.value.mend


@pytest.mark.usefixtures("nvrtc")
class TestErrors:
    def test_shows_the_log(self, folder: Path) -> None:
        (folder / "wrong.cu").write_text("__global__ void wrong() { int x = y; }\n", encoding="utf-8")
        with pytest.raises(KernelError) as error:
            compile_cubin(Source("wrong.cu"), "sm_80")
        assert 'wrong.cu(1): error: identifier "y" is undefined' in str(error.value)
        assert "wrong.cu to compile with -arch=sm_80 " in error.value.expected

    def test_a_failure_leaves_nothing(self, folder: Path) -> None:
        (folder / "factor.cuh").unlink()
        with pytest.raises(KernelError, match=r"factor\.cuh"):
            compile_cubin(SOURCE, "sm_80")
        assert not cache.cache_folder().exists()

    def test_an_unknown_architecture(self, folder: Path) -> None:
        with pytest.raises(KernelError, match="invalid value for --gpu-architecture"):
            compile_cubin(SOURCE, "sm_12345")

    def test_nvrtc_that_is_missing_is_asked_for(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from cuda.pathfinder import DynamicLibNotFoundError
        from cupy.cuda import nvrtc

        def missing() -> None:
            raise DynamicLibNotFoundError("libnvrtc.so.13")

        monkeypatch.setattr(nvrtc, "getVersion", missing)
        with pytest.raises(KernelError, match="expected NVRTC, CUDA's compiler library; found libnvrtc") as error:
            compile_cubin(SOURCE, "sm_80")
        assert error.value.mend == "pip install 'moespeq[cuda]'"

    def test_a_source_that_is_not_there(self, folder: Path) -> None:
        with pytest.raises(KernelError, match=r"the kernel source .*absent\.cu"):
            compile_cubin(Source("absent.cu"), "sm_80")


@pytest.mark.usefixtures("nvrtc")
class TestResources:
    @pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_90a", "sm_120"])
    def test_shared_memory_and_parameters(self, folder: Path, arch: str) -> None:
        needs = compile_cubin(SOURCE, arch).resources["scale"]
        assert needs == Resources(needs.registers, 0, 0, 256, (8, 4))
        assert 4 <= needs.registers <= 32

    def test_spills_are_seen(self, folder: Path) -> None:
        (folder / "spill.cu").write_text(SPILL, encoding="utf-8")
        needs = compile_cubin(Source("spill.cu"), "sm_80").resources["spill"]
        assert needs.registers == 32  # 65536 of an SM for 2048 threads
        assert needs.spill_bytes > needs.stack_bytes > 100

    def test_a_cubin_is_whole(self, folder: Path) -> None:
        """Tools refuse one without its last byte, which CuPy leaves out."""
        data = compile_cubin(SOURCE, "sm_80").data
        programs, sections = struct.unpack_from("<QQ", data, 32)
        sizes = struct.unpack_from("<HHHH", data, 54)
        ends = (programs + sizes[0] * sizes[1], sections + sizes[2] * sizes[3])
        assert programs and len(data) == max(ends)

    @pytest.mark.parametrize("size", [0, 5, 63, 64, 2000, -300])
    def test_a_torn_cubin_is_refused(self, folder: Path, size: int) -> None:
        data = compile_cubin(SOURCE, "sm_80").data
        with pytest.raises(KernelError, match="expected a cubin"):
            read_cubin(data[:size], "")


def test_digest_covers_names_and_texts_of_headers(folder: Path) -> None:
    seen = [headers_digest()]
    for name, text in (("factor.cuh", "#define FACTOR 3.0f\n"), ("other.cuh", ""), ("other.cuh", "\n")):
        (folder / name).write_text(text, encoding="utf-8")
        seen.append(headers_digest())
    (folder / "other.cuh").rename(folder / "another.cuh")
    seen.append(headers_digest())
    assert len(set(seen)) == 5
    assert all(len(digest) == 16 for digest in seen)
    (folder / "scale.cu").write_text("", encoding="utf-8")
    assert headers_digest() == seen[-1]


@pytest.mark.usefixtures("nvrtc")
def test_options_name_headers_and_values(folder: Path) -> None:
    chosen = options(SOURCE, "sm_90a")
    assert {"-arch=sm_90a", f"-I{folder}", f"-DHEADERS_{headers_digest()}", "-DMORE=3"} <= set(chosen)


def test_headers_that_are_nowhere_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_header_folders", lambda: iter([Path("/nowhere")]))
    compiling.cuda_headers.cache_clear()
    with pytest.raises(KernelError, match="expected CUDA's headers") as error:
        compiling.cuda_headers()
    assert error.value.mend == "pip install 'moespeq[cuda]'"


def test_headers_that_are_whole_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA's packages bring mma.h without what it includes, unless one more is installed."""
    half, whole = tmp_path / "half", tmp_path / "whole"
    for folder in (half, whole / "crt"):
        folder.mkdir(parents=True)
    for path in (half / "cuda_bf16.h", whole / "cuda_bf16.h", whole / "crt" / "mma.h"):
        path.write_text("", encoding="utf-8")
    monkeypatch.setattr(compiling, "_header_folders", lambda: iter([half, whole]))
    compiling.cuda_headers.cache_clear()
    assert compiling.cuda_headers() == whole
    (whole / "cuda_bf16.h").unlink()
    compiling.cuda_headers.cache_clear()
    assert compiling.cuda_headers() == half
    compiling.cuda_headers.cache_clear()


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize(
    ("hopper", "capability", "arch"),
    [
        (False, (8, 0), "sm_80"),
        (False, (8, 9), "sm_89"),
        (False, (9, 0), "sm_90"),
        (True, (9, 0), "sm_90a"),
        (True, (8, 0), "sm_80"),
        (False, (12, 9), "sm_121"),
    ],
)
def test_architecture_fits_the_gpu(hopper: bool, capability: tuple[int, int], arch: str) -> None:
    assert compiling._arch(Source("any.cu", hopper=hopper), capability) == arch


@pytest.mark.usefixtures("nvrtc")
def test_a_gpu_that_nvrtc_does_not_know() -> None:
    with pytest.raises(KernelError, match=r"an NVRTC that compiles for compute capability 99\.1"):
        compiling._arch(Source("any.cu"), (99, 1))


@pytest.mark.parametrize(
    ("own", "user", "expected"),
    [("/a", "/b", "/a/kernels"), (None, "/b", "/b/moespeq/kernels"), (None, None, "~/.cache/moespeq/kernels")],
)
def test_cache_is_where_the_environment_says(
    own: str | None, user: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("MOESPEQ_CACHE_DIR", own), ("XDG_CACHE_HOME", user)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert cache.cache_folder() == Path(expected).expanduser()
