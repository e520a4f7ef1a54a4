"""The emulated machine as compilers of other systems build it."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from tests.kernels import emulated
from tests.kernels.host import cxx


def test_jumps_between_stacks_are_not_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a system's compiler asks for it (Ubuntu's does, from -O2 on), libc ends a process that leaves a stack."""
    compiler = tmp_path / "cxx"
    compiler.write_text(f'#!/bin/sh\nexec "{cxx()}" -D_FORTIFY_SOURCE=2 "$@"\n', encoding="utf-8")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    base = emulated.machine(tmp_path)
    assert b"_longjmp" in (base / "simt.o").read_bytes()
    assert b"__longjmp_chk" not in (base / "simt.o").read_bytes()


def test_the_shared_memory_of_a_template_is_each_librarys_own(tmp_path: Path) -> None:
    """It is a static array there, of another size in each library."""
    (tmp_path / "room.cpp").write_text(
        "template <bool T> inline int* room() { static int room[N]; return room; }\n"
        'extern "C" int* at() { return room<true>(); }\n',
        encoding="utf-8",
    )
    places = []
    for size in (1, 8):
        emulated.compile_in(tmp_path, [f"-DN={size}", "-shared", "room.cpp", "-o", f"{size}.so"])
        library = ctypes.CDLL(str(tmp_path / f"{size}.so"))
        library.at.restype = ctypes.c_void_p
        places.append(library.at())
    assert len(set(places)) == 2
