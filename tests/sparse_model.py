"""A checkpoint of any size that takes no room: real headers, and holes where the weights would be.

    python -m tests.sparse_model phi-3.5-moe FOLDER

For `--dry-run`, which reads headers only; every weight reads as 0.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from moespeq_cli.bench.synthetic.architecture import Architecture
from moespeq_cli.bench.synthetic.folder import _write_companions, plan_shards
from moespeq_cli.bench.synthetic.models import make_config
from moespeq_cli.pack.shards import header
from moespeq_cli.quantize.folder import INDEX
from runtime.artifacts.manifest import write_json


def write(geometry: str, folder: Path) -> int:
    """Write the folder; returns the bytes that it seems to have."""
    config = make_config(geometry)
    shards = plan_shards(Architecture.of(config))
    folder.mkdir(parents=True)
    index: dict[str, str] = {}
    size = 0
    for place, specs in enumerate(shards, 1):
        name = f"model-{place:05d}-of-{len(shards):05d}.safetensors"
        head = header((spec.name, "BF16", spec.shape, spec.stored_bytes) for spec in specs)
        (folder / name).write_bytes(head)
        os.truncate(folder / name, len(head) + sum(spec.stored_bytes for spec in specs))
        size += (folder / name).stat().st_size
        index |= dict.fromkeys((spec.name for spec in specs), name)
    write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": index})
    _write_companions(config, folder)
    return size


if __name__ == "__main__":
    print(write(sys.argv[1], Path(sys.argv[2])))
