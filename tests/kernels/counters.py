"""One layer of a verification for a profiler to count: its rows sorted by expert, or one after the other.

    ncu --kernel-name regex:moe_ -s 1 --cache-control none --clock-control none \\
        --metrics gpu__time_duration.sum,dram__bytes_read.sum,lts__t_sector_hit_rate.pct,lts__t_bytes.sum \\
        python -m tests.kernels.counters expert residual

The orders are `expert`, one launch with eight rows as a pass has it, and `token`, eight launches with one; the weights
`bf16` and `residual`; the layer Qwen1.5-MoE's, routing random. The first launch, which `-s 1` skips, loads the kernel;
then the L2 is filled with something else.
"""

from __future__ import annotations

import sys

import torch

from moespeq_cli.bench.kernel_candidate import Batch
from moespeq_cli.bench.kernel_check import random_batch
from moespeq_cli.bench.kernel_residual_time import Layer, backends_of, call_of
from runtime.kernels.shape import ExpertShape, WeightForm

ROWS = 8
_FLUSH_BYTES = 512 << 20


def main(order: str, weights: str) -> None:
    """Launch what is to be counted."""
    layer = Layer.random(ExpertShape(60, 4, 2048, 1408), WeightForm("int4", 128), seed=1)
    backend = backends_of(layer)[weights]
    batch = random_batch(layer.pool.layout.shape, ROWS, torch.Generator("cuda").manual_seed(1))
    out = torch.empty_like(batch.x)
    call_of(backend, layer, batch, out)()
    torch.ones(_FLUSH_BYTES, dtype=torch.uint8, device="cuda").add_(1)
    step = ROWS if order == "expert" else 1
    for first in range(0, ROWS, step):
        part = slice(first, first + step)
        some = Batch(batch.x[part], batch.top_k_index[part], batch.top_k_weights[part])
        call_of(backend, layer, some, out[part])()
    torch.cuda.synchronize()
    print(f"{order} {weights}: {len(batch.top_k_index.unique())} experts")


if __name__ == "__main__":
    main(*sys.argv[1:])
