"""What a pack costs: bits a weight by layer and projection, bytes by file, time."""

from __future__ import annotations

from typing import Any

from moespeq_cli.pack.plan import PackPlan
from moespeq_cli.pack.striping import shared_reads, stripe
from moespeq_cli.pack.tally import MATRICES, TargetTally
from runtime.artifacts.encodings import RAW
from runtime.artifacts.heat import hot_half
from runtime.artifacts.manifest import FileEntry
from runtime.artifacts.record import RecordLayout
from runtime.artifacts.record_index import RecordEntry
from runtime.memory.sizes import format_size


def make_report(
    plan: PackPlan,
    records: dict[str, list[RecordEntry]],
    files: dict[str, FileEntry],
    tallies: dict[int, TargetTally],
    seconds: float,
) -> dict[str, Any]:
    """The report as it is saved; nothing reads it but people, and its time differs between runs.

    `hot_experts` is the fewest experts that served half of all uses on the profile's texts.
    A record's bits a weight count its padding; a projection's count what is its own alone: codes, scales and zeros,
    weights, or the blocks of residual records. `raw_reasons` says why records of a residual pack are raw.
    """
    layers, all_layers = {}, TargetTally()
    for layer_id in plan.spec.moe_layers:
        target = [entry for entry in records["target"] if entry.layer_id == layer_id]
        draft = [entry for entry in records["draft"] if entry.layer_id == layer_id]
        all_layers.join(tallies[layer_id])
        target_facts = {"record": _record_bits(plan, target), **tallies[layer_id].bits(), **_tally(tallies[layer_id])}
        draft_bits = {"record": _record_bits(plan, draft), **_projection_bits(plan, plan.draft_layouts[layer_id])}
        layers[str(layer_id)] = {"target": target_facts, "draft": draft_bits}
    return {
        "model_type": plan.spec.model_type,
        "dtype": plan.spec.dtype,
        "encoding": plan.encoding.name,
        "records": plan.spec.num_records,
        "target_bits_per_weight": _record_bits(plan, records["target"]),
        "draft_bits_per_weight": _record_bits(plan, records["draft"]),
        **_tally(all_layers),
        "striping": _striping(plan),
        "hot_experts": None if plan.routing is None else len(hot_half(plan.routing.heat)),
        "layers": layers,
        "bytes_by_file": {name: entry.size_bytes for name, entry in sorted(files.items())},
        "total_bytes": sum(entry.size_bytes for entry in files.values()),
        "seconds": round(seconds, 3),
    }


def report_lines(report: dict[str, Any]) -> list[str]:
    """The report in words: what the records take, and what of them is not as asked for."""
    exceptions, raw = sum(report["exceptions"].values()), report["raw_records"]
    lines = [
        f"target {report['target_bits_per_weight']:.2f} bits a weight, draft {report['draft_bits_per_weight']:.2f}, "
        f"padding included; {format_size(report['total_bytes'])} in {report['seconds']:.1f} s"
    ]
    if report["encoding"] == RAW.name:
        return lines
    lines[0] += f"; {exceptions} exceptions"
    layers = report["layers"].items()
    for name in MATRICES:
        low = min(layers, key=lambda item: item[1]["target"][name])
        high = max(layers, key=lambda item: item[1]["target"][name])
        lines.append(
            f"{name} from {low[1]['target'][name]:.2f} (layer {low[0]}) to {high[1]['target'][name]:.2f} "
            f"(layer {high[0]}) bits a weight"
        )
    if raw:
        reasons = ", ".join(f"{count} for {reason}" for reason, count in sorted(report["raw_reasons"].items()))
        lines.append(f"{raw} of {report['records']} target records are raw: {reasons}")
    return lines


def _tally(tally: TargetTally) -> dict[str, Any]:
    return {
        "exceptions": dict(tally.exceptions),
        "zero_codes": dict(tally.zero_codes),
        "raw_records": tally.raw.total(),
        "raw_reasons": dict(tally.raw),
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
