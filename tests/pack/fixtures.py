"""A quantized artifact by round-to-nearest, and packs made from it, small enough for every test."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from moespeq_cli.pack.build import build_pack
from moespeq_cli.pack.plan import PackPlan, make_plan
from runtime.artifacts.checkpoint import Checkpoint
from runtime.artifacts.gptq_format import effective_group_size, pack_linear
from runtime.artifacts.manifest import FileEntry, save_manifest
from runtime.artifacts.pack import Pack
from runtime.artifacts.profile import ProfileManifest
from runtime.artifacts.quantized import Calibration, LayerFormat, QuantizedManifest, linear_name
from runtime.model.families import PROJECTIONS, MoeSpec, describe, read_expert

IN_FEATURES = {"gate_proj": "hidden_size", "up_proj": "hidden_size", "down_proj": "moe_intermediate_size"}


def save_quantized(
    model: Path, folder: Path, group_size: int = 32, bits: int = 4, wide_layers: Sequence[int] = (), min_in: int = 64
) -> Path:
    """Round every expert of a model to nearest, symmetric; `wide_layers` get 8 bits and one scale a row."""
    checkpoint = Checkpoint.open(model)
    spec = describe(checkpoint)
    tensors: dict[str, torch.Tensor] = {}
    layers: dict[str, LayerFormat] = {}
    for layer_id in spec.moe_layers:
        form = LayerFormat(8, -1) if layer_id in wide_layers else LayerFormat(bits, group_size)
        kept = tuple(name for name in PROJECTIONS if getattr(spec, IN_FEATURES[name]) < min_in)
        layers[str(layer_id)] = LayerFormat(form.bits, form.group_size, kept)
        for expert_id in range(spec.num_experts):
            weights = read_expert(checkpoint, spec, layer_id, expert_id)
            for name in PROJECTIONS:
                prefix, weight = linear_name(layer_id, expert_id, name), getattr(weights, name)
                parts = {"weight": weight} if name in kept else _round(weight, form)
                if spec.has_bias:
                    parts["bias"] = getattr(weights, name.replace("proj", "bias"))
                tensors.update({f"{prefix}.{part}": tensor.contiguous() for part, tensor in parts.items()})
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(checkpoint.config))
    _finish(folder, checkpoint, spec, layers, bits, group_size, len(tensors))
    return folder


def _round(weight: torch.Tensor, form: LayerFormat) -> dict[str, torch.Tensor]:
    size = effective_group_size(weight.shape[1], form.group_size, bits=form.bits)
    grouped = weight.float().unflatten(1, (-1, size))
    half = 1 << (form.bits - 1)
    scales = (grouped.abs().amax(2) / half).clamp(min=1e-6).half()
    codes = (grouped / scales.float()[..., None]).round().add(half).clamp(0, 2 * half - 1).to(torch.uint8).flatten(1)
    return pack_linear(codes, scales, torch.full(scales.shape, half), form.bits, form.group_size)


def _finish(
    folder: Path,
    checkpoint: Checkpoint,
    spec: MoeSpec,
    layers: dict[str, LayerFormat],
    bits: int,
    group_size: int,
    linears: int,
) -> None:
    manifest = QuantizedManifest(
        model_digest=checkpoint.digest,
        model_type=spec.model_type,
        num_experts=spec.num_experts,
        hidden_size=spec.hidden_size,
        moe_intermediate_size=spec.moe_intermediate_size,
        dtype=spec.dtype,
        has_bias=spec.has_bias,
        method="rtn",
        solver="batched",
        bits=bits,
        group_size=group_size,
        damp_percent=0.01,
        scale_search=False,
        layers=layers,
        calibration=Calibration("embedded", 0, 0, 0, 0, ""),
        quantized_linears=linears,
        kept_linears=0,
        rounded_linears=linears,
        mean_output_error=0.0,
        settings={},
        files={path.name: FileEntry.of(path) for path in folder.iterdir()},
    )
    save_manifest(folder, manifest)


def plan_for(
    model: Path, quantized: Path, out: Path, shards: int = 1, profile: Path | None = None, encoding: str = "raw"
) -> PackPlan:
    return make_plan(model, quantized, profile, out, shards, encoding)


def make_pack(model: Path, quantized: Path, out: Path, shards: int = 1, profile: Path | None = None) -> Pack:
    """Build a pack and open it."""
    build_pack(plan_for(model, quantized, out, shards, profile))
    return Pack.open(out)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a pack but the report, which holds a time."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "report.json")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def save_profile(model: Path, folder: Path, coactivation: torch.Tensor) -> Path:
    """A routing profile of one domain, one token and no trace, with this co-activation [layers, E, E]."""
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
        domains={"text": 1},
        sequences={"text": 1},
        reuse_edges=(1, 2),
        trace_tokens=0,
        settings={},
        files={"routing.safetensors": FileEntry.of(folder / "routing.safetensors")},
    )
    save_manifest(folder, manifest)
    return folder
