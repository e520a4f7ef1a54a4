"""A checkpoint of any size that takes no room: real headers, and holes where the weights would be.

    python -m tests.sparse_model phi-3.5-moe FOLDER [QUANTIZED]

For `--dry-run`, which reads headers and a few experts; every weight reads as 0. QUANTIZED gets what `moespeq quantize`
would make of it, for the plans of `profile` and `pack`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moespeq_cli.bench.synthetic.architecture import Architecture
from moespeq_cli.bench.synthetic.folder import _write_companions, plan_shards
from moespeq_cli.bench.synthetic.models import make_config
from moespeq_cli.pack.shards import header
from moespeq_cli.quantize import build
from moespeq_cli.quantize.folder import INDEX, Shards
from moespeq_cli.quantize.plan import QuantizeOptions, linear_shape
from moespeq_cli.quantize.report import LinearReport
from runtime.artifacts.gptq_format import effective_group_size, pack_linear, symmetric_zero
from runtime.artifacts.manifest import FileEntry, Journal, write_json
from runtime.artifacts.quantized import linear_name
from runtime.artifacts.safetensors_file import NAMES
from runtime.model.families import PROJECTIONS, memory_name

Hole = tuple[str, str, tuple[int, ...], int]
"""Name, type, shape and bytes of a tensor."""


def write(geometry: str, folder: Path, num_layers: int | None = None, **overrides: Any) -> int:
    """Write the folder, of fewer layers or other sizes if wanted; returns the bytes that it seems to have."""
    config = make_config(geometry, num_layers, **overrides)
    shards = plan_shards(Architecture.of(config))
    folder.mkdir(parents=True)
    index: dict[str, str] = {}
    size = 0
    for place, specs in enumerate(shards, 1):
        name = f"model-{place:05d}-of-{len(shards):05d}.safetensors"
        size += _write_holes(folder / name, [(spec.name, "BF16", spec.shape, spec.stored_bytes) for spec in specs])
        index |= dict.fromkeys((spec.name for spec in specs), name)
    write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": index})
    _write_companions(config, folder)
    return size


def write_quantized(model: Path, folder: Path) -> int:
    """Write a quantized folder of such a model, all but its zero points and channel orders holes; returns its bytes."""
    work = build.prepare(QuantizeOptions(model=str(model), out=folder, samples=1))
    spec, shards = work.spec, Shards.plan(work.checkpoint, work.spec)
    folder.mkdir(parents=True)
    journal = Journal(folder, work.settings)
    parts = {projection: _packed(*linear_shape(spec, projection), work.options) for projection in PROJECTIONS}

    def mark(step: str, file: str, holes: list[Hole], linears: Iterable[LinearReport] = ()) -> None:
        entry = asdict(FileEntry.of(folder / file))
        sizes = {name: size for name, _, _, size in holes}
        journal.mark(step, {"file": file, "entry": entry, "sizes": sizes, "linears": [asdict(x) for x in linears]})

    for place, names in enumerate(shards.dense):
        infos = [(memory_name(spec, name), work.checkpoint.tensors[name]) for name in names]
        holes = [(name, info.dtype, info.shape, info.end - info.start) for name, info in infos]
        _write_holes(folder / shards.dense_file(place), holes)
        mark(f"copied {place}", shards.dense_file(place), holes)
    for layer_id in spec.moe_layers:
        tensors: dict[str, Tensor] = {}
        linears = []
        for expert_id in range(spec.num_experts):
            for projection in PROJECTIONS:
                name = linear_name(layer_id, expert_id, projection)
                tensors |= {f"{name}.{part}": tensor for part, tensor in parts[projection].items()}
                size = effective_group_size(linear_shape(spec, projection)[1], work.options.group_size)
                linears.append(LinearReport(layer_id, expert_id, projection, 0, "gptq", 4, size, 0.0, 0.0, None))
        holes = [(n, NAMES[t.dtype], tuple(t.shape), t.numel() * t.element_size()) for n, t in tensors.items()]
        _write_holes(folder / shards.layer_file(layer_id), holes, tensors)
        mark(f"layer {layer_id}", shards.layer_file(layer_id), holes, linears)
    manifest = build._finish(work, shards, journal)
    return sum(entry.size_bytes for entry in manifest.files.values())


def _packed(out_features: int, in_features: int, options: QuantizeOptions) -> dict[str, Tensor]:
    """Of codes and scales of 0, so that what reads as 0 is right."""
    groups = in_features // effective_group_size(in_features, options.group_size)
    codes = torch.zeros(out_features, in_features, dtype=torch.uint8)
    scales = torch.zeros(out_features, groups)
    zeros = torch.full((out_features, groups), symmetric_zero(options.bits))
    return pack_linear(codes, scales, zeros, options.bits, options.group_size)


def _write_holes(path: Path, tensors: list[Hole], values: dict[str, Tensor] | None = None) -> int:
    """A file of these tensors, of which those that are not 0 throughout are written; returns its size."""
    head = header(tensors)
    with path.open("wb") as handle:
        handle.write(head)
        for name, _, _, size in tensors:
            value = (values or {}).get(name)
            if value is not None and bool(value.any()):
                handle.write(value.numpy().tobytes())
            else:
                handle.seek(size, os.SEEK_CUR)
        handle.truncate()
    return path.stat().st_size


if __name__ == "__main__":
    print(write(sys.argv[1], Path(sys.argv[2])))
    if len(sys.argv) > 3:
        print(write_quantized(Path(sys.argv[2]), Path(sys.argv[3])))
