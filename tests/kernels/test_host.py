"""The harness that runs kernel functions on the host, on a header made for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from runtime.kernels import compile as compiling
from tests.kernels.host import Function, compile_for_host

ROOT = Path(__file__).parent.parent.parent
HEADER = """#pragma once
#ifdef __CUDACC__
#define MOESPEQ_HD __host__ __device__ __forceinline__
#else
#define MOESPEQ_HD static inline
#endif
MOESPEQ_HD long long offset(int slot, long long slot_bytes) { return slot * slot_bytes; }
MOESPEQ_HD int shifted(int x, int by) { return x << by; }
template <int BITS> MOESPEQ_HD unsigned nibble(unsigned word, int i) { return word >> (i * BITS) & ((1u << BITS) - 1); }
MOESPEQ_HD void unpack(const unsigned* words, int* codes) {
    for (int i = 0; i < 8; ++i) codes[i] = int(nibble<4>(*words, i)) - ZERO;
}
"""
FUNCTIONS = (
    Function("offset", "long long", ("int", "long long")),
    Function("nibble4", "unsigned", ("unsigned", "int"), "nibble<4>(a0, a1)"),
    Function("unpack", "void", ("const unsigned*", "int*")),
    Function("shifted", "int", ("int", "int")),
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "made.cuh").write_text(HEADER, encoding="utf-8")
    monkeypatch.setattr(compiling, "kernel_folder", lambda: tmp_path)
    monkeypatch.setattr("tests.kernels.host.kernel_folder", lambda: tmp_path)
    return tmp_path


def test_calls_functions_templates_and_arrays(folder: Path) -> None:
    host = compile_for_host(folder, ["made.cuh"], FUNCTIONS, {"ZERO": 8})
    assert host.offset(300, 1 << 40) == 300 << 40
    assert [host.nibble4(0xFEDCBA98, i) for i in range(8)] == list(range(8, 16))
    codes = np.zeros(8, dtype=np.int32)
    host.unpack(np.array([0x01234567], dtype=np.uint32), codes)
    assert codes.tolist() == [-1, -2, -3, -4, -5, -6, -7, -8]
    with pytest.raises(AttributeError, match="no function other was compiled"):
        host.other  # noqa: B018


def test_a_header_that_does_not_compile_shows_why(folder: Path) -> None:
    with pytest.raises(AssertionError, match=r"was not declared|undeclared"):
        compile_for_host(folder, ["made.cuh"], FUNCTIONS)  # without ZERO


def test_undefined_behaviour_ends_the_process(folder: Path) -> None:
    compile_for_host(folder, ["made.cuh"], FUNCTIONS, {"ZERO": 8})
    code = f"import ctypes; ctypes.CDLL({str(folder / 'host.so')!r}).host_shifted(1, 40)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True).returncode < 0


def test_without_a_compiler_it_skips_or_fails_if_one_is_required(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("MOESPEQ_REQUIRE_CXX", raising=False)
    monkeypatch.setenv("PATH", str(folder))
    with pytest.raises(pytest.skip.Exception, match=r"install g\+\+ or set CXX"):
        compile_for_host(folder, ["made.cuh"], FUNCTIONS)
    monkeypatch.setenv("MOESPEQ_REQUIRE_CXX", "1")
    with pytest.raises(pytest.fail.Exception, match="no C\\+\\+ compiler"):
        compile_for_host(folder, ["made.cuh"], FUNCTIONS)
