"""C sources of the package, compiled for this very processor when they are first used, where there is a compiler.

Nothing depends on it: whoever loads a library has a slower way in Python for machines without a compiler.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

COMPILERS = ("cc", "gcc", "clang")
FLAGS = (("-O3", "-march=native"), ("-O3",))  # the second for compilers that do not know the first
_COMMON = ("-std=c11", "-shared", "-fPIC")
_TIMEOUT_S = 120


class NotCompiled(Exception):
    """Why there is no library, in words for the user."""


def cache_folder() -> Path:
    """`native` in MOESPEQ_CACHE_DIR, or in moespeq's part of the user's cache folder."""
    own = os.environ.get("MOESPEQ_CACHE_DIR")
    user = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return (Path(own) if own else Path(user) / "moespeq").expanduser() / "native"


def load(source: Path, check: Callable[[ctypes.CDLL], bool]) -> ctypes.CDLL:
    """The library of a C source: from the cache, or compiled now.

    Args:
        source: a C file that includes nothing of its own.
        check: whether a freshly compiled library computes what it should; one that does not is not kept.

    Raises:
        NotCompiled: no compiler, it failed, the check failed, or MOESPEQ_NATIVE is 0.
    """
    if os.environ.get("MOESPEQ_NATIVE") == "0":
        raise NotCompiled("MOESPEQ_NATIVE is 0")
    if sys.byteorder != "little":
        raise NotCompiled("this processor stores the high byte first")
    text = source.read_bytes()
    command = _compiler()
    identity = repr((_processor(), command, _COMMON, FLAGS)).encode()
    kept = cache_folder() / f"{source.stem}-{hashlib.sha256(text + identity).hexdigest()[:32]}.so"
    if kept.is_file():
        try:
            return ctypes.CDLL(str(kept))
        except OSError:  # torn, or of another machine: compile it again
            pass
    with tempfile.TemporaryDirectory(prefix="moespeq-") as folder:
        made = Path(folder) / kept.name
        _compile(command, source, made)
        try:
            library = ctypes.CDLL(str(made))  # stays loaded when the file is gone
        except OSError as error:
            raise NotCompiled(f"what {shlex.join(command)} made cannot be loaded: {error}") from None
        if not check(library):
            raise NotCompiled(f"what {shlex.join(command)} made of {source.name} computes something else")
        _keep(made, kept)
        return library


def _compiler() -> list[str]:
    asked = os.environ.get("CC")
    if asked:
        return shlex.split(asked)
    for name in COMPILERS:
        if found := shutil.which(name):
            return [found]
    raise NotCompiled(f"no C compiler: none of {', '.join(COMPILERS)} on the PATH, and CC names none")


def _compile(command: list[str], source: Path, made: Path) -> None:
    said = ""
    for flags in FLAGS:
        line = [*command, *flags, *_COMMON, str(source), "-o", str(made)]
        try:
            done = subprocess.run(line, capture_output=True, text=True, timeout=_TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NotCompiled(f"{shlex.join(command)} did not run: {error}") from None
        if done.returncode == 0:
            return
        said = (done.stderr.strip().splitlines() or ["nothing said"])[0]
    raise NotCompiled(f"{shlex.join(command)} does not compile {source.name}: {said}")


def _keep(made: Path, kept: Path) -> None:
    """Put a library into the cache by rename; where that cannot be written, each process compiles its own."""
    part = kept.with_name(f"{kept.name}.{os.getpid()}.part")
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(made, part)
        os.replace(part, kept)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


@functools.cache
def _processor() -> str:
    """What code compiled for this processor may depend on."""
    features = ""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        features = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    except OSError:
        features = platform.processor()
    return f"{sys.platform} {platform.machine()} {features}"
