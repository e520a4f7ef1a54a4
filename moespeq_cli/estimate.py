"""What a stage would take of memory, disk and time: arithmetic over the plan and two short measurements, no work.

docs/benchmarks compares the estimates with real models: memory is an upper bound, times hold within a factor of two.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from runtime.artifacts.checkpoint import Checkpoint
from runtime.memory.sizes import format_size
from runtime.model.families import MoeSpec, dense_names

PROCESS_BYTES = 500_000_000  # Python with torch and transformers
SLACK = 1.25  # what the allocator keeps, and temporaries of single operations, measured on a layer of Qwen1.5-MoE
RESIDUAL_WEIGHTS_PER_S = 4.5e6  # encoded by a core, docs/benchmarks
WRITTEN_BYTES_PER_S = 250e6  # by a disk, beside reading; 35 GB took 318 s of which 160 were hashing
PROBE_S = 0.3


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a stage would take; bytes read and written are the program's own, page cache or not."""

    peak_memory_bytes: int
    disk_bytes: int
    read_bytes: int
    seconds: float

    def lines(self) -> list[str]:
        """For a person."""
        return [
            f"  memory       {format_size(self.peak_memory_bytes)} at most, estimated",
            f"  disk         {format_size(self.disk_bytes)}, and {format_size(self.read_bytes)} to read",
            f"  time         about {_duration(self.seconds)} on this machine as it is now, estimated",
        ]

    def as_json(self, out: Path) -> dict[str, Any]:
        """For a program."""
        return {"dry_run": True, "path": str(out), **asdict(self)}


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """Sizes of the largest decoder layer and of the embedding."""

    expert_bytes: int  # as stored
    expert_weights: int  # of all experts
    dense_weights: int  # outside them
    embedding_weights: int
    stored_bytes: int  # of the whole model

    @classmethod
    def of(cls, checkpoint: Checkpoint, spec: MoeSpec) -> LayerSizes:
        """Add up what the checkpoint holds."""
        item_bytes = 4 if spec.dtype == "F32" else 2
        by_layer: dict[str, int] = {}
        embedding = 0
        for name in dense_names(checkpoint, spec):
            weights = 1
            for size in checkpoint.tensors[name].shape:
                weights *= size
            if name.startswith("model.layers."):
                layer = name.split(".")[2]
                by_layer[layer] = by_layer.get(layer, 0) + weights
            else:
                embedding = max(embedding, weights)
        weights = spec.num_experts * spec.expert_parameters
        whole = sum(info.end - info.start for info in checkpoint.tensors.values())
        return cls(weights * item_bytes, weights, max(by_layer.values(), default=0), embedding, whole)


def estimate_quantize(
    checkpoint: Checkpoint, spec: MoeSpec, tokens: int, disk_bytes: int, result_bytes: int, solves: bool
) -> Estimate:
    """GPTQ, or with `solves` false rounding, of every layer, calibrated with so many tokens.

    Args:
        checkpoint: the model.
        spec: what it is.
        tokens: of calibration.
        disk_bytes: at the worst time.
        result_bytes: of what is left at the end, which is read again for its checksums.
        solves: whether Hessians are summed and factorised.
    """
    from moespeq_cli.quantize.layer import WORKING_BYTES

    sizes = LayerSizes.of(checkpoint, spec)
    states = 4 * tokens * spec.hidden_size
    forward = sizes.expert_bytes + 4 * (sizes.expert_weights + sizes.dense_weights) + 3 * states
    squares = spec.hidden_size**2 + spec.moe_intermediate_size**2
    one = 4 * (5 * squares + 16 * spec.hidden_size * spec.moe_intermediate_size)  # an expert's at least
    working = max(one, min(WORKING_BYTES, 16 * sizes.expert_weights))
    solving = sizes.expert_bytes + 2 * states + working + sizes.expert_bytes // 3
    embedding = 6 * sizes.embedding_weights + states
    peak = PROCESS_BYTES + int(SLACK * max(forward, solving, embedding))
    hidden, inner, experts = spec.hidden_size, spec.moe_intermediate_size, spec.num_experts
    routed = 2 * tokens * spec.top_k
    work = forward_operations(spec, sizes, tokens)
    if solves:
        cubes = hidden**3 + inner**3
        work += routed * (squares / 2 + 2 * hidden * inner)  # Hessians, and the inputs of the down projection
        work += experts * (3 * (2 * inner * hidden**2 + hidden * inner**2) + cubes)  # sweep, errors and factors
    layers = len(spec.moe_layers)
    read = 2 * (sizes.stored_bytes - layers * sizes.expert_bytes) + layers * sizes.expert_bytes + result_bytes
    return Estimate(peak, disk_bytes, read, layers * work / operations_per_s())


def estimate_pack(
    checkpoint: Checkpoint, spec: MoeSpec, total_bytes: int, draft_bytes: int, record_seconds: float
) -> Estimate:
    """One record an expert, read once, checked, laid out in `record_seconds`, written, and hashed twice."""
    sizes = LayerSizes.of(checkpoint, spec)
    record = sizes.expert_bytes // spec.num_experts
    peak = PROCESS_BYTES + int(SLACK * 8 * record) + (64 << 20)
    read = sizes.stored_bytes + 2 * draft_bytes + total_bytes  # the drafts' checksums first, the shards' last
    seconds = spec.num_records * record_seconds
    seconds += 3 * total_bytes / hashed_bytes_per_s() + total_bytes / WRITTEN_BYTES_PER_S
    return Estimate(peak, total_bytes, read, seconds)


def forward_operations(spec: MoeSpec, sizes: LayerSizes, tokens: int) -> float:
    """Multiplications and additions of one layer's forward pass."""
    return 2.0 * tokens * (spec.top_k * spec.expert_parameters + sizes.dense_weights)


def operations_per_s(tokens: int = 64) -> float:
    """Float32 operations a second of the products of an expert with so many tokens, its weights not in any cache."""
    import torch

    rows, experts = torch.rand(tokens, 2048), torch.rand(8, 2048, 2048)
    return 2 * tokens * experts.numel() * repeats_per_s(lambda: [rows @ weights for weights in experts])


def hashed_bytes_per_s() -> float:
    """Bytes that a core reads and hashes a second."""
    data = bytes(8 << 20)
    return len(data) * repeats_per_s(lambda: hashlib.sha256(data).digest())


def repeats_per_s(work: Callable[[], Any]) -> float:
    """How often a second something can be done, from doing it for a short time."""
    return 1 / seconds_each(lambda _: work())


def seconds_each(work: Callable[[int], Any]) -> float:
    """Seconds of one call, from calling it with 1, 2, ... for a short time; once with 0 before."""
    work(0)
    started, count = time.perf_counter(), 0
    while not count or time.perf_counter() - started < PROBE_S:
        count += 1
        work(count)
    return (time.perf_counter() - started) / count


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"
