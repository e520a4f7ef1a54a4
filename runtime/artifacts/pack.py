"""What `pack` promises to `run`: a manifest, an index of records, and the files they lie in; see docs/format.md."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from runtime.artifacts.encodings import ENCODINGS, RAW
from runtime.artifacts.heat import HEAT, Heat, load_heat
from runtime.artifacts.manifest import FileEntry, check_files, load_manifest
from runtime.artifacts.record import ALIGN_BYTES, DRAFT_LAYOUT, DraftFormat, DraftRecord, RecordLayout, target_layout
from runtime.artifacts.record_index import MEND, SIDES, IndexRules, RecordEntry, load_index
from runtime.artifacts.safetensors_file import TensorInfo, as_tensor, pread, read_header
from runtime.errors import ArtifactError, InputError
from runtime.memory.location import ExpertKey, RecordLocation, name_of
from runtime.model.families import MoeSpec

RECORDS = "records.json"
DENSE = "dense.safetensors"
MODEL_FOLDER = "model"


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


def shard_name(side: str, shard: int) -> str:
    return f"{side}-{shard:04d}.safetensors"


class Pack:
    """A finished pack: locations and layouts of its records, and its dense tensors.

    Attributes:
        heat: by key, the share of a profile's tokens that used the expert; None where the pack was made without one.
    """

    def __init__(self, folder: Path, manifest: PackManifest, records: dict[str, list[RecordEntry]]) -> None:
        self.folder = folder
        self.manifest = manifest
        self.records = {side: {entry.key: entry for entry in entries} for side, entries in records.items()}
        self._keys = manifest.spec.expert_keys()
        self._dense = read_pack_header(folder / DENSE)
        spec = manifest.spec
        self.heat: Heat | None = None
        if HEAT in manifest.files:
            self.heat = load_heat(folder / HEAT, spec.moe_layers, spec.num_experts)

    @classmethod
    def open(cls, folder: str | Path, verify: bool = False) -> Pack:
        """Open a pack and check its manifest, the size of every file, the index, and the model's small files whole.

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
        if not verify:
            small = {name: entry for name, entry in manifest.files.items() if not name.endswith(".safetensors")}
            check_files(place, small, PackManifest.KIND, contents=True)
        records = load_index(place / RECORDS)
        for side, entries in records.items():
            _index_rules(manifest, side).check(entries, place / RECORDS)
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

    @property
    def leans_on_draft(self) -> bool:
        """Whether a target record can only be decoded with its draft record."""
        return any(entry.encoding != RAW.name for entry in self.records["target"].values())

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
        return {key: self._location("target", key) for key in self._keys}

    def draft_locations(self) -> dict[ExpertKey, RecordLocation]:
        return {key: self._location("draft", key) for key in self._keys}

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
        self, key: ExpertKey, buffer: torch.Tensor, draft: DraftRecord | None = None, room: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """Exact weights from a record as it was read: `gate_up` [2I, H], `down` [H, I], biases where there are any.

        Args:
            key: whose record it is.
            buffer: uint8, at least the record's payload; a raw record is viewed, not copied.
            draft: the expert's draft record, for encodings that lean on it.
            room: uint8 [>= target_layout.payload_bytes] that they may be written to, valid until it is used again.

        Raises:
            ArtifactError: the record contradicts itself or its draft record.
        """
        entry = self.records["target"][key]
        try:
            return ENCODINGS[entry.encoding].decode(buffer, entry.payload_bytes, self.target_layout, draft, room)
        except ArtifactError as error:
            raise ArtifactError(
                expected=f"{error.expected}, as target of {name_of(key)}", found=error.found, mend=error.mend
            ) from error

    def check_dense(self) -> None:
        """Compare the dense tensors with their checksum.

        Raises:
            ArtifactError: `dense.safetensors` has changed.
        """
        check_files(self.folder, {DENSE: self.manifest.files[DENSE]}, PackManifest.KIND, contents=True)

    def dense_names(self) -> list[str]:
        """Tensors outside the routed experts, by their names in the source."""
        return list(self._dense)

    def dense_info(self, name: str) -> TensorInfo:
        """Where a dense tensor lies in `dense.safetensors`.

        Raises:
            ArtifactError: no such tensor.
        """
        if name not in self._dense:
            raise ArtifactError(
                expected=f"tensor {name} in {self.folder / DENSE}", found="none of that name", mend=MEND
            )
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
    spec, formats = manifest.spec, manifest.draft_formats
    layers = sorted(str(layer) for layer in spec.moe_layers)
    sizes = (spec.num_experts, spec.hidden_size, spec.moe_intermediate_size, len(spec.moe_layers))
    known = manifest.encoding if manifest.encoding in ENCODINGS else sorted(ENCODINGS)
    facts: list[tuple[str, object, object]] = [
        ("an encoding this version knows", known, manifest.encoding),
        ("draft_layout_name", DRAFT_LAYOUT, manifest.draft_layout_name),
        ("align_bytes", ALIGN_BYTES, manifest.align_bytes),
        ("spec.dtype among BF16, F16, F32", True, spec.dtype in ("BF16", "F16", "F32")),
        ("sizes in spec above 0", True, min(sizes) > 0),
        ("one to as many shards as files", True, 0 < manifest.num_shards <= len(manifest.files)),
        ("layers of draft_formats", layers, sorted(formats)),
        ("layers of draft_layouts", layers, sorted(manifest.draft_layouts)),
    ]
    _require(facts, folder)
    wanted = {shard_name(side, i) for side in SIDES for i in range(manifest.num_shards)}
    wanted |= {RECORDS, DENSE, f"{MODEL_FOLDER}/config.json"}
    facts = [("unlisted files", [], sorted(wanted - set(manifest.files)))]
    facts += [(f"draft_formats.{layer} fits the model", True, form.fits(spec)) for layer, form in formats.items()]
    _require(facts, folder)
    facts = [("target_layout", target_layout(spec), manifest.target_layout)]
    facts += [
        (f"draft_layouts.{layer}", form.layout(spec), manifest.draft_layouts[layer]) for layer, form in formats.items()
    ]
    _require(facts, folder)


def _require(facts: list[tuple[str, object, object]], folder: Path) -> None:
    for what, expected, found in facts:
        if expected != found:
            raise ArtifactError(expected=f"{what}: {expected} in the manifest of {folder}", found=str(found), mend=MEND)


def _index_rules(manifest: PackManifest, side: str) -> IndexRules:
    def payload_bytes(entry: RecordEntry) -> int | None:
        if side == "draft":
            return manifest.draft_layouts[str(entry.layer_id)].payload_bytes
        return manifest.target_layout.payload_bytes if entry.encoding == RAW.name else None

    shards = [shard_name(side, shard) for shard in range(manifest.num_shards)]
    return IndexRules(
        side=side,
        keys=manifest.spec.expert_keys(),
        slot_bytes=manifest.target_slot_bytes if side == "target" else manifest.draft_slot_bytes,
        encodings=frozenset((DRAFT_LAYOUT,) if side == "draft" else (RAW.name, manifest.encoding)),
        shard_bytes={shard: manifest.files[shard].size_bytes for shard in shards},
        payload_bytes=payload_bytes,
    )
