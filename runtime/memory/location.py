"""Where one expert's record lies on disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ExpertKey = tuple[int, int]
"""(layer_id, expert_id); layer_id counts dense layers too."""

PAGE_BYTES = 4096
"""Alignment of records in files and of slots in memory: what O_DIRECT asks for."""


@dataclass(frozen=True, slots=True)
class RecordLocation:
    """One contiguous record in a shard.

    Attributes:
        path: the shard file.
        offset_bytes: where the record starts in the file; a multiple of PAGE_BYTES in packs.
        payload_bytes: bytes that mean something; the file holds at least these.
        padded_bytes: payload rounded up to a multiple of PAGE_BYTES; what one read asks for.
        sha256: hex digest of the payload_bytes, without the padding.
    """

    path: Path
    offset_bytes: int
    payload_bytes: int
    padded_bytes: int
    sha256: str


def name_of(key: ExpertKey) -> str:
    """`layer 3, expert 17`, as messages spell a key."""
    return f"layer {key[0]}, expert {key[1]}"
