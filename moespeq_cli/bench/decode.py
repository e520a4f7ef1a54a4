"""Decoding under every way of using memory, side by side on the same prompts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moespeq_cli.bench.bound import check_reads, record_bytes
from moespeq_cli.bench.prompts import BenchPrompt
from moespeq_cli.bench.tables import markdown, number, percent
from runtime.artifacts.pack import Pack
from runtime.config import RunSettings
from runtime.decode.sampling import SamplingSettings
from runtime.engine import Engine, Request
from runtime.errors import InputError
from runtime.memory.clairvoyant import Trace, belady
from runtime.memory.sizes import parse_size
from runtime.run_plan import plan_run

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


def find_modes(names: Sequence[str] | None) -> tuple[Mode, ...]:
    """The modes of these names; all of them for None.

    Raises:
        InputError: no such mode.
    """
    known = {mode.name: mode for mode in MODES}
    for name in names or ():
        if name not in known:
            raise InputError(expected=f"a mode among: {'; '.join(known)}", found=repr(name), mend="correct --mode")
    return MODES if names is None else tuple(known[name] for name in names)


@dataclass(frozen=True, slots=True)
class Measurement:
    """What some runs of one way gave.

    Attributes:
        figures: medians, their spread, counts.
        tokens: of every prompt.
        trace: every demand of the target in the last run, in order, prompts included.
    """

    figures: dict[str, Any]
    tokens: list[list[int]]
    trace: Trace


@dataclass(frozen=True, slots=True)
class Run:
    """One run over all prompts: what the engine reports, the tokens of every prompt, and the target's demands."""

    report: dict[str, Any]
    tokens: list[list[int]]
    trace: Trace


def run_once(
    pack: Pack,
    settings: RunSettings,
    prompts: Sequence[BenchPrompt],
    max_new_tokens: int,
    stop_ids: frozenset[int],
) -> Run:
    """Decode the prompts one after another with one cache that starts empty, as a service would.

    Raises:
        RuntimeError: the run read less than its own demands need, so that some figure is wrong.
    """
    with Engine(pack, settings, plan_run(pack, settings), keep_trace=True) as engine:
        started = time.process_time()
        tokens = [
            list(engine.generate(Request(prompt.ids, max_new_tokens, stop_ids, SamplingSettings())))
            for prompt in prompts
        ]
        cpu_s = time.process_time() - started
        trace = engine.trace()
        fewest = check_reads(trace, engine.plan.num_slots, engine.cache.stats)
        return Run(engine.report() | {"fewest_reads": fewest, "cpu_s": cpu_s}, tokens, trace)


def summarise(pack: Pack, runs: Sequence[Run]) -> Measurement:
    """Medians of some runs of one way, with their spread; counts are those of the run in the middle."""
    reports = sorted((run.report for run in runs), key=lambda report: report["ms_per_token"])
    times = [report["ms_per_token"] for report in reports]
    middle = reports[len(reports) // 2]
    cache, new_tokens = middle["expert_cache"], middle["new_tokens"]
    figures = {
        "ms_per_token": statistics.median(times),
        "ms_per_token_min": min(times),
        "ms_per_token_max": max(times),
        "bytes_per_token": statistics.median(report["bytes_per_token"] for report in reports),
        "total_bytes_per_token": cache["read_bytes"] / new_tokens,
        "own_bound_bytes_per_token": middle["fewest_reads"] * record_bytes(pack) / new_tokens,
        "hit_rate": cache["hit_rate"],
        "wait_ms_per_token": 1e3 * middle["seconds"]["waiting_for_experts"] / new_tokens,
        "decode_ms_per_token": 1e3 * middle["decode_s"] / new_tokens,
        "cpu_ms_per_token": 1e3 * statistics.median(report["cpu_s"] for report in reports) / new_tokens,
        "acceptance": middle["acceptance"],
        "routing_agreement": middle["routing_agreement"],
        "tokens_per_round": middle["tokens_per_round"],
        "draft_steps_per_token": middle["draft_steps"] / new_tokens,
        "link_utilisation": middle["link_utilisation"],
        "new_tokens": new_tokens,
        "prefill_read_bytes": middle["prefill_read_bytes"],
        "num_slots": middle["plan"]["num_slots"],
        "planned_bytes": {name: middle["plan"][f"{name}_bytes"] for name in ("dense", "draft", "kv", "cache")},
        "slow_decode": middle["slow_decode"],
        "expert_cache": cache,
    }
    return Measurement(figures, runs[-1].tokens, runs[-1].trace)


def measure(
    pack: Pack,
    settings: RunSettings,
    prompts: Sequence[BenchPrompt],
    max_new_tokens: int,
    stop_ids: frozenset[int],
    repeats: int,
) -> Measurement:
    """Decode the prompts and report.

    Args:
        pack: what to run.
        settings: how.
        prompts: decoded one after another with one cache, as a service would.
        max_new_tokens: of each prompt.
        stop_ids: that end a text.
        repeats: whole runs, each with a cache that starts empty; times are medians with their spread.

    Raises:
        RuntimeError: a run read less than its own demands need, so that some figure is wrong.
    """
    return summarise(pack, [run_once(pack, settings, prompts, max_new_tokens, stop_ids) for _ in range(repeats)])


def _require_same_text(found: list[list[int]], reference: list[list[int]], what: str) -> None:
    if found != reference:
        raise RuntimeError(f"{what} changed the text: nothing is reported")


def sweep_memory(
    packs: Mapping[str, Pack],
    base: RunSettings,
    prompts: Sequence[BenchPrompt],
    max_new_tokens: int,
    stop_ids: frozenset[int],
    caches: Sequence[str],
    repeats: int,
    advance: Advance,
    same_total: bool = False,
    modes: Sequence[Mode] = MODES,
) -> dict[str, Any]:
    """Every mode of every pack at every cache size, beside two clairvoyant caches of that size.

    All of them start empty, and prompts count: a demand for each layer of a prompt's block, then for each layer of each
    row. `clairvoyant_bytes_per_token` is the least that the plain target's demands need, one row a pass, whatever is
    fetched or evicted when; it is one yardstick for all modes and a bound for those without speculation. A pass of
    several rows asks for what they share once, so in a cache too small to keep it from row to row a mode with
    speculation may read less; `own_bound_bytes_per_token` is the least for the passes that the mode did run, rows that
    were rejected included, and nothing reads less than that.

    Args:
        packs: of one model, by name; their runs take turns, so that the machine's moods meet all of them.
        base: settings that all have in common.
        prompts, max_new_tokens, stop_ids: as in run_once.
        caches: sizes; a share is one of all experts as raw records, so that it is one size for all packs.
        repeats: runs of each.
        advance: called after each pack and mode.
        same_total: give every pack the same memory for drafts and expert cache together: one whose drafts take less
            than the others' has a larger cache than was asked for.
        modes: what to run.

    Raises:
        RuntimeError: a mode gave other tokens than the plain target, or read less than its bound; nothing is reported
            then.
    """
    reference: Run | None = None
    for name, pack in packs.items():
        found = run_once(pack, replace(base, expert_cache_size=None, **LRU), prompts, max_new_tokens, stop_ids)
        reference = reference or found
        _require_same_text(found.tokens, reference.tokens, name)
    assert reference is not None
    rows = []
    for cache in caches:
        for mode in modes:
            settings = {
                name: replace(base, expert_cache_size=size, **mode.changes)
                for name, size in _cache_sizes(packs, base, cache, mode, same_total).items()
            }
            runs: dict[str, list[Run]] = {name: [] for name in packs}
            for _ in range(repeats):
                for name, pack in packs.items():
                    runs[name].append(run_once(pack, settings[name], prompts, max_new_tokens, stop_ids))
            for name, pack in packs.items():
                result = summarise(pack, runs[name])
                _require_same_text(result.tokens, reference.tokens, f"{mode.name} at {cache}")
                fewest = belady(reference.trace, result.figures["num_slots"])
                bound = fewest * record_bytes(pack) / result.figures["new_tokens"]
                facts = {"cache": cache, "mode": mode.name, "pack": name, "encoding": pack.manifest.encoding}
                rows.append(facts | {"clairvoyant_bytes_per_token": bound} | result.figures)
                advance()
    return {
        "rows": rows,
        "new_tokens": reference.report["new_tokens"],
        "same_tokens": True,
        "same_total_memory": same_total,
    }


def _cache_sizes(
    packs: Mapping[str, Pack], base: RunSettings, cache: str, mode: Mode, same_total: bool
) -> dict[str, str]:
    """The bytes of each pack's expert cache in a mode."""
    settings = replace(base, **mode.changes)
    raw_bytes = {pack.spec.num_records * pack.target_layout.padded_bytes for pack in packs.values()}
    size_bytes = parse_size(cache, max(raw_bytes))
    draft = {name: plan_run(pack, settings).draft_bytes for name, pack in packs.items()}
    most = max(draft.values())
    return {name: str(size_bytes + (most - draft[name] if same_total else 0)) for name in packs}


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
        RuntimeError: as in sweep_memory.
    """
    reference = measure(pack, replace(base, expert_cache_size=None, **LRU), prompts, max_new_tokens, stop_ids, 1)
    rows = []
    for window in windows:
        for verify in verifies:
            settings = replace(
                base, expert_cache_size=cache, prefetch_window=window, verify_window=verify, governor="fixed"
            )
            result = measure(pack, settings, prompts, max_new_tokens, stop_ids, 1)
            _require_same_text(result.tokens, reference.tokens, f"window {window}, verify {verify}")
            rows.append({"cache": cache, "window": window, "verify": verify} | result.figures)
            advance()
    return {"rows": rows, "same_tokens": True}


def memory_table(result: dict[str, Any]) -> str:
    """The memory sweep as Markdown; all reads, those for prompts included, over the new tokens."""
    several = len({row["pack"] for row in result["rows"]}) > 1
    rows = [
        (
            row["cache"],
            row["mode"],
            *((row["pack"], str(row["num_slots"])) if several else ()),
            number(row["total_bytes_per_token"] / 1e6),
            number(row["clairvoyant_bytes_per_token"] / 1e6),
            number(row["own_bound_bytes_per_token"] / 1e6),
            percent(row["hit_rate"]),
            number(row["wait_ms_per_token"]),
            *((number(row["decode_ms_per_token"]), number(row["cpu_ms_per_token"], 1)) if several else ()),
            " ".join((number(row["ms_per_token"], 1), _spread(row))),
        )
        for row in result["rows"]
    ]
    head = (
        "cache",
        "mode",
        *(("records", "experts in it") if several else ()),
        "MB read a token, prompts included",
        "clairvoyant, row by row",
        "clairvoyant, same passes",
        "hits",
        "waiting, ms a token",
        *(("decoding, ms a token", "processor, ms a token") if several else ()),
        "ms a token (spread)",
    )
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
