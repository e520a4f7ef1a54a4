"""What the kernels' tests need of the machine, and a cache of compiled kernels that is theirs alone."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.errors import KernelError
from runtime.kernels import compile as compiling
from runtime.kernels.compile import compile_cubin
from runtime.kernels.device import Gpu, current_gpu
from tests.kernels.host import cxx

PROBES = Path(__file__).parent / "probes"


@pytest.fixture(scope="session", autouse=True)
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A folder of this run, unless the caller named one."""
    with pytest.MonkeyPatch.context() as patch:
        if "MOESPEQ_CACHE_DIR" not in os.environ:
            patch.setenv("MOESPEQ_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def gpu() -> Gpu:
    """The GPU to test on; skips where there is none."""
    if importlib.util.find_spec("cupy") is None:
        pytest.skip("CuPy is not installed: pip install 'moespeq[cuda]'")
    try:
        return current_gpu()
    except KernelError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def nvrtc(tmp_path_factory: pytest.TempPathFactory) -> None:
    """CUDA's compiler, which needs no GPU; skips without it, or fails if MOESPEQ_REQUIRE_NVRTC is set."""
    folder = tmp_path_factory.mktemp("nvrtc")
    (folder / "empty.cu").write_text('#include <mma.h>\nextern "C" __global__ void empty() {}\n', encoding="utf-8")
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compiling, "kernel_folder", lambda: folder)
            compile_cubin(compiling.Source("empty.cu"), "sm_80")
    except KernelError as error:
        if os.environ.get("MOESPEQ_REQUIRE_NVRTC"):
            raise
        pytest.skip(f"{error}; {error.mend}")


@pytest.fixture(autouse=True)
def _skip_without_gpu(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu"):
        request.getfixturevalue("gpu")


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tests' own kernels in place of the product's."""
    monkeypatch.setattr(compiling, "kernel_folder", lambda: PROBES)
    return PROBES


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where kernels compiled for the host are kept; parallel workers share it."""
    cxx()
    own = tmp_path_factory.getbasetemp()
    shared = (own.parent if own.name.startswith("popen-") else own) / "emulated"
    shared.mkdir(exist_ok=True)
    return shared
