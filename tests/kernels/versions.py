"""Versions of the kernels for few tokens beside each other on one GPU, and where the time of a call goes.

    git worktree add /tmp/before HEAD~1
    python -m tests.kernels.versions --version before=/tmp/before/cuda --version after=cuda \\
        --geometry qwen1.5-moe --form int4,bf16,residual --tokens 1,6,16 --rounds 2 --clocks --json versions.json

Each version is measured `--rounds` times, in turn: microseconds a call as `moespeq bench kernels` takes them, median
(10-90 %). With `--clocks` also the times within the last call of such a graph (`tests/kernels/clocks.py`). Nothing is
checked: run `pytest -m gpu tests/kernels` for that.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

import runtime.kernels.fused as fused
from moespeq_cli.bench import kernel_residual_time as residual
from moespeq_cli.bench import kernel_time as timing
from moespeq_cli.bench.environment import gpu_environment
from moespeq_cli.bench.geometry import parse_geometry
from moespeq_cli.bench.kernel_candidate import Batch
from moespeq_cli.bench.kernel_check import random_batch
from moespeq_cli.bench.kernel_ours import Fused
from runtime.kernels import compile as compiling
from runtime.kernels.compile import Module
from runtime.kernels.shape import ExpertShape, WeightForm
from tests.kernels.clocks import BLOCKS, CLOCKS, NUMBERS, table, with_clocks

FORMS = {"int4": WeightForm("int4", 128), "bf16": WeightForm("bf16"), "residual": WeightForm("int4", 128)}
LAYERS, CALLS = 8, 24  # of residual records
Timed = Callable[[], timing.Times]


def main() -> None:
    """Measure and print; the file is written last."""
    asked = _parse()
    machine = timing.measure_machine()
    print(f"reading {machine.read_gb_per_s:.0f} GB/s")
    rows: list[dict[str, Any]] = []
    for form in asked.form.split(","):
        for tokens, timed in _measures(parse_geometry(asked.geometry).shape, form, _numbers(asked.tokens), machine):
            times: dict[str, list[timing.Times]] = {name: [] for name in asked.versions}
            for _ in range(asked.rounds):
                for name, folder in asked.versions.items():
                    _use(folder)
                    times[name].append(timed())
            row: dict[str, Any] = {"form": form, "tokens": tokens}
            row["us"] = {name: [asdict(one) for one in some] for name, some in times.items()}
            medians = (f"{name} {', '.join(f'{one.median_us:.2f}' for one in some)}" for name, some in times.items())
            print(form, tokens, "; ".join(medians))
            if asked.clocks:
                row["ns"] = {name: _clocked(folder, timed) for name, folder in asked.versions.items()}
                for name, times_ns in row["ns"].items():
                    print(f"  {name}: {'; '.join(f'{at} {m} ({low}-{high})' for at, m, low, high in times_ns)}")
            rows.append(row)
    if asked.json:
        result = {
            "asked": {name: str(value) for name, value in vars(asked).items()},
            "gpu": gpu_environment(),
            "read_gb_per_s": machine.read_gb_per_s,
            "rows": rows,
        }
        asked.json.write_text(json.dumps(result, indent=1), encoding="utf-8")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="append", required=True, metavar="NAME=FOLDER")
    parser.add_argument("--geometry", default="qwen1.5-moe")
    parser.add_argument("--form", default="int4,bf16,residual")
    parser.add_argument("--tokens", default="1,6,16")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--clocks", action="store_true")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    asked.versions = {name: Path(folder).resolve() for name, _, folder in (one.partition("=") for one in asked.version)}
    return asked


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _use(folder: Path) -> None:
    compiling.kernel_folder = lambda: folder


def _measures(shape: ExpertShape, form: str, tokens: list[int], machine: timing.Machine) -> Iterator[tuple[int, Timed]]:
    """What times a call of so many tokens by the version in use; weights and routing are the same for all."""
    generator = torch.Generator("cuda").manual_seed(0)
    if form == "residual":
        first = residual.Layer.random(shape, FORMS[form], seed=0)
        layers = [first, *(first.clone() for _ in range(LAYERS - 1))]
        for count in tokens:
            batches = [random_batch(shape, count, generator) for _ in range(CALLS)]
            yield count, lambda batches=batches: _replay_records(layers, batches)
        return
    needed = timing.layers_needed(shape, FORMS[form], min(tokens), machine.l2_bytes)
    bank = timing.Bank(shape, FORMS[form], needed, timing.buffer_bytes(shape, FORMS[form], max(tokens)), generator)
    for count in tokens:
        work = timing.make_work(bank, count, machine, generator)
        yield count, lambda work=work: timing.time_candidate(Fused(), bank, work)


def _replay_records(layers: list[residual.Layer], batches: list[Batch]) -> timing.Times:
    backend, out = residual.backends_of(layers[0])["residual"], torch.empty_like(batches[0].x)
    calls = [residual.call_of(backend, layers[i % len(layers)], batch, out) for i, batch in enumerate(batches)]
    return timing.replay(calls)


def _clocked(folder: Path, timed: Timed) -> list[tuple[str, int, int, int]]:
    import cupy

    loaded: list[Module] = []
    real = fused.load

    def load(source: compiling.Source) -> Module:
        loaded.append(real(source))
        return loaded[-1]

    with tempfile.TemporaryDirectory() as copy:
        with_clocks(folder, Path(copy))
        _use(Path(copy))
        fused.load = load  # which the kernel for records is made by too
        try:
            timed()
        finally:
            fused.load = real
            _use(folder)
    (module,) = (one for one in loaded if one.source.name in CLOCKS)
    stamps = cupy.ndarray((BLOCKS, NUMBERS), np.uint32, module.raw.get_global("stamps")).get()
    blocks = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    return list(table(module.source.name, stamps, min(blocks, BLOCKS)))


if __name__ == "__main__":
    main()
