"""The emulated machine as compilers of other systems build it."""

from __future__ import annotations

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
