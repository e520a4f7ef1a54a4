"""Reading a whole pack again: every checksum, and every record against what it was made from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from moespeq_cli.pack.encode import read_draft, same_bits
from runtime.artifacts.checkpoint import Checkpoint
from runtime.artifacts.encodings import RAW
from runtime.artifacts.manifest import MANIFEST, is_finished, require_same_model, sha256_bytes, sha256_file
from runtime.artifacts.pack import Pack, read_pack_header
from runtime.artifacts.quantized import Quantized
from runtime.artifacts.record import DraftRecord, target_tensors
from runtime.artifacts.record_index import SIDES, record_name
from runtime.artifacts.safetensors_file import TensorInfo, pread
from runtime.errors import ArtifactError, MoespeqError
from runtime.memory.location import ExpertKey, name_of
from runtime.model.families import dense_names, read_expert


@dataclass(slots=True)
class Verification:
    """What was compared, and what was found wrong."""

    files: int = 0
    records: int = 0
    residual_decoded: int = 0
    bytes_read: int = 0
    records_equal_to_source: int = 0
    dense_equal_to_source: int = 0
    drafts_equal_to_quantized: int = 0
    problems: list[str] = field(default_factory=list)


def find_sources(
    pack: Pack, model: str, asked: bool, quantized: Path | None
) -> tuple[Checkpoint | None, Quantized | None]:
    """The model and the quantized artifact that a pack was made from, as far as they are at hand.

    Args:
        pack: the pack.
        model: where a model lies.
        asked: the user named that model, so that another one is an error, not a reason to do without.
        quantized: where a quantized artifact lies; one that this pack was not made from is left aside.

    Raises:
        InputError: the named model is not the pack's.
    """
    checkpoint = Checkpoint.open(model)
    if checkpoint.digest != pack.manifest.model_digest:
        if asked:
            require_same_model("pack", pack.folder, pack.manifest.model_digest, checkpoint.digest)
        return None, None
    if quantized is None or not is_finished(quantized):
        return checkpoint, None
    same = sha256_file(quantized / MANIFEST) == pack.manifest.quantized_sha256
    return checkpoint, Quantized.open(quantized) if same else None


def verify_pack(
    pack: Pack,
    checkpoint: Checkpoint | None = None,
    quantized: Quantized | None = None,
    advance: Callable[[], None] = lambda: None,
) -> Verification:
    """Compare a pack with its checksums, and with its sources where they are given.

    Args:
        pack: opened, so that its manifest, sizes and index are known to be sound.
        checkpoint: the model it was made from; every target record and dense tensor must equal it bit for bit.
        quantized: the artifact it was made from; every draft record must equal what it says.
        advance: called after each expert.

    Returns:
        The counts, and every fault in `problems`.
    """
    folder = pack.folder
    found = Verification()
    for name, entry in pack.manifest.files.items():
        digest = sha256_file(folder / name)
        found.files += 1
        found.bytes_read += entry.size_bytes
        if digest != entry.sha256:
            found.problems.append(f"{folder / name}: sha256 {digest}, the manifest says {entry.sha256}")
    headers: dict[str, dict[str, TensorInfo]] = {}
    for shard in sorted({entry.shard for side in SIDES for entry in pack.records[side].values()}):
        try:
            headers[shard] = read_pack_header(folder / shard)
        except ArtifactError as error:
            found.problems.append(str(error))
    keys = pack.spec.expert_keys()
    for key in keys:
        found.problems += _record_problems(pack, key, headers, checkpoint, quantized, found)
        advance()
    if checkpoint is not None:
        found.problems += _dense_problems(pack, checkpoint, found)
    return found


def _record_problems(
    pack: Pack,
    key: ExpertKey,
    headers: dict[str, dict[str, TensorInfo]],
    checkpoint: Checkpoint | None,
    quantized: Quantized | None,
    found: Verification,
) -> Iterator[str]:
    buffers: dict[str, torch.Tensor] = {}
    sound = True
    for side in SIDES:
        entry = pack.records[side][key]
        path = pack.folder / entry.shard
        where = f"{path}, {side} record of {name_of(key)}"
        info = headers.get(entry.shard, {}).get(record_name(key))
        place = (entry.offset_bytes, entry.offset_bytes + entry.padded_bytes)
        if entry.shard in headers and (info is None or (info.start, info.end) != place):
            at = f"bytes {info.start} to {info.end}" if info is not None else "nowhere"
            yield f"{where}: {at} by the shard's header, {place[0]} to {place[1]} by the index"
        data = pread(path, entry.offset_bytes, entry.padded_bytes)
        digest = sha256_bytes(memoryview(data)[: entry.payload_bytes])
        found.records += 1
        if digest != entry.sha256:
            sound = False
            yield f"{where}: sha256 {digest}, the index says {entry.sha256}"
        if any(memoryview(data)[entry.payload_bytes :]):
            yield f"{where}: padding that is not zero"
        buffers[side] = torch.frombuffer(data, dtype=torch.uint8)
    if not sound:
        return
    layout = pack.draft_layout(key[0])
    try:
        decoded = pack.decode_target(key, buffers["target"], DraftRecord(layout, buffers["draft"]))
        found.residual_decoded += pack.records["target"][key].encoding != RAW.name
    except MoespeqError as error:
        yield f"target record of {name_of(key)}: {error}"
        decoded = None
    if checkpoint is None:
        return
    weights = read_expert(checkpoint, pack.spec, *key)
    if decoded is not None:
        equal = same_bits(decoded, target_tensors(weights))
        found.records_equal_to_source += equal
        if not equal:
            yield f"target record of {name_of(key)}: not the weights in {checkpoint.folder}"
    if quantized is not None:
        draft = read_draft(quantized, key, weights, layout)
        equal = torch.equal(draft.data, buffers["draft"][: layout.payload_bytes])
        found.drafts_equal_to_quantized += equal
        if not equal:
            yield f"draft record of {name_of(key)}: not the codes in {quantized.folder}"


def _dense_problems(pack: Pack, checkpoint: Checkpoint, found: Verification) -> Iterator[str]:
    names, wanted = set(pack.dense_names()), set(dense_names(checkpoint, pack.spec))
    for name in sorted(names ^ wanted):
        yield f"dense tensor {name}: only in the {'pack' if name in names else 'model'}"
    for name in sorted(names & wanted):
        copy, source = pack.dense_info(name), checkpoint.info(name)
        equal = (copy.dtype, copy.shape) == (source.dtype, source.shape) and same_bits(
            {name: pack.read_dense(name)}, {name: checkpoint.read(name)}
        )
        found.dense_equal_to_source += equal
        if not equal:
            yield f"dense tensor {name}: not the one in {checkpoint.folder}"
