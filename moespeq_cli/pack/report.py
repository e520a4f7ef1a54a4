"""What a pack costs: bits a weight by layer and projection, bytes by file, time."""

from __future__ import annotations

from typing import Any

from moespeq_cli.pack.plan import PackPlan
from moespeq_cli.pack.striping import shared_reads, stripe
from runtime.artifacts.encodings import RAW
from runtime.artifacts.heat import hot_half
from runtime.artifacts.manifest import FileEntry
from runtime.artifacts.record import RecordLayout
from runtime.artifacts.record_index import RecordEntry


def make_report(
    plan: PackPlan, records: dict[str, list[RecordEntry]], files: dict[str, FileEntry], seconds: float
) -> dict[str, Any]:
    """The report as it is saved; nothing reads it but people, and its time differs between runs.

    `hot_experts` is the fewest experts that served half of all uses on the profile's texts.
    A record's bits a weight count its padding; a projection's count its tensors alone (codes, scales and zeros, or
    weights), and are given for target records where a layer has no encoded ones.
    """
    layers = {}
    for layer_id in plan.spec.moe_layers:
        target = [entry for entry in records["target"] if entry.layer_id == layer_id]
        draft = [entry for entry in records["draft"] if entry.layer_id == layer_id]
        raw_records = sum(entry.encoding == RAW.name for entry in target)
        target_bits: dict[str, Any] = {"record": _record_bits(plan, target), "raw_records": raw_records}
        if raw_records == len(target):
            target_bits |= _projection_bits(plan, plan.target_layout)
        draft_bits = {"record": _record_bits(plan, draft), **_projection_bits(plan, plan.draft_layouts[layer_id])}
        layers[str(layer_id)] = {"target": target_bits, "draft": draft_bits}
    return {
        "model_type": plan.spec.model_type,
        "dtype": plan.spec.dtype,
        "encoding": plan.encoding.name,
        "records": plan.spec.num_records,
        "target_bits_per_weight": _record_bits(plan, records["target"]),
        "draft_bits_per_weight": _record_bits(plan, records["draft"]),
        "raw_records": sum(entry.encoding == RAW.name for entry in records["target"]),
        "striping": _striping(plan),
        "hot_experts": None if plan.routing is None else len(hot_half(plan.routing.heat)),
        "layers": layers,
        "bytes_by_file": {name: entry.size_bytes for name, entry in sorted(files.items())},
        "total_bytes": sum(entry.size_bytes for entry in files.values()),
        "seconds": round(seconds, 3),
    }


def _striping(plan: PackPlan) -> dict[str, Any]:
    """Pairs of experts of one token that lie in one shard, as striped and as going round would have put them."""
    if plan.routing is None:
        return {"by": "round-robin"}
    layers, experts = len(plan.spec.moe_layers), plan.spec.num_experts
    mine = [[0] * experts for _ in range(layers)]
    for index, layer_id in enumerate(plan.spec.moe_layers):
        for placement in plan.placements[layer_id]:
            mine[index][placement.key[1]] = placement.shard
    round_robin = stripe(layers, experts, plan.num_shards, None)
    matrices = plan.routing.coactivation
    return {
        "by": "co-activation",
        "pairs_in_one_shard": sum(shared_reads(matrices[i], mine[i]) for i in range(layers)),
        "pairs_in_one_shard_round_robin": sum(shared_reads(matrices[i], round_robin[i]) for i in range(layers)),
        "pairs": sum(shared_reads(matrices[i], [0] * experts) for i in range(layers)),
    }


def _record_bits(plan: PackPlan, entries: list[RecordEntry]) -> float:
    size_bytes = sum(entry.padded_bytes for entry in entries)
    return round(8 * size_bytes / (plan.spec.expert_parameters * len(entries)), 4)


def _projection_bits(plan: PackPlan, layout: RecordLayout) -> dict[str, float]:
    weights = plan.spec.hidden_size * plan.spec.moe_intermediate_size
    bits = {}
    for name, count in (("gate_up", 2 * weights), ("down", weights)):
        fields = [field for field in layout.fields if field.name.split(".")[0] == name]
        bits[name] = round(8 * sum(field.size_bytes for field in fields) / count, 4)
    return bits
