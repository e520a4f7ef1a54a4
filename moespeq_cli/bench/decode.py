"""Decoding under every way of using memory, side by side on the same prompts."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from moespeq_cli.bench.prompts import BenchPrompt
from moespeq_cli.bench.tables import markdown, number, percent
from runtime.artifacts.pack import Pack
from runtime.config import RunSettings
from runtime.decode.sampling import SamplingSettings
from runtime.engine import Engine, Request, plan_run
from runtime.memory.clairvoyant import belady
from runtime.memory.location import ExpertKey

Advance = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Mode:
    """One way of decoding: a name and what it changes in the settings."""

    name: str
    changes: dict[str, Any]


LRU: dict[str, Any] = {"speculate": False, "prefetch": "none", "eviction": "lru"}
MODES = (
    Mode("no draft, LRU", LRU),
    Mode("no draft, LRU, history prefetch", LRU | {"prefetch": "history"}),
    Mode("classic speculation, window 4, LRU", {
        "prefetch_window": 4, "verify_window": 4, "governor": "fixed", "eviction": "lru", "prefetch": "none",
    }),
    Mode("draft prefetch, LRU", {"eviction": "lru"}),
    Mode("draft prefetch, LFU", {"eviction": "lfu"}),
    Mode("draft prefetch, priority", {"eviction": "priority"}),
    Mode("look-ahead, no prefetch", {"prefetch": "none"}),
    Mode("look-ahead", {}),
)  # fmt: skip


def measure(
    pack: Pack,
    settings: RunSettings,
    prompts: Sequence[BenchPrompt],
    max_new_tokens: int,
    stop_ids: frozenset[int],
    repeats: int,
    keep_trace: bool = False,
) -> dict[str, Any]:
    """Decode the prompts and report.

    Args:
        pack: what to run.
        settings: how.
        prompts: decoded one after another with one cache, as a service would.
        max_new_tokens: of each prompt.
        stop_ids: that end a text.
        repeats: whole runs, each with a cache that starts empty; times are medians with their spread.
        keep_trace: also give the target's routing.

    Returns:
        Medians, their spread, counts, and the tokens of every prompt under `tokens`.
    """
    runs, tokens, trace = [], [], []
    for _ in range(repeats):
        with Engine(pack, settings, plan_run(pack, settings), keep_trace=keep_trace) as engine:
            tokens = [
                list(engine.generate(Request(prompt.ids, max_new_tokens, stop_ids, SamplingSettings())))
                for prompt in prompts
            ]
            runs.append(engine.report())
            trace = engine.trace()
    times = [run["ms_per_token"] for run in runs]
    middle = sorted(runs, key=lambda run: run["ms_per_token"])[len(runs) // 2]
    cache = middle["expert_cache"]
    return {
        "ms_per_token": statistics.median(times),
        "ms_per_token_min": min(times),
        "ms_per_token_max": max(times),
        "bytes_per_token": statistics.median(run["bytes_per_token"] for run in runs),
        "hit_rate": cache["hit_rate"],
        "wait_ms_per_token": 1e3 * middle["seconds"]["waiting_for_experts"] / middle["new_tokens"],
        "acceptance": middle["acceptance"],
        "routing_agreement": middle["routing_agreement"],
        "tokens_per_round": middle["tokens_per_round"],
        "draft_steps_per_token": middle["draft_steps"] / middle["new_tokens"],
        "link_utilisation": middle["link_utilisation"],
        "new_tokens": middle["new_tokens"],
        "prefill_read_bytes": middle["prefill_read_bytes"],
        "num_slots": middle["plan"]["num_slots"],
        "expert_cache": cache,
        "tokens": tokens,
        "trace": trace,
    }


def sweep_memory(
    pack: Pack,
    base: RunSettings,
    prompts: Sequence[BenchPrompt],
    max_new_tokens: int,
    stop_ids: frozenset[int],
    caches: Sequence[str],
    repeats: int,
    advance: Advance,
) -> dict[str, Any]:
    """Every mode at every cache size, beside the clairvoyant cache on the same routing.

    Raises:
        AssertionError: a mode gave other tokens than the plain target; nothing is reported then.
    """
    plain = dataclasses.replace(base, expert_cache_size=None, **LRU)
    reference = measure(pack, plain, prompts, max_new_tokens, stop_ids, 1, keep_trace=True)
    demands = _demands(reference.pop("trace"))
    rows = []
    for cache in caches:
        for mode in MODES:
            settings = dataclasses.replace(base, expert_cache_size=cache, **mode.changes)
            result = measure(pack, settings, prompts, max_new_tokens, stop_ids, repeats)
            assert result.pop("tokens") == reference["tokens"], f"{mode.name} at {cache} changed the text"
            del result["trace"]
            slots = result["num_slots"]
            bound = belady(demands, slots) * pack.target_slot_bytes / result["new_tokens"]
            rows.append({"cache": cache, "mode": mode.name, "clairvoyant_bytes_per_token": bound} | result)
            advance()
    return {"rows": rows, "new_tokens": reference["new_tokens"], "same_tokens": True}


def sweep_windows(
    pack: Pack,
    base: RunSettings,
    prompts: Sequence[BenchPrompt],
    max_new_tokens: int,
    stop_ids: frozenset[int],
    cache: str,
    windows: Sequence[int],
    verifies: Sequence[int],
    advance: Advance,
) -> dict[str, Any]:
    """Every tail length with every verification length at one cache size.

    Raises:
        AssertionError: a setting gave other tokens than the plain target.
    """
    plain = dataclasses.replace(base, expert_cache_size=None, **LRU)
    reference = measure(pack, plain, prompts, max_new_tokens, stop_ids, 1)["tokens"]
    rows = []
    for window in windows:
        for verify in verifies:
            settings = dataclasses.replace(
                base, expert_cache_size=cache, prefetch_window=window, verify_window=verify, governor="fixed"
            )
            result = measure(pack, settings, prompts, max_new_tokens, stop_ids, 1)
            assert result.pop("tokens") == reference, f"window {window}, verify {verify} changed the text"
            del result["trace"]
            rows.append({"cache": cache, "window": window, "verify": verify} | result)
            advance()
    return {"rows": rows, "same_tokens": True}


def _demands(rows: Sequence[Sequence[ExpertKey]]) -> list[list[ExpertKey]]:
    """A row's experts as one demand a layer, the way a pass of one row asks for them."""
    demands: list[list[ExpertKey]] = []
    for row in rows:
        layers: dict[int, list[ExpertKey]] = {}
        for key in row:
            layers.setdefault(key[0], []).append(key)
        demands.extend(layers.values())
    return demands


def memory_table(result: dict[str, Any]) -> str:
    """The memory sweep as Markdown."""
    rows = [
        (
            row["cache"],
            row["mode"],
            number(row["bytes_per_token"] / 1e6),
            number(row["clairvoyant_bytes_per_token"] / 1e6),
            percent(row["hit_rate"]),
            number(row["wait_ms_per_token"]),
            " ".join((number(row["ms_per_token"], 1), _spread(row))),
        )
        for row in result["rows"]
    ]
    head = ("cache", "mode", "MB read a token", "clairvoyant", "hits", "waiting, ms a token", "ms a token (spread)")
    return markdown(head, rows)


def _spread(row: dict[str, Any]) -> str:
    return f"({number(row['ms_per_token_min'], 1)}-{number(row['ms_per_token_max'], 1)})"


def window_table(result: dict[str, Any], field: str, scale: float, digits: int) -> str:
    """One figure of the window sweep, windows down, verification lengths across."""
    windows = sorted({row["window"] for row in result["rows"]})
    verifies = sorted({row["verify"] for row in result["rows"]})
    cells = {(row["window"], row["verify"]): number(row[field] * scale, digits) for row in result["rows"]}
    rows = [[str(w), *(cells.get((w, v), "-") for v in verifies)] for w in windows]
    return markdown(["window", *(f"verify {v}" for v in verifies)], rows)
