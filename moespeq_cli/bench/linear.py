"""The draft's linears on this processor: INT4 kernel, codes dequantised for each call, and the target's BF16."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from moespeq_cli.bench.tables import markdown, number
from runtime.decode.bank import CodesLinear, Int4Linear

GROUP_SIZE = 128
WEIGHT_BYTES = 200_000_000  # different weights in turn, so that no cache holds them


def measure(shapes: Sequence[tuple[int, int]], repeats: int, advance: Callable[[], None]) -> list[dict[str, Any]]:
    """Microseconds a call at one token, weights in turn, for [out, in] shapes; medians of `repeats` rounds."""
    rows = []
    for out_features, in_features in shapes:
        copies = max(2, min(512, WEIGHT_BYTES // (2 * out_features * in_features)))
        generator = torch.Generator().manual_seed(1)
        shape = out_features, in_features // GROUP_SIZE
        codes = [
            CodesLinear(
                torch.randint(0, 256, (out_features, in_features // 2), dtype=torch.uint8, generator=generator),
                torch.rand(shape, generator=generator).half(),
                torch.full(shape, 8, dtype=torch.uint8),
                in_features,
                None,
            )
            for _ in range(copies)
        ]
        packed = [Int4Linear(linear, GROUP_SIZE) for linear in codes]
        dense = [linear.weight(torch.bfloat16) for linear in codes]
        x = torch.randn(1, in_features, generator=generator).bfloat16()
        row: dict[str, Any] = {"out_features": out_features, "in_features": in_features, "copies": copies}
        with torch.inference_mode():
            row["int4_us"] = _time([partial(linear, x) for linear in packed], repeats)
            row["bf16_us"] = _time([partial(F.linear, x, weight) for weight in dense], repeats)
            row["codes_us"] = _time([partial(linear, x) for linear in codes[:32]], repeats)
        rows.append(row)
        advance()
    return rows


def _time(calls: Sequence[Callable[[], object]], repeats: int) -> dict[str, float]:
    rounds = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        for call in calls:
            call()
        rounds.append(1e6 * (time.perf_counter() - started) / len(calls))
    kept = rounds[1:]  # the first one warms up
    return {"median": statistics.median(kept), "min": min(kept), "max": max(kept)}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The figures as Markdown."""

    def cell(figures: dict[str, float]) -> str:
        return f"{number(figures['median'], 1)} ({number(figures['min'], 1)}-{number(figures['max'], 1)})"

    head = ("out x in", "INT4 kernel", "BF16 (the target's)", "codes dequantised each call")
    return markdown(
        head,
        [
            (f"{r['out_features']} x {r['in_features']}", cell(r["int4_us"]), cell(r["bf16_us"]), cell(r["codes_us"]))
            for r in rows
        ],
    )
