"""Compile functions of a kernel header for the host, so that their arithmetic on integers is tested without a GPU.

A header that can be tested this way marks its functions `MOESPEQ_HD`, which is `static inline` where `__CUDACC__` is
not defined, and includes nothing of CUDA there.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from runtime.kernels.compile import Source, kernel_folder

_TYPES: dict[str, Any] = {
    "int": ctypes.c_int,
    "unsigned": ctypes.c_uint,
    "long long": ctypes.c_longlong,
    "unsigned long long": ctypes.c_ulonglong,
    "bool": ctypes.c_bool,
    "float": ctypes.c_float,
    "void": None,
}


@dataclass(frozen=True)
class Function:
    """A function to call from Python.

    Attributes:
        name: what Python calls it.
        result: a C type among those of `_TYPES`, or such a type with `*`, that Python sees as an address.
        parameters: the same.
        expression: what it returns, in terms of a0, a1 and so on, for a template, a member or several calls; by
            default the call of the function of that name.
    """

    name: str
    result: str
    parameters: tuple[str, ...]
    expression: str = ""

    def source(self) -> str:
        names = [f"a{i}" for i in range(len(self.parameters))]
        typed = ", ".join(f"{kind} {name}" for kind, name in zip(self.parameters, names, strict=True))
        value = self.expression or f"{self.name}({', '.join(names)})"
        body = value if self.result == "void" else f"return {value}"
        return f'extern "C" {self.result} host_{self.name}({typed}) {{ {body}; }}\n'


class Host:
    """Functions of some headers as attributes, called with Python's ints or, for pointers, NumPy arrays."""

    def __init__(self, library: ctypes.CDLL, functions: Sequence[Function]) -> None:
        for function in functions:
            call = getattr(library, f"host_{function.name}")
            call.restype = _ctype(function.result)
            call.argtypes = [_ctype(kind) for kind in function.parameters]
            setattr(self, function.name, _taking_arrays(call))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AttributeError(f"no function {name} was compiled")


def cxx() -> str:
    """The C++ compiler. Without one it skips the test, or fails it if MOESPEQ_REQUIRE_CXX is set."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if compiler is None:
        if os.environ.get("MOESPEQ_REQUIRE_CXX"):
            pytest.fail("no C++ compiler: install g++ or set CXX")
        pytest.skip("no C++ compiler for device functions on the host: install g++ or set CXX")
    return compiler


def compile_for_host(
    folder: Path, headers: Sequence[str], functions: Sequence[Function], defines: dict[str, int] | None = None
) -> Host:
    """Build a library of the functions in a folder and load it.

    Args:
        folder: an empty one, for the library; it must outlive the functions.
        headers: names in the kernel folder.
        functions: what to call.
        defines: macros set before the headers are read.

    Undefined behaviour, such as a shift out of range or a signed overflow, ends the process. See `cxx` for
    machines without a C++ compiler.
    """
    compiler = cxx()
    text = "".join(f"#define {name} {value}\n" for name, value in (defines or {}).items())
    text += "".join(f'#include "{header}"\n' for header in headers)
    text += "".join(function.source() for function in functions)
    source, library = folder / "host.cpp", folder / "host.so"
    source.write_text(text, encoding="utf-8")
    strict = ("-Wall", "-Wextra", "-Werror", "-Wno-unused-function", "-Wno-unknown-pragmas")
    checked = ("-fsanitize=undefined", "-fsanitize-undefined-trap-on-error")
    command = [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", *strict, *checked]
    command += [f"-I{kernel_folder()}", str(source), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return Host(ctypes.CDLL(str(library)), functions)


def _ctype(kind: str) -> Any:
    return ctypes.c_void_p if kind.endswith("*") else _TYPES[kind]


def _taking_arrays(call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *values: call(*(value.ctypes.data if hasattr(value, "ctypes") else value for value in values))


def preprocessed(conditions: str, source: Source) -> str:
    """What the preprocessor says of conditions behind the source, with its macros; empty is good."""
    macros = [f"-D{name}={value}" for name, value in source.defines]
    command = [cxx(), *macros, "-x", "c++", "-E", "-P", "-nostdinc", f"-I{kernel_folder()}", "-o", "/dev/null", "-"]
    text = f'#include "{source.name}"\n{conditions}'
    return subprocess.run(command, input=text, capture_output=True, text=True).stderr
