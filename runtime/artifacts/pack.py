"""What `pack` promises to `run`: a manifest, an index of records, and the files they lie in; see docs/format.md."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import torch

from runtime.artifacts.manifest import FileEntry, check_files, load_manifest, read_json
from runtime.artifacts.record import (
    ALIGN_BYTES,
    DRAFT_LAYOUT,
    ENCODINGS,
    RAW,
    DraftFormat,
    DraftRecord,
    RecordLayout,
    align_up,
    target_layout,
)
from runtime.artifacts.safetensors_file import TensorInfo, as_tensor, pread, read_header
from runtime.errors import ArtifactError, InputError
from runtime.memory.location import RecordLocation
from runtime.model.families import MoeSpec

ExpertKey = tuple[int, int]  # (layer_id, expert_id)

RECORDS = "records.json"
DENSE = "dense.safetensors"
MODEL_FOLDER = "model"
SIDES = ("target", "draft")
MEND = "make the pack again with `moespeq pack --force`"


@dataclass(frozen=True, slots=True)
class PackManifest:
    """Facts about a pack; the records themselves are listed in `records.json`."""

    KIND: ClassVar[str] = "pack"

    model_digest: str
    model_type: str
    spec: MoeSpec
    encoding: str  # of target records; a record may fall back to raw, its entry says
    draft_layout_name: str
    num_shards: int
    align_bytes: int
    target_slot_bytes: int  # the longest target record, padding included
    draft_slot_bytes: int
    target_layout: RecordLayout  # of a raw record, and of what every encoding decodes to
    draft_formats: dict[str, DraftFormat]  # by layer_id
    draft_layouts: dict[str, RecordLayout]
    quantized_sha256: str  # of the manifest of the quantized artifact that it was made from
    profile_sha256: str | None
    files: dict[str, FileEntry]


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


def shard_name(side: str, shard: int) -> str:
    return f"{side}-{shard:04d}.safetensors"


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


class Pack:
    """A finished pack: locations and layouts of its records, and its dense tensors."""

    def __init__(self, folder: Path, manifest: PackManifest, records: dict[str, list[RecordEntry]]) -> None:
        self.folder = folder
        self.manifest = manifest
        self.records = {side: {entry.key: entry for entry in entries} for side, entries in records.items()}
        self._dense = read_pack_header(folder / DENSE)

    @classmethod
    def open(cls, folder: str | Path, verify: bool = False) -> Pack:
        """Open a pack and check its manifest, the size of every file and the index.

        Args:
            folder: what `moespeq pack` printed.
            verify: also read every file and compare its checksum.

        Raises:
            ArtifactError: unfinished, of another version, cut short, or contradicting itself.
        """
        place = Path(folder)
        manifest = load_manifest(place, PackManifest)
        _check_manifest(manifest, place)
        check_files(place, manifest.files, PackManifest.KIND, contents=verify)
        records = load_index(place / RECORDS)
        for side, entries in records.items():
            _check_entries(manifest, side, entries, place)
        return cls(place, manifest, records)

    @property
    def spec(self) -> MoeSpec:
        return self.manifest.spec

    @property
    def config_folder(self) -> Path:
        """Holds config.json, the tokenizer and the generation config."""
        return self.folder / MODEL_FOLDER

    @property
    def target_layout(self) -> RecordLayout:
        """Of a raw target record, and of what every encoding decodes to."""
        return self.manifest.target_layout

    @property
    def target_slot_bytes(self) -> int:
        """What a slot needs to hold any target record as it is read."""
        return self.manifest.target_slot_bytes

    @property
    def draft_slot_bytes(self) -> int:
        return self.manifest.draft_slot_bytes

    def draft_layout(self, layer_id: int) -> RecordLayout:
        return self.manifest.draft_layouts[str(layer_id)]

    def draft_format(self, layer_id: int) -> DraftFormat:
        """Bits and group sizes of a layer's draft records."""
        return self.manifest.draft_formats[str(layer_id)]

    def target_location(self, key: ExpertKey) -> RecordLocation:
        return self._location("target", key)

    def draft_location(self, key: ExpertKey) -> RecordLocation:
        return self._location("draft", key)

    def target_locations(self) -> dict[ExpertKey, RecordLocation]:
        """Every target record, for a record store."""
        return {key: self._location("target", key) for key in self.spec.keys()}

    def draft_locations(self) -> dict[ExpertKey, RecordLocation]:
        return {key: self._location("draft", key) for key in self.spec.keys()}

    def _location(self, side: str, key: ExpertKey) -> RecordLocation:
        entry = self.records[side][key]
        return RecordLocation(
            path=self.folder / entry.shard,
            offset_bytes=entry.offset_bytes,
            payload_bytes=entry.payload_bytes,
            padded_bytes=entry.padded_bytes,
            sha256=entry.sha256,
        )

    def decode_target(
        self, key: ExpertKey, buffer: torch.Tensor, draft: DraftRecord | None = None
    ) -> dict[str, torch.Tensor]:
        """Exact weights from a record as it was read: `gate_up` [2I, H], `down` [H, I], biases where there are any.

        Args:
            key: whose record it is.
            buffer: uint8, at least the record's payload; a raw record is viewed, not copied.
            draft: the expert's draft record, for encodings that lean on it.
        """
        entry = self.records["target"][key]
        return ENCODINGS[entry.encoding].decode(buffer, entry.payload_bytes, self.target_layout, draft)

    def dense_names(self) -> list[str]:
        """Tensors outside the routed experts, by their names in the source."""
        return list(self._dense)

    def dense_info(self, name: str) -> TensorInfo:
        """Where a dense tensor lies in `dense.safetensors`.

        Raises:
            ArtifactError: no such tensor.
        """
        if name not in self._dense:
            raise ArtifactError(expected=f"tensor {name} in {self.folder / DENSE}", found="none of that name", mend=MEND)
        return self._dense[name]

    def read_dense(self, name: str) -> torch.Tensor:
        """A dense tensor in its stored type, in memory of its own."""
        info = self.dense_info(name)
        return as_tensor(pread(self.folder / DENSE, info.start, info.end - info.start), info.dtype, info.shape)


def read_pack_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one of a pack's safetensors files.

    Raises:
        ArtifactError: not a whole safetensors file.
    """
    try:
        return read_header(path, MEND)
    except InputError as error:
        raise ArtifactError(expected=error.expected, found=error.found, mend=error.mend) from None


def _check_manifest(manifest: PackManifest, folder: Path) -> None:
    layers = {str(layer) for layer in manifest.spec.moe_layers}
    shards = {shard_name(side, i) for side in SIDES for i in range(manifest.num_shards)}
    formats, spec = manifest.draft_formats, manifest.spec
    expectations: list[tuple[str, object, object]] = [
        ("target encoding (known to this version)", manifest.encoding in ENCODINGS, True),
        ("draft_layout_name", manifest.draft_layout_name, DRAFT_LAYOUT),
        ("align_bytes", manifest.align_bytes, ALIGN_BYTES),
        ("files not listed", sorted((shards | {RECORDS, DENSE, f"{MODEL_FOLDER}/config.json"}) - set(manifest.files)), []),
        ("layers with a draft format", set(formats), layers),
        ("layers with a draft layout", set(manifest.draft_layouts), layers),
        ("target_layout", manifest.target_layout, target_layout(spec)),
    ]
    expectations += [
        (f"draft_layouts[{layer}]", manifest.draft_layouts.get(layer), formats[layer].layout(spec))
        for layer in sorted(layers & set(formats))
    ]
    for what, found, expected in expectations:
        if found != expected:
            raise ArtifactError(
                expected=f"{what} {expected} in the manifest of {folder}", found=f"{found} ({manifest.encoding})", mend=MEND
            )


def _check_entries(manifest: PackManifest, side: str, entries: list[RecordEntry], folder: Path) -> None:
    """All experts once, each record aligned, inside its shard, clear of its neighbours, and no longer than a slot."""

    def refuse(entry: RecordEntry, expected: str, found: object) -> ArtifactError:
        where = f"{side} record of layer {entry.layer_id}, expert {entry.expert_id} in {folder / RECORDS}"
        return ArtifactError(expected=f"{expected} for the {where}", found=str(found), mend=MEND)

    wanted = set(manifest.spec.keys())
    keys = [entry.key for entry in entries]
    if len(keys) != len(wanted) or set(keys) != wanted:
        odd = sorted(wanted - set(keys)) or sorted(set(keys) - wanted) or sorted({k for k in keys if keys.count(k) > 1})
        raise ArtifactError(
            expected=f"one {side} record for each of {len(wanted)} experts in {folder / RECORDS}",
            found=f"{len(keys)}; layer {odd[0][0]}, expert {odd[0][1]} is missing, unknown or there twice",
            mend=MEND,
        )
    slot_bytes = manifest.target_slot_bytes if side == "target" else manifest.draft_slot_bytes
    for entry in entries:
        exact = _exact_payload(manifest, side, entry)
        if not re.fullmatch(rf"{side}-\d{{4}}\.safetensors", entry.shard) or entry.shard not in manifest.files:
            raise refuse(entry, "a shard of this pack", repr(entry.shard))
        if entry.payload_bytes < 1 or entry.padded_bytes != align_up(entry.payload_bytes):
            raise refuse(entry, f"padded_bytes {align_up(max(entry.payload_bytes, 1))}", entry.padded_bytes)
        if entry.padded_bytes > slot_bytes:
            raise refuse(entry, f"at most {slot_bytes} bytes", entry.padded_bytes)
        if entry.offset_bytes < ALIGN_BYTES or entry.offset_bytes % ALIGN_BYTES:
            raise refuse(entry, f"an offset in multiples of {ALIGN_BYTES}, past the header", entry.offset_bytes)
        if not re.fullmatch("[0-9a-f]{64}", entry.sha256):
            raise refuse(entry, "a sha256", repr(entry.sha256))
        if entry.encoding not in ([DRAFT_LAYOUT] if side == "draft" else {RAW.name, manifest.encoding}):
            raise refuse(entry, "an encoding that the manifest names", repr(entry.encoding))
        if exact is not None and entry.payload_bytes != exact:
            raise refuse(entry, f"payload_bytes {exact}", entry.payload_bytes)
    for before, after in _neighbours(entries):
        if before.shard == after.shard and after.offset_bytes < before.offset_bytes + before.padded_bytes:
            raise refuse(after, f"an offset of at least {before.offset_bytes + before.padded_bytes}", after.offset_bytes)
    for entry in entries:
        end_bytes, file_bytes = entry.offset_bytes + entry.padded_bytes, manifest.files[entry.shard].size_bytes
        if end_bytes > file_bytes:
            raise refuse(entry, f"its end within the {file_bytes} bytes of {entry.shard}", end_bytes)


def _exact_payload(manifest: PackManifest, side: str, entry: RecordEntry) -> int | None:
    if side == "draft":
        return manifest.draft_layouts[str(entry.layer_id)].payload_bytes
    return manifest.target_layout.payload_bytes if entry.encoding == RAW.name else None


def _neighbours(entries: Iterable[RecordEntry]) -> Iterator[tuple[RecordEntry, RecordEntry]]:
    ordered = sorted(entries, key=lambda entry: (entry.shard, entry.offset_bytes))
    return zip(ordered[:-1], ordered[1:], strict=True)
