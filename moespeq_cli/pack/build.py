"""Writing a pack, layer by layer, so that a stopped run resumes and ends in the same bytes."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable
from dataclasses import asdict, astuple
from typing import Any

import torch

from moespeq_cli.pack.dense import copy_model_files, write_dense
from moespeq_cli.pack.encode import encode_expert
from moespeq_cli.pack.plan import PackPlan
from moespeq_cli.pack.report import make_report
from moespeq_cli.pack.shards import ShardWriter
from moespeq_cli.pack.tally import TargetTally
from runtime.artifacts.folder import check_free_space, claim_output, refuse_strangers, write_guard
from runtime.artifacts.heat import HEAT, save_heat
from runtime.artifacts.manifest import (
    PROGRESS,
    FileEntry,
    Journal,
    check_files,
    is_finished,
    load_manifest,
    save_manifest,
    sha256_bytes,
    write_json,
)
from runtime.artifacts.pack import (
    DENSE,
    MODEL_FOLDER,
    RECORDS,
    PackManifest,
    shard_name,
)
from runtime.artifacts.record import ALIGN_BYTES, DRAFT_LAYOUT, align_up
from runtime.artifacts.record_index import MEND, SIDES, RecordEntry, record_name, save_index
from runtime.errors import ArtifactError
from runtime.memory.location import ExpertKey

REPORT = "report.json"
OWN_NAMES = re.compile(  # of what a pack's folder holds, finished or not
    r"\.lock|model|dense\.safetensors|(target|draft)-\d{4,}\.safetensors|(manifest|progress|records|report|heat)\.json(\.part)?"
)

_JOURNAL_VERSION = 2  # steps of layers hold a tally

Advance = Callable[[], None]


def find_finished(plan: PackPlan, any_profile: bool = False) -> PackManifest | None:
    """The manifest of an identical pack that is already there.

    Args:
        plan: what would be written.
        any_profile: take a pack that was striped by another profile, or by none, for the same.

    Raises:
        ArtifactError: a finished pack of other sources or settings, or a damaged one, is in the way.
    """
    if not is_finished(plan.folder):
        return None
    manifest = load_manifest(plan.folder, PackManifest)
    found = {
        "model": manifest.model_digest,
        "quantized": manifest.quantized_sha256,
        "profile": manifest.profile_sha256,
        "encoding": manifest.encoding,
        "shards": manifest.num_shards,
    }
    for name, value in plan.identity.items():
        if found[name] != value and not (any_profile and name == "profile"):
            raise ArtifactError(
                expected=f"no finished pack in {plan.folder}, or one with {name} = {value!r:.80}",
                found=f"one with {name} = {found[name]!r:.80}",
                mend="pass --force to replace it, or another --out",
            )
    try:
        check_files(plan.folder, manifest.files, PackManifest.KIND)
    except ArtifactError as error:
        raise ArtifactError(expected=error.expected, found=error.found, mend=MEND) from error
    return manifest


def build_pack(plan: PackPlan, force: bool = False, advance: Advance = lambda: None) -> PackManifest:
    """Write the pack, or the rest of one that was stopped.

    Args:
        plan: what to write and where.
        force: throw away what the folder holds.
        advance: called after each expert, those of an earlier run included.

    Raises:
        ArtifactError: begun with other settings, or the folder is in use or changed since.
        InputError: the folder holds something else.
        StorageError: the disk is full or read-only.
    """
    folder = plan.folder
    refuse_strangers(folder, OWN_NAMES, "pack")
    with claim_output(folder, force), write_guard("the pack", folder):
        finished = find_finished(plan)
        if finished is not None:
            (folder / PROGRESS).unlink(missing_ok=True)  # a kill came between manifest and its removal
            return finished
        written = sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
        check_free_space(folder, plan.total_bytes - written, "the pack")
        journal = Journal(folder, plan.identity | {"journal": _JOURNAL_VERSION})
        files = {
            f"{MODEL_FOLDER}/{name}": entry
            for name, entry in copy_model_files(plan.checkpoint.folder, plan.model_files, folder / MODEL_FOLDER).items()
        }
        files[DENSE] = _dense(plan, journal)
        records = _layers(plan, journal, advance)
        for side in SIDES:
            for shard in range(plan.num_shards):
                files[shard_name(side, shard)] = _finish_shard(plan, journal, side, shard, records[side])
        save_index(folder / RECORDS, records)
        files[RECORDS] = FileEntry.of(folder / RECORDS)
        if plan.routing is not None:
            save_heat(folder / HEAT, plan.routing.heat, plan.spec.moe_layers, plan.spec.num_experts)
            files[HEAT] = FileEntry.of(folder / HEAT)
        seconds = sum(float(step["seconds"]) for step in journal.done.values())
        tallies = {
            layer: TargetTally.from_json(journal.done[f"layer {layer}"]["tally"]) for layer in plan.spec.moe_layers
        }
        write_json(folder / REPORT, make_report(plan, records, files, tallies, seconds))
        check_files(folder, files, PackManifest.KIND)  # nothing was cut short or taken away behind our back
        manifest = _manifest(plan, records, files)
        save_manifest(folder, manifest)
        journal.finish()
        return manifest


def _dense(plan: PackPlan, journal: Journal) -> FileEntry:
    if "dense" not in journal.done:
        start = time.perf_counter()
        entry = write_dense(plan.checkpoint, plan.dense, plan.folder / DENSE)
        journal.mark("dense", {**asdict(entry), "seconds": time.perf_counter() - start})
    step = journal.done["dense"]
    return FileEntry(int(step["size_bytes"]), str(step["sha256"]))


def _layers(plan: PackPlan, journal: Journal, advance: Advance) -> dict[str, list[RecordEntry]]:
    """Write every layer that the journal does not have yet; returns all entries, each shard's in order."""
    records: dict[str, list[RecordEntry]] = {side: [] for side in SIDES}
    ends: dict[str, int] = {}
    left = []
    for layer_id in plan.spec.moe_layers:
        step = journal.done.get(f"layer {layer_id}")
        if step is None:
            left.append(layer_id)
            continue
        for side in SIDES:
            records[side] += [RecordEntry(*values) for values in json.loads(step[side])]
        for _ in plan.placements[layer_id]:
            advance()
        ends = {str(name): int(end) for name, end in step["ends"].items()}
    if not left:
        return records
    with contextlib.ExitStack() as stack:
        writers = _open_shards(plan, ends, stack)
        layouts = plan.draft_layouts
        for layer_id in left:
            start = time.perf_counter()
            step = {side: [] for side in SIDES}
            tally = TargetTally()
            for placement in plan.placements[layer_id]:
                expert = encode_expert(plan, placement.key, layouts[layer_id])
                tally.add(expert, plan.target_layout)
                for side, (encoding, payload) in expert.payloads.items():
                    writer = writers[shard_name(side, placement.shard)]
                    step[side].append(_write(writer, placement.key, encoding, payload))
                advance()
            for writer in writers.values():
                writer.sync()
            for side in SIDES:
                records[side] += step[side]
            # as text: the journal is written whole after every layer, and thousands of objects would make that slow
            marked: dict[str, Any] = {side: json.dumps([astuple(entry) for entry in step[side]]) for side in SIDES}
            marked["tally"] = tally.as_json()
            marked["ends"] = {name: writer.end_bytes for name, writer in writers.items()}
            marked["seconds"] = time.perf_counter() - start
            journal.mark(f"layer {layer_id}", marked)
    return records


def _open_shards(plan: PackPlan, ends: dict[str, int], stack: contextlib.ExitStack) -> dict[str, ShardWriter]:
    names: list[list[str]] = [[] for _ in range(plan.num_shards)]
    for placements in plan.placements.values():
        for placement in placements:
            names[placement.shard].append(record_name(placement.key))
    writers = {}
    for side in SIDES:
        for shard in range(plan.num_shards):
            path = plan.folder / shard_name(side, shard)
            writer = ShardWriter(path, names[shard], plan.slot_bytes(side), ends.get(path.name))
            writers[path.name] = stack.enter_context(writer)
    return writers


def _write(writer: ShardWriter, key: ExpertKey, encoding: str, payload: torch.Tensor) -> RecordEntry:
    return RecordEntry(
        layer_id=key[0],
        expert_id=key[1],
        shard=writer.path.name,
        offset_bytes=writer.append(payload),
        payload_bytes=payload.numel(),
        padded_bytes=align_up(payload.numel()),
        encoding=encoding,
        sha256=sha256_bytes(payload.numpy().data),
    )


def _finish_shard(plan: PackPlan, journal: Journal, side: str, shard: int, records: list[RecordEntry]) -> FileEntry:
    """Give a shard its header, now that all lengths are known, and hash it."""
    path = plan.folder / shard_name(side, shard)
    if path.name not in journal.done:
        start = time.perf_counter()
        entries = [entry for entry in records if entry.shard == path.name]
        end = entries[-1].offset_bytes + entries[-1].padded_bytes
        with ShardWriter(path, [record_name(entry.key) for entry in entries], plan.slot_bytes(side), end) as writer:
            writer.finish([(record_name(entry.key), entry.padded_bytes) for entry in entries])
        journal.mark(path.name, {**asdict(FileEntry.of(path)), "seconds": time.perf_counter() - start})
    step = journal.done[path.name]
    return FileEntry(int(step["size_bytes"]), str(step["sha256"]))


def _manifest(plan: PackPlan, records: dict[str, list[RecordEntry]], files: dict[str, FileEntry]) -> PackManifest:
    return PackManifest(
        model_digest=plan.checkpoint.digest,
        model_type=plan.spec.model_type,
        spec=plan.spec,
        encoding=plan.encoding.name,
        draft_layout_name=DRAFT_LAYOUT,
        num_shards=plan.num_shards,
        align_bytes=ALIGN_BYTES,
        target_slot_bytes=max(entry.padded_bytes for entry in records["target"]),
        draft_slot_bytes=max(entry.padded_bytes for entry in records["draft"]),
        target_layout=plan.target_layout,
        draft_formats={str(layer): form for layer, form in plan.draft_formats.items()},
        draft_layouts={str(layer): layout for layer, layout in plan.draft_layouts.items()},
        quantized_sha256=plan.quantized_sha256,
        profile_sha256=plan.profile_sha256,
        files=files,
    )
