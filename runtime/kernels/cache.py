"""Compiled kernels on disk: several processes may read and fill it at once, and a torn file counts as none."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path

from runtime.errors import StorageError
from runtime.kernels.cubin import Cubin, Resources


def cache_folder() -> Path:
    """`kernels` in MOESPEQ_CACHE_DIR, or in moespeq's part of the user's cache folder."""
    own = os.environ.get("MOESPEQ_CACHE_DIR")
    user = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return (Path(own) if own else Path(user) / "moespeq").expanduser() / "kernels"


def find(key: str) -> tuple[Cubin, Path] | None:
    """The cubin that was stored under a key and its file, or nothing if there is none that is whole."""
    folder = cache_folder()
    try:
        entry = json.loads((folder / f"{key}.json").read_text(encoding="utf-8"))
        path = folder / f"{entry['sha256']}.cubin"
        data = path.read_bytes()
        resources = {
            name: Resources(**{**fact, "parameter_bytes": tuple(fact["parameter_bytes"])})
            for name, fact in entry["resources"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # absent, or not what `store` writes
        return None
    return (Cubin(data, resources), path) if hashlib.sha256(data).hexdigest() == entry["sha256"] else None


def store(key: str, cubin: Cubin) -> Path:
    """Keep a cubin under a key; its file, named by its content, so that whoever comes last changes nothing.

    Raises:
        StorageError: the folder cannot be written.
    """
    folder = cache_folder()
    sha256 = hashlib.sha256(cubin.data).hexdigest()
    entry = {"sha256": sha256, "resources": {name: asdict(fact) for name, fact in cubin.resources.items()}}
    path = folder / f"{sha256}.cubin"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(path, cubin.data)
        _write(folder / f"{key}.json", json.dumps(entry, sort_keys=True).encode())
    except OSError as error:
        raise StorageError(
            expected=f"to keep compiled kernels in {folder}",
            found=str(error),
            mend="set MOESPEQ_CACHE_DIR to a folder that can be written",
        ) from error
    return path


def _write(path: Path, data: bytes) -> None:
    """Write by rename, under a name of this writer's own until then."""
    handle, part = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(part, path)
    except BaseException:
        os.unlink(part)
        raise
