"""A quantized artifact by round-to-nearest, and packs made from it, small enough for every test."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from moespeq_cli.pack.build import build_pack
from moespeq_cli.pack.plan import PackPlan, make_plan
from moespeq_cli.quantize.build import quantize
from moespeq_cli.quantize.plan import QuantizeOptions
from runtime.artifacts.checkpoint import Checkpoint
from runtime.artifacts.manifest import FileEntry, save_manifest
from runtime.artifacts.pack import Pack
from runtime.artifacts.profile import ProfileManifest
from runtime.artifacts.safetensors_file import pread
from runtime.memory.location import RecordLocation
from runtime.model.families import LayerExperts, describe


def save_quantized(model: Path, folder: Path, group_size: int = 32, wide_layers: Sequence[int] = ()) -> Path:
    """Round every expert of a model to nearest; `wide_layers` get 8 bits and one scale a row."""
    text = folder.with_name(f"{folder.name}.txt")
    folder.parent.mkdir(parents=True, exist_ok=True)
    text.write_text("A line is enough, for rounding to nearest looks at no text.")
    options = QuantizeOptions(
        model=str(model),
        out=folder,
        data=text,
        seq_len=16,
        group_size=group_size,
        method="rtn",
        sensitive_layers=tuple(wide_layers),
    )
    quantize(options)
    return folder


def plan_for(
    model: Path, quantized: Path, out: Path, shards: int = 1, profile: Path | None = None, encoding: str = "raw"
) -> PackPlan:
    return make_plan(model, quantized, profile, out, shards, encoding)


def make_pack(
    model: Path, quantized: Path, out: Path, shards: int = 1, profile: Path | None = None, encoding: str = "raw"
) -> Pack:
    """Build a pack and open it."""
    build_pack(plan_for(model, quantized, out, shards, profile, encoding))
    return Pack.open(out)


def read_record(location: RecordLocation) -> torch.Tensor:
    return torch.frombuffer(pread(location.path, location.offset_bytes, location.padded_bytes), dtype=torch.uint8)


def unpack_layer(pack: Pack, layer_id: int) -> LayerExperts:
    """A layer's experts out of their target records."""
    stacks: dict[str, list[torch.Tensor]] = {}
    for expert_id in range(pack.spec.num_experts):
        key = (layer_id, expert_id)
        decoded = pack.decode_target(key, read_record(pack.target_location(key)))
        gate, up = decoded["gate_up"].chunk(2)
        parts = {"gate_proj": gate, "up_proj": up, "down_proj": decoded["down"]}
        if "gate_up_bias" in decoded:
            parts["gate_bias"], parts["up_bias"] = decoded["gate_up_bias"].chunk(2)
            parts["down_bias"] = decoded["down_bias"]
        for name, tensor in parts.items():
            stacks.setdefault(name, []).append(tensor)
    return LayerExperts(**{name: torch.stack(tensors) for name, tensors in stacks.items()})


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a pack but the report, which holds a time."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "report.json")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def save_profile(model: Path, folder: Path, coactivation: torch.Tensor) -> Path:
    """A routing profile of one domain, no trace, with this co-activation [layers, E, E] of as few tokens as can be."""
    checkpoint = Checkpoint.open(model)
    spec = describe(checkpoint)
    layers, counts = len(spec.moe_layers), coactivation.diagonal(dim1=1, dim2=2)
    tensors = {
        "counts": counts[None].contiguous(),
        "coactivation": coactivation,
        "reuse_histogram": torch.zeros(1, layers, 1, dtype=torch.int64),
        "first_uses": torch.zeros(1, layers, dtype=torch.int64),
        "reuse_mean": torch.zeros(1, layers, dtype=torch.float64),
        "kept_from_previous": torch.zeros(1, layers, dtype=torch.float64),
        "trace": torch.zeros(0, layers, spec.top_k, dtype=torch.int16),
        "trace_starts": torch.zeros(0, dtype=torch.int64),
        "trace_domain": torch.zeros(0, dtype=torch.int64),
    }
    folder.mkdir(parents=True)
    save_file(tensors, folder / "routing.safetensors")
    manifest = ProfileManifest(
        model_digest=checkpoint.digest,
        model_type=spec.model_type,
        moe_layers=spec.moe_layers,
        num_experts=spec.num_experts,
        top_k=spec.top_k,
        domains={"text": int(coactivation.max())},
        sequences={"text": 1},
        reuse_edges=(1, 2),
        trace_tokens=0,
        settings={},
        files={"routing.safetensors": FileEntry.of(folder / "routing.safetensors")},
    )
    save_manifest(folder, manifest)
    return folder
