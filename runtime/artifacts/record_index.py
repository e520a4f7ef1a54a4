"""The index of a pack: where every record lies; written one record a line, checked before it is trusted."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from runtime.artifacts.manifest import read_json
from runtime.artifacts.record import ALIGN_BYTES, align_up
from runtime.errors import ArtifactError
from runtime.memory.location import ExpertKey, name_of

SIDES = ("target", "draft")
MEND = "make the pack again with `moespeq pack --force`"


@dataclass(frozen=True, slots=True)
class RecordEntry:
    """Where one record lies and what its payload must hash to."""

    layer_id: int
    expert_id: int
    shard: str
    offset_bytes: int  # from the start of the file
    payload_bytes: int
    padded_bytes: int
    encoding: str
    sha256: str  # of the payload

    @property
    def key(self) -> ExpertKey:
        return self.layer_id, self.expert_id


def record_name(key: ExpertKey) -> str:
    """The name of a record's tensor in its shard."""
    return f"layers.{key[0]}.experts.{key[1]}"


def save_index(path: Path, records: dict[str, list[RecordEntry]]) -> None:
    """Write the index, one record a line, sides and records in their given order."""
    sides = [
        f'"{side}": [\n' + ",\n".join(json.dumps(asdict(entry), sort_keys=True) for entry in entries) + "\n]"
        for side, entries in records.items()
    ]
    with path.open("w", encoding="utf-8") as handle:
        handle.write("{" + ",\n".join(sides) + "}\n")
        handle.flush()
        os.fsync(handle.fileno())


def load_index(path: Path) -> dict[str, list[RecordEntry]]:
    """Read the index.

    Raises:
        ArtifactError: not JSON, or an entry with a field that is missing, unknown or mistyped.
    """
    body = read_json(path, "the index of records")
    if not isinstance(body, dict) or set(body) != set(SIDES) or not all(isinstance(v, list) for v in body.values()):
        raise ArtifactError(expected=f"lists {' and '.join(SIDES)} in {path}", found="something else", mend=MEND)
    return {side: [_entry(item, f"{path}, {side} record {i}") for i, item in enumerate(body[side])] for side in SIDES}


_ENTRY_TYPES = {field.name: int if field.type == "int" else str for field in fields(RecordEntry)}


def _entry(item: Any, where: str) -> RecordEntry:
    if not isinstance(item, dict) or set(item) != set(_ENTRY_TYPES):
        found = sorted(item) if isinstance(item, dict) else type(item).__name__
        raise ArtifactError(expected=f"fields {sorted(_ENTRY_TYPES)} in {where}", found=str(found), mend=MEND)
    for name, kind in _ENTRY_TYPES.items():
        if type(item[name]) is not kind:
            raise ArtifactError(expected=f"{name} as {kind.__name__} in {where}", found=repr(item[name]), mend=MEND)
    return RecordEntry(**item)


@dataclass(frozen=True, slots=True)
class IndexRules:
    """What the records of one side must obey, as the manifest says."""

    side: str
    keys: Sequence[ExpertKey]
    slot_bytes: int
    encodings: frozenset[str]
    shard_bytes: dict[str, int]  # sizes of the side's files
    payload_bytes: Callable[[RecordEntry], int | None]  # where it is fixed

    def check(self, entries: Sequence[RecordEntry], path: Path) -> None:
        """All experts once, each record aligned, inside its shard, clear of its neighbours, no longer than a slot.

        Raises:
            ArtifactError: naming the first record that breaks a rule, what was expected and what it says.
        """
        self._check_keys(entries, path)
        for entry in entries:
            self._check_entry(entry, path)
        for before, after in pairwise(sorted(entries, key=lambda entry: (entry.shard, entry.offset_bytes))):
            free = before.offset_bytes + before.padded_bytes
            if before.shard == after.shard and after.offset_bytes < free:
                raise self._refusal(after, path, f"an offset of at least {free}", after.offset_bytes)

    def _check_keys(self, entries: Sequence[RecordEntry], path: Path) -> None:
        times = Counter(entry.key for entry in entries)
        faults = {
            "missing": [key for key in self.keys if key not in times],
            "of no layer of this model": sorted(set(times) - set(self.keys)),
            "there twice": [key for key, count in times.items() if count > 1],
        }
        for what, keys in faults.items():
            if keys:
                raise ArtifactError(
                    expected=f"one {self.side} record for each of {len(self.keys)} experts in {path}",
                    found=f"{name_of(keys[0])} {what}",
                    mend=MEND,
                )

    def _check_entry(self, entry: RecordEntry, path: Path) -> None:
        payload_bytes = self.payload_bytes(entry)
        if payload_bytes is None:
            payload_bytes = max(entry.payload_bytes, 1)
        file_bytes = self.shard_bytes.get(entry.shard, 0)
        end_bytes = entry.offset_bytes + entry.padded_bytes
        rules: list[tuple[bool, str, object]] = [
            (entry.shard in self.shard_bytes, f"a {self.side} shard of this pack", entry.shard),
            (entry.encoding in self.encodings, f"encoding {' or '.join(sorted(self.encodings))}", entry.encoding),
            (entry.payload_bytes == payload_bytes, f"payload_bytes {payload_bytes}", entry.payload_bytes),
            (
                entry.padded_bytes == align_up(payload_bytes),
                f"padded_bytes {align_up(payload_bytes)}",
                entry.padded_bytes,
            ),
            (entry.padded_bytes <= self.slot_bytes, f"at most {self.slot_bytes} bytes", entry.padded_bytes),
            (
                entry.offset_bytes >= ALIGN_BYTES and entry.offset_bytes % ALIGN_BYTES == 0,
                f"an offset behind the header, a multiple of {ALIGN_BYTES}",
                entry.offset_bytes,
            ),
            (end_bytes <= file_bytes, f"its end within the {file_bytes} bytes of {entry.shard}", end_bytes),
            (re.fullmatch("[0-9a-f]{64}", entry.sha256) is not None, "a sha256", entry.sha256),
        ]
        for holds, expected, found in rules:
            if not holds:
                raise self._refusal(entry, path, expected, found)

    def _refusal(self, entry: RecordEntry, path: Path, expected: str, found: object) -> ArtifactError:
        where = f"the {self.side} record of {name_of(entry.key)} in {path}"
        return ArtifactError(expected=f"{expected} for {where}", found=repr(found), mend=MEND)
