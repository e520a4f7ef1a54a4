"""Records read from their shards, past the page cache where the filesystem allows it."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, Self

from runtime.errors import ArtifactError, StorageError
from runtime.memory.location import PAGE_BYTES, ExpertKey, RecordLocation, name_of

_O_DIRECT = getattr(os, "O_DIRECT", 0)
_NOT_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)  # what a filesystem without direct reads answers


class RecordFacts(Protocol):
    """Sizes and names of records."""

    @property
    def max_record_bytes(self) -> int:
        """Bytes that a slot must have for every record to fit."""
        ...

    def record_bytes(self, key: ExpertKey) -> int:
        """Bytes that one read of this record moves; ArtifactError for an unknown key."""
        ...

    def describe(self, key: ExpertKey) -> str:
        """File, layer and expert, for messages."""
        ...


class RecordReader(RecordFacts, Protocol):
    """What the cache needs of a store; tests put slow and failing ones in its place."""

    def read_into(self, key: ExpertKey, buffer: Any, landed: Callable[[], None] | None = None) -> int:
        """Fill the start of the buffer with the record and return the bytes read; callable from any thread.

        The buffer is what the pool's `buffer` gives. `landed` may be called when the device is done and work without
        it remains.
        """
        ...


class RecordStore:
    """Checked reads of expert records.

    Every file is opened and measured at once, so a missing or cut shard is named before any token. The first read of
    each record compares its sha256.

    Args:
        locations: where each expert's record lies.
        direct: read with O_DIRECT where the file allows it. A file that does not, and every file when this is False,
            is read through the page cache and dropped from it afterwards, so that the memory plan stays true.

    Raises:
        ArtifactError: a file is absent or shorter than its records need.
        StorageError: a file cannot be opened.
    """

    def __init__(self, locations: Mapping[ExpertKey, RecordLocation], direct: bool = True) -> None:
        self._locations = dict(locations)
        self._verified: set[ExpertKey] = set()
        self._shards: dict[Path, _Shard] = {}
        self._closed = False
        self.max_record_bytes = max((place.padded_bytes for place in self._locations.values()), default=0)
        ends: dict[Path, int] = {}
        for place in self._locations.values():
            ends[place.path] = max(ends.get(place.path, 0), place.offset_bytes + place.payload_bytes)
        try:
            for path, end_bytes in ends.items():
                self._shards[path] = _Shard(path, end_bytes, direct)
        except BaseException:
            self.close()
            raise

    @property
    def direct(self) -> bool:
        """Whether every shard is read past the page cache."""
        return all(shard.direct for shard in self._shards.values())

    def record_bytes(self, key: ExpertKey) -> int:
        """Bytes that one read of this record moves, padding included."""
        return self._location(key).padded_bytes

    def describe(self, key: ExpertKey) -> str:
        """File, layer and expert, for messages."""
        return f"{self._location(key).path} ({name_of(key)})"

    def read_into(self, key: ExpertKey, buffer: memoryview, landed: Callable[[], None] | None = None) -> int:
        """Read one record to the start of `buffer` and return the bytes read.

        Args:
            key: the expert.
            buffer: at least padded_bytes of writable bytes; an address that is a multiple of PAGE_BYTES keeps the
                read direct.
            landed: called between the read and the checksum, on a record's first read.

        Raises:
            ArtifactError: unknown key, a file that ends inside the payload, or a checksum that differs.
            StorageError: the device answered with an error.
        """
        place = self._location(key)
        if self._closed:
            raise StorageError(
                expected=f"an open store for {self.describe(key)}",
                found="one that is closed",
                mend="read before closing the store",
            )
        shard = self._shards[place.path]
        try:
            num_bytes = shard.read(buffer[: place.padded_bytes], place.offset_bytes)
        except OSError as error:
            raise StorageError(
                expected=f"{place.padded_bytes} bytes at {place.offset_bytes} of {self.describe(key)}",
                found=f"{error.strerror or error} (errno {error.errno})",
                mend="check the disk, or make the pack again on another one",
            ) from error
        if num_bytes < place.payload_bytes:
            raise _cut(self.describe(key), place.offset_bytes + place.payload_bytes, place.offset_bytes + num_bytes)
        if key not in self._verified:
            if landed is not None:
                landed()
            found = hashlib.sha256(buffer[: place.payload_bytes]).hexdigest()
            if found != place.sha256:
                raise ArtifactError(
                    expected=f"sha256 {place.sha256} in {self.describe(key)}",
                    found=found,
                    mend="the file is damaged: make the pack again with `moespeq pack --force`",
                )
            self._verified.add(key)
        return num_bytes

    def check_all(self, buffer: memoryview) -> None:
        """Read every record once and compare its checksum, in the order of the files.

        Args:
            buffer: as for `read_into`, of max_record_bytes.

        Raises:
            ArtifactError, StorageError: as `read_into` does, for the first record that is damaged.
        """
        for key in sorted(
            self._locations, key=lambda key: (self._location(key).path, self._location(key).offset_bytes)
        ):
            if key not in self._verified:
                self.read_into(key, buffer)

    def close(self) -> None:
        """Close the files; no read may be in progress."""
        self._closed = True
        for shard in self._shards.values():
            shard.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _location(self, key: ExpertKey) -> RecordLocation:
        try:
            return self._locations[key]
        except KeyError:
            raise ArtifactError(
                expected=f"a record for {name_of(key)}",
                found=f"none among {len(self._locations)} records",
                mend="make the pack again with `moespeq pack --force` for this model",
            ) from None


class _Shard:
    """One open file; turns to buffered reads for good when the filesystem refuses a direct one."""

    def __init__(self, path: Path, needed_bytes: int, direct: bool) -> None:
        self.path = path
        self.direct = bool(direct and _O_DIRECT)
        self._lock = threading.Lock()
        self._fds: list[int] = []
        self._fd = -1
        self._direct_fd = self._open(_O_DIRECT) if self.direct else -1
        if not self.direct:
            self._buffered_fd()
        size_bytes = os.fstat(self._fds[0]).st_size
        if size_bytes < needed_bytes:
            self.close()
            raise _cut(str(path), needed_bytes, size_bytes)

    def read(self, view: memoryview, offset_bytes: int) -> int:
        """Bytes read into `view` from the offset on; fewer than its length only at the end of the file."""
        if self.direct and offset_bytes % PAGE_BYTES == 0 and len(view) % PAGE_BYTES == 0:
            try:
                return _fill(self._direct_fd, view, offset_bytes)
            except OSError as error:
                if error.errno not in _NOT_DIRECT:
                    raise
                self.direct = False
        num_bytes = _fill(self._buffered_fd(), view, offset_bytes)
        if hasattr(os, "posix_fadvise"):  # it is in its slot now: a second copy in memory is not in the plan
            os.posix_fadvise(self._fd, offset_bytes, num_bytes, os.POSIX_FADV_DONTNEED)
        return num_bytes

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())

    def _buffered_fd(self) -> int:
        with self._lock:
            if self._fd < 0:
                self._fd = self._open(0)
            return self._fd

    def _open(self, extra_flags: int) -> int:
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | extra_flags)
        except FileNotFoundError as error:
            raise ArtifactError(
                expected=f"the shard {self.path}",
                found="no such file",
                mend="make the pack again with `moespeq pack --force`",
            ) from error
        except OSError as error:
            if extra_flags and error.errno in _NOT_DIRECT:
                self.direct = False
                return -1
            raise StorageError(
                expected=f"the readable shard {self.path}",
                found=error.strerror or str(error),
                mend="check the file's permissions and the disk",
            ) from error
        self._fds.append(fd)
        return fd


def _fill(fd: int, view: memoryview, offset_bytes: int) -> int:
    """Read until the view is full or the file ends."""
    num_bytes = 0
    while num_bytes < len(view):
        step = os.preadv(fd, [view[num_bytes:]], offset_bytes + num_bytes)
        num_bytes += step
        if step == 0 or offset_bytes + num_bytes >= os.fstat(fd).st_size:
            break  # at the end a direct read stops off a page boundary, and another would be refused
    return num_bytes


def _cut(what: str, needed_bytes: int, found_bytes: int) -> ArtifactError:
    return ArtifactError(
        expected=f"at least {needed_bytes} bytes in {what}",
        found=f"{found_bytes} bytes",
        mend="the file was cut or is still being written: make the pack again with `moespeq pack --force`",
    )
