"""Exact experts of a built model on a disk, for runs whose host memory holds a part of them."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

from runtime.artifacts.folder import check_free_space, write_guard
from runtime.artifacts.record import align_up
from runtime.gpu.host_tier import Arena
from runtime.gpu.parts import Parts
from runtime.memory.location import ExpertKey, RecordLocation
from runtime.memory.store import RecordStore

_WRITERS = 8


@contextmanager
def records_on_disk(parts: Parts, folder: Path, done: Callable[[], None] = lambda: None) -> Iterator[RecordStore]:
    """All records of a built model in one file, which is there as long as the context.

    Nothing of it is left in the page cache, so that reads come from the disk.

    Args:
        parts: has the records in host memory.
        folder: on the disk; made where it is missing.
        done: called after each record.

    Raises:
        StorageError: the disk has not that much room, or does not take the file.
    """
    sizes = {key: align_up(parts.store.record_bytes(key)) for key in parts.model.spec.expert_keys()}
    with ExitStack() as stack:
        with write_guard("the experts", folder):
            folder.mkdir(parents=True, exist_ok=True)
            check_free_space(folder, sum(sizes.values()), "the experts")
            made = stack.enter_context(tempfile.TemporaryDirectory(prefix="moespeq-", dir=folder))
            locations = _write(parts, sizes, Path(made) / "experts.bin", done)
        yield stack.enter_context(RecordStore(locations))


def _write(
    parts: Parts, sizes: Mapping[ExpertKey, int], path: Path, done: Callable[[], None]
) -> dict[ExpertKey, RecordLocation]:
    arena, offsets = parts.tier, [0, *accumulate(sizes.values())]
    assert isinstance(arena, Arena)
    with path.open("wb") as file:
        fd = file.fileno()
        os.ftruncate(fd, offsets[-1])

        def write(key: ExpertKey, offset_bytes: int) -> RecordLocation:
            array: Any = arena.record(key)[: sizes[key]].numpy()
            content, written = memoryview(array), 0
            while written < len(content):
                written += os.pwrite(fd, content[written:], offset_bytes + written)
            done()
            return RecordLocation(path, offset_bytes, sizes[key], sizes[key], hashlib.sha256(content).hexdigest())

        with ThreadPoolExecutor(_WRITERS, thread_name_prefix="moespeq-write") as threads:
            try:
                places = list(threads.map(write, sizes, offsets))
            except BaseException:
                threads.shutdown(cancel_futures=True)
                raise
        os.fsync(fd)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return dict(zip(sizes, places, strict=True))
