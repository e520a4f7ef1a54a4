"""An output folder: who may write there, whether it fits, and how it is cleared."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from runtime.artifacts.manifest import MANIFEST, PROGRESS, is_finished, read_json, write_json
from runtime.errors import ArtifactError, InputError, StorageError
from runtime.memory.sizes import format_size

LOCK = ".lock"
LEFTOVERS = ".tmp??????"  # of the safetensors library, when a process is killed before it renames one
CLEARING = {"clearing": True}  # a progress file that says: what else is here was to be thrown away


def refuse_strangers(folder: Path, own: re.Pattern[str], kind: str) -> None:
    """Keep away from a folder that holds files which no artifact of this kind has, --force or not.

    Args:
        folder: where the artifact is to go.
        own: matches the names that such an artifact, finished or not, may hold.
        kind: of artifact, for the message.

    Raises:
        InputError: naming the first of them.
    """
    strangers = sorted(p.name for p in folder.iterdir() if not own.fullmatch(p.name)) if folder.is_dir() else []
    if strangers:
        more = f" and {len(strangers) - 1} more" if len(strangers) > 1 else ""
        raise InputError(
            expected=f"an empty folder, a new one or a {kind} at {folder}",
            found=f"{strangers[0]}{more}, not a {kind}'s",
            mend="pass another --out",
        )


def refuse_other_kind(folder: Path, kind: str) -> None:
    """Keep away from a finished artifact of another stage, --force or not.

    Raises:
        ArtifactError: the folder holds one.
    """
    if not is_finished(folder):
        return
    body = read_json(folder / MANIFEST, "a manifest", "choose another --out")
    found = body.get("kind") if isinstance(body, dict) else None
    if found != kind:
        raise ArtifactError(
            expected=f"a {kind} artifact, or nothing, at {folder}",
            found=f"an artifact of kind {found!r}",
            mend="choose another --out",
        )


def require_utf8(path: Path) -> None:
    """Refuse a name that is no UTF-8, or that Python was told to take for something else.

    The libraries that read tokenizers and write safetensors are given names as UTF-8 and know no other.

    Raises:
        InputError: the name holds other bytes.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise InputError(
            expected="names of folders in UTF-8",
            found=ascii(str(path)),
            mend="rename the folder; where its name is UTF-8, set PYTHONUTF8=1 or a UTF-8 locale",
        ) from None


@contextlib.contextmanager
def claim_output(folder: Path, force: bool = False) -> Iterator[None]:
    """Create an output folder and keep a second process out of it while the body runs.

    Args:
        folder: where the artifact goes; created with its parents.
        force: remove what an earlier run left there. A removal that was stopped is finished, force or not.

    Raises:
        InputError: the folder's name is no UTF-8.
        ArtifactError: another process is writing there.
        StorageError: the folder cannot be made, locked or cleared.
    """
    require_utf8(folder)
    path = folder / LOCK
    with _lock(path) as lock:
        try:
            with write_guard("the output folder", folder):
                if force or _half_cleared(folder):
                    _clear(folder)
                for leftover in folder.glob(LEFTOVERS):
                    leftover.unlink()
            yield
        finally:
            if _is_at(lock, path):
                path.unlink()


def _lock(path: Path) -> TextIO:
    """Open and lock a file of which whoever holds the lock may remove the name.

    A process that opened the file before its name went, and got the lock after, holds nothing that others see: it has
    to open the file that has the name now.
    """
    while True:
        with contextlib.ExitStack() as stack:
            with write_guard("the output folder", path.parent):
                path.parent.mkdir(parents=True, exist_ok=True)
                lock = stack.enter_context(path.open("a+", encoding="utf-8"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not _is_at(lock, path):
                    continue
                lock.seek(0)
                raise ArtifactError(
                    expected=f"no other process writing to {path.parent}",
                    found=f"process {lock.read().strip() or 'unknown'} at work there",
                    mend="wait until it ends, or choose another --out",
                ) from None
            except OSError as error:
                raise StorageError(
                    expected=f"a filesystem with file locks at {path.parent}",
                    found=f"{error.strerror}",
                    mend="choose another place with --out",
                ) from error
            if not _is_at(lock, path):
                continue
            with contextlib.suppress(OSError):  # the number is for others' messages only; a full disk may not take it
                os.ftruncate(lock.fileno(), 0)
                os.write(lock.fileno(), str(os.getpid()).encode())
            stack.pop_all()
            return lock


def _is_at(handle: TextIO, path: Path) -> bool:
    """Whether an open file is the one that has this name."""
    try:
        return os.path.samestat(os.fstat(handle.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _half_cleared(folder: Path) -> bool:
    """Whether a removal was stopped there; with the manifest still in place it has not begun."""
    if is_finished(folder) or not (folder / PROGRESS).is_file():
        return False
    try:
        return bool(read_json(folder / PROGRESS, "a progress file") == CLEARING)
    except ArtifactError:
        return False  # the journal will say what is wrong with it


def _clear(folder: Path) -> None:
    """Remove all but the lock, in an order that a kill cannot spoil.

    A progress file saying so goes first and is removed last, so that what is left in between is still known as the
    remains of an artifact; the manifest goes before the files that it lists.
    """
    manifest, marker = folder / MANIFEST, folder / PROGRESS
    children = [child for child in folder.iterdir() if child not in (folder / LOCK, manifest, marker)]
    if not children and not manifest.exists() and not marker.exists():
        return
    write_json(marker, CLEARING)
    manifest.unlink(missing_ok=True)
    for child in children:
        if child.is_dir() and not child.is_symlink():
            shutil.rmtree(child)
        else:
            child.unlink(missing_ok=True)
    marker.unlink()


def check_free_space(folder: Path, needed_bytes: int, what: str) -> None:
    """Refuse work that the disk cannot hold.

    Raises:
        StorageError: fewer than `needed_bytes` are free where `folder` is, or will be.
    """
    place = folder
    while not place.exists():
        place = place.parent
    free_bytes = shutil.disk_usage(place).free
    if free_bytes < needed_bytes:
        raise StorageError(
            expected=f"{format_size(needed_bytes)} free in {folder} for {what}",
            found=format_size(free_bytes),
            mend="free some space, or choose another place with --out",
        )


def require_writable(what: str, path: Path) -> None:
    """Fail before long work where its file could not be written by rename; the folder is made, the file is not.

    Raises:
        StorageError: the folder cannot be made, or takes no files.
    """
    part = path.with_name(path.name + ".part")
    try:
        with write_guard(what, path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            part.open("a").close()
            part.unlink()
    except FileNotFoundError as error:  # as /proc answers
        raise StorageError(
            expected=f"to write {what} in {path.parent}",
            found=f"a folder that cannot be made ({error.strerror})",
            mend="choose another place",
        ) from error


@contextlib.contextmanager
def write_guard(what: str, folder: Path) -> Iterator[None]:
    """Turn the operating system's refusals to write into a `StorageError`."""
    try:
        yield
    except OSError as error:
        causes = {
            errno.ENOSPC: "a full disk",
            errno.EDQUOT: "a used-up quota",
            errno.EFBIG: "a file size limit",
            errno.EROFS: "a read-only filesystem",
            errno.EACCES: "no permission to write",
            errno.EPERM: "no permission to write",
            errno.ENOTDIR: "a file where a folder should be",
            errno.EEXIST: "a file where a folder should be",
        }
        if error.errno not in causes:
            raise
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        raise StorageError(
            expected=f"to write {what} in {folder}",
            found=f"{causes[error.errno]} ({error.strerror})",
            mend="free some space and repeat the command, or choose another place" if full else "choose another place",
        ) from error
