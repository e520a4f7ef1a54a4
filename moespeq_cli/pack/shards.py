"""Writing shards: valid safetensors files in which every record starts at a multiple of 4096 bytes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType

import torch

from runtime.artifacts.record import ALIGN_BYTES, align_up
from runtime.errors import ArtifactError

METADATA = {"format": "pt"}  # what the library's own writer puts there


def header(tensors: Iterable[tuple[str, str, Sequence[int], int]], header_bytes: int = 0) -> bytes:
    """A safetensors header, length prefix included, filled with spaces so that the data starts aligned.

    Args:
        tensors: (name, dtype, shape, size in bytes), in the order of their data, which follows without gaps.
        header_bytes: make it exactly this long, prefix included; 0 takes the next multiple of 4096.
    """
    entries: dict[str, object] = {"__metadata__": METADATA}
    end = 0
    for name, dtype, shape, size_bytes in tensors:
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size_bytes]}
        end += size_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    total_bytes = header_bytes or align_up(8 + len(text))
    assert 8 + len(text) <= total_bytes and total_bytes % ALIGN_BYTES == 0
    return (total_bytes - 8).to_bytes(8, "little") + text.ljust(total_bytes - 8)


class ShardWriter:
    """One shard, written record by record; its header, which needs every length, comes last.

    A stopped run goes on at the end of the last complete layer: `resume_at` cuts off what lies behind it.
    """

    def __init__(self, path: Path, names: Sequence[str], slot_bytes: int, resume_at: int | None) -> None:
        """Open the file.

        Args:
            path: the shard.
            names: of all its records, in order.
            slot_bytes: the longest a padded record can be; it bounds the header.
            resume_at: bytes of an earlier run to keep, None to start afresh.

        Raises:
            ArtifactError: the earlier run's bytes are gone.
        """
        size_bytes = path.stat().st_size if path.is_file() else 0
        if resume_at is not None and size_bytes < resume_at:
            raise ArtifactError(
                expected=f"{path} with the {resume_at} bytes that were written before the stop",
                found=f"{size_bytes} bytes",
                mend="start over with `moespeq pack --force`",
            )
        self.path = path
        self.header_bytes = len(header((name, "U8", [slot_bytes], slot_bytes) for name in names))
        self.end_bytes = resume_at or self.header_bytes
        self._file = path.open("r+b" if resume_at is not None else "w+b", buffering=0)
        self._file.truncate(self.end_bytes)

    def append(self, payload: torch.Tensor) -> int:
        """Write a record, padded with zeros to a multiple of 4096 bytes; returns the offset it starts at."""
        start = self.end_bytes
        write_all(self._file.fileno(), payload.numpy().data, start)
        self.end_bytes = start + align_up(payload.numel())
        self._file.truncate(self.end_bytes)
        return start

    def sync(self) -> None:
        """Wait until the disk has what was written."""
        os.fsync(self._file.fileno())

    def finish(self, records: Iterable[tuple[str, int]]) -> None:
        """Write the header for (name, padded_bytes) records and wait for the disk."""
        write_all(self._file.fileno(), header(((n, "U8", [b], b) for n, b in records), self.header_bytes), 0)
        self.sync()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def write_all(descriptor: int, data: bytes | bytearray | memoryview, offset: int) -> None:
    """Write every byte at an offset; the system may take a long buffer in parts."""
    view = memoryview(data)
    while len(view):
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count
