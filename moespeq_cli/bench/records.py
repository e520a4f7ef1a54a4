"""Residual records to weights, from memory to memory: compiled code beside NumPy."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from moespeq_cli.bench.tables import markdown, number
from runtime.artifacts.encodings import RAW
from runtime.artifacts.pack import Pack
from runtime.artifacts.residual import ResidualEncoding
from runtime.artifacts.residual_decoder import FastResidualEncoding, compiled_decoder, why_slow
from runtime.artifacts.safetensors_file import pread
from runtime.decode.draft_records import DraftRecords
from runtime.errors import InputError

MOST_BYTES = 200_000_000  # of records held: more than caches keep, little enough for any machine


def measure(pack: Pack, threads: int, repeats: int, advance: Callable[[], None]) -> dict[str, Any]:
    """Decode records one after another, each with its checks, into one buffer.

    Args:
        pack: whose residual records; the first 200 MB of them.
        threads: that share a large record.
        repeats: rounds over all records; the fastest counts.
        advance: called after each decoder.

    Returns:
        Rows by decoder. Rates by the clock, and by the processor time of all threads, which other work on the machine
        disturbs less.

    Raises:
        InputError: the pack has no residual records.
    """
    layout, weights = pack.target_layout, pack.spec.expert_parameters
    payloads, held = [], 0
    for key, place in pack.target_locations().items():
        if pack.records["target"][key].encoding != RAW.name and held < MOST_BYTES:
            data = pread(place.path, place.offset_bytes, place.payload_bytes)
            payloads.append((key, torch.frombuffer(data, dtype=torch.uint8)))
            held += place.payload_bytes
    if not payloads:
        raise InputError(
            expected=f"residual records in {pack.folder}",
            found=f"{pack.spec.num_records} raw ones",
            mend="make a pack with `moespeq pack --encoding residual`",
        )
    drafts, room = DraftRecords(pack), torch.empty(layout.payload_bytes, dtype=torch.uint8)
    torch.set_num_threads(threads)
    decoders: dict[str, ResidualEncoding] = {"NumPy": ResidualEncoding()}
    if compiled_decoder() is not None:
        decoders = {"compiled": FastResidualEncoding()} | decoders
    rows = []
    for name, decoder in decoders.items():
        wall_s = cpu_s = float("inf")
        for _ in range(repeats):
            wall, cpu = time.perf_counter(), time.process_time()
            for key, payload in payloads:
                decoder.decode(payload, payload.numel(), layout, drafts[key], room)
            wall_s, cpu_s = min(wall_s, time.perf_counter() - wall), min(cpu_s, time.process_time() - cpu)
        rows.append(
            {
                "decoder": name,
                "weights_per_s": weights * len(payloads) / wall_s,
                "weights_per_cpu_s": weights * len(payloads) / cpu_s,
                "record_bytes_per_s": held / wall_s,
                "record_bytes_per_cpu_s": held / cpu_s,
                "us_per_expert": 1e6 * wall_s / len(payloads),
            }
        )
        advance()
    facts = {"records": len(payloads), "weights_per_expert": weights, "threads": threads, "repeats": repeats}
    return facts | {"slow_decode": why_slow(), "rows": rows}


def table(result: dict[str, Any]) -> str:
    """The rows as Markdown."""
    rows = [
        (
            row["decoder"],
            number(row["weights_per_s"] / 1e6, 0),
            number(row["weights_per_cpu_s"] / 1e6, 0),
            number(row["record_bytes_per_s"] / 1e9),
            number(row["record_bytes_per_cpu_s"] / 1e9),
            number(row["us_per_expert"], 1),
        )
        for row in result["rows"]
    ]
    head = (
        "decoder",
        "M weights/s",
        "of processor time",
        "GB/s of records",
        "of processor time",
        "us an expert",
    )
    return markdown(head, rows)
