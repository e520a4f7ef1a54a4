"""Exact experts of a built model on a disk, for runs whose host memory holds a part of them."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from runtime.artifacts.folder import check_free_space, write_guard
from runtime.gpu.host_tier import Arena
from runtime.memory.location import PAGE_BYTES, ExpertKey, RecordLocation
from runtime.memory.store import RecordStore

_WRITERS = 8


@contextmanager
def records_on_disk(
    arena: Arena, keys: Sequence[ExpertKey], record_bytes: int, folder: Path, done: Callable[[], None] = lambda: None
) -> Iterator[RecordStore]:
    """All records of a built model in one file, which is there as long as the context.

    Nothing of it is left in the page cache, so that reads come from the disk.

    Args:
        arena: has the records.
        keys: of the experts, in the order in which they lie in the file.
        record_bytes: of each.
        folder: on the disk; made where it is missing.
        done: called after each record.

    Raises:
        StorageError: the disk has not that much room, or does not take the file.
    """
    padded_bytes = -(-record_bytes // PAGE_BYTES) * PAGE_BYTES
    with write_guard("the experts", folder):
        folder.mkdir(parents=True, exist_ok=True)
        check_free_space(folder, len(keys) * padded_bytes, "the experts")
        with tempfile.TemporaryDirectory(prefix="moespeq-", dir=folder) as made:
            path = Path(made) / "experts.bin"
            locations = _write(arena, keys, record_bytes, padded_bytes, path, done)
            with RecordStore(locations) as store:
                yield store


def _write(
    arena: Arena,
    keys: Sequence[ExpertKey],
    record_bytes: int,
    padded_bytes: int,
    path: Path,
    done: Callable[[], None],
) -> dict[ExpertKey, RecordLocation]:
    with path.open("wb") as file:
        fd = file.fileno()
        os.ftruncate(fd, len(keys) * padded_bytes)

        def write(number: int) -> RecordLocation:
            offset_bytes = number * padded_bytes
            array: Any = arena.record(keys[number])[:record_bytes].numpy()
            content = memoryview(array)
            written = 0
            while written < record_bytes:
                written += os.pwrite(fd, content[written:], offset_bytes + written)
            done()
            digest = hashlib.sha256(content).hexdigest()
            return RecordLocation(path, offset_bytes, record_bytes, padded_bytes, digest)

        with ThreadPoolExecutor(_WRITERS, thread_name_prefix="moespeq-write") as threads:
            try:
                places = list(threads.map(write, range(len(keys))))
            except BaseException:
                threads.shutdown(cancel_futures=True)
                raise
        os.fsync(fd)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return dict(zip(keys, places, strict=True))
