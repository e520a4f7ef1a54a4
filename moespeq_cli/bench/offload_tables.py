"""What was measured of a built model, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moespeq_cli.bench.decode import window_table
from moespeq_cli.bench.tables import markdown, number, percent


def ways(rows: Sequence[dict[str, Any]]) -> str:
    """Ways of decoding."""
    head = (
        "memory", "mode", "ms a token (spread)", "GB a token", "clairvoyant, row by row", "hits", "accepted a round",
        "draft / verify / waiting, ms a token", "link busy, while something is missing, by bytes", "link, GB/s",
        "tensors / in all / plan, GB",
    )  # fmt: skip
    lines = [
        (
            row["memory"],
            row["mode"],
            f"{number(row['ms_per_token'])} ({number(row['ms_min'])}-{number(row['ms_max'])})",
            number(row["bytes_per_token"] / 1e9, 3),
            number(row["clairvoyant_bytes_per_token"] / 1e9, 3),
            percent(row["hit_rate"]),
            "-" if not row["acceptance"] else number(row["accepted_per_round"]),
            " / ".join(number(row[f"{part}_ms_per_token"]) for part in ("draft", "verify", "wait")),
            ", ".join(
                percent(row.get(f"link_{part}")) for part in ("utilisation", "utilisation_while_missing", "share")
            ),
            number(row["link_gb_per_s"], 1),
            " / ".join(number(row[f"{kind}_bytes"] / 1e9, 1) for kind in ("peak", "taken", "planned")),
        )
        for row in rows
    ]
    return markdown(head, lines)


def disk(rows: Sequence[dict[str, Any]]) -> str:
    """Runs that read from a disk beside those that need not."""
    head = (
        "mode", "experts in host memory", "ms a token (spread)", "GB a token to the GPU", "GB a token from disk",
        "hits in slots", "hits in host memory", "first tokens, s",
    )  # fmt: skip
    lines = [
        (
            row["mode"],
            str(row["host_slots"]),
            f"{number(row['ms_per_token'])} ({number(row['ms_min'])}-{number(row['ms_max'])})",
            number(row["total_bytes_per_token"] / 1e9, 3),
            number(row["disk_bytes_per_token"] / 1e9, 3),
            percent(row["hit_rate"]),
            "all" if row["host_cache"] is None else percent(row["host_cache"]["hit_rate"]),
            number(row["prefill_s"]),
        )
        for row in rows
    ]
    return markdown(head, lines)


def first_tokens(rows: Sequence[dict[str, Any]]) -> str:
    """The times to the first token."""
    head = ("prompt", "to the first token, ms", "GB read", "bytes over the link alone, ms", "ratio")
    lines = [
        (
            str(row["tokens"]),
            number(row["ms"], 1),
            number(row["read_bytes"] / 1e9),
            number(row["link_ms"], 1),
            number(row["ms"] / row["link_ms"]) if row["link_ms"] else "n/a",
        )
        for row in rows
    ]
    return markdown(head, lines)


def windows(rows: Sequence[dict[str, Any]]) -> str:
    """Windows down, verification lengths across, a table a figure."""
    cells = [
        row | {"window": row["changes"]["prefetch_window"], "verify": row["changes"]["verify_window"]} for row in rows
    ]
    fields = (
        ("ms a token", "ms_per_token", 1.0, 1),
        ("GB a token", "bytes_per_token", 1e-9, 3),
        ("tokens a round", "tokens_per_round", 1.0, 2),
        ("link busy, per cent", "link_utilisation", 100.0, 0),
    )
    return "\n\n".join(
        f"{name}:\n\n{window_table({'rows': cells}, field, scale, digits)}" for name, field, scale, digits in fields
    )


def memory(rows: Sequence[dict[str, Any]]) -> str:
    """Steps of the memory table."""
    head = (
        "step", "dense", "KV", "held twice", "draft experts", "slots", "work space", "planned, GB", "tensors, measured",
        "in all, measured", "measured / planned",
    )  # fmt: skip
    lines = [
        (
            row["step"],
            *(_gb(row[f"{part}_bytes"]) for part in ("dense", "kv", "twice", "draft", "slot", "workspace", "planned")),
            _gb(row["peak_bytes"]),
            _gb(row["taken_bytes"]),
            number(row["taken_bytes"] / row["planned_bytes"]) if row["taken_bytes"] else "planned only",
        )
        for row in rows
    ]
    return markdown(head, lines)


def _gb(num_bytes: int | None) -> str:
    return number(None if num_bytes is None else num_bytes / 1e9)
