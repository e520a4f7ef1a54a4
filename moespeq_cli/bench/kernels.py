"""The expert kernels beside what a library offers: first whether they are right, then how long they take."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moespeq_cli.bench.geometry import SEED_TABLE, Geometry
from moespeq_cli.bench.kernel_candidate import Candidate
from moespeq_cli.bench.kernel_check import Checker
from moespeq_cli.bench.kernel_time import Bank, Machine, buffer_bytes, layers_needed, time_row
from moespeq_cli.bench.tables import markdown, number
from moespeq_cli.bench.tune import choose_ranges
from runtime.errors import PlanError
from runtime.kernels.shape import WeightForm
from runtime.kernels.tuning import BACKENDS, DispatchEntry, DispatchTable

SEED_TOKENS = (64, 256, 1024, 4096)
OURS = ("fused", "gemm")  # kernels of this project; the others are what a library offers

TimeRow = Callable[[Sequence[Candidate], Bank, int, Machine, int], dict[str, Any]]
Advance = Callable[[], None]
Result = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure.

    Attributes:
        geometries: layers.
        forms: of their weights.
        tokens: of a call, ascending.
        check: whether the probes go before.
        seed: of all data.
        residual: the form of the bank beside which residual records are measured, or None.
        dense: whether the dense steps of a decoding pass are measured too.
    """

    geometries: Sequence[Geometry]
    forms: Sequence[WeightForm]
    tokens: Sequence[int]
    check: bool = True
    seed: int = 0
    residual: WeightForm | None = None
    dense: bool = False

    @property
    def num_cases(self) -> int:
        """Layers, those as residual records and dense parts among them."""
        return len(self.cases) + len(self.geometries) * ((self.residual is not None) + self.dense)

    @property
    def cases(self) -> list[tuple[Geometry, WeightForm]]:
        """Every geometry in every form."""
        return [(geometry, form) for geometry in self.geometries for form in self.forms]


def measure(
    plan: Plan,
    candidates: Sequence[Candidate],
    machine: Machine,
    advance: Advance,
    device: str = "cuda",
    time: TimeRow = time_row,
) -> list[Result]:
    """Check and time every case.

    Args:
        plan: what.
        candidates: ways to compute.
        machine: for the floor.
        advance: called after each case.
        device: of weights and tokens.
        time: what times a row.

    Returns:
        One result a case: geometry, form, checks and rows.

    Raises:
        KernelError: a probe failed; nothing of its case was timed.
        PlanError: a case that does not fit in memory.
    """
    results = []
    for geometry, form in plan.cases:
        try:
            checks = Checker(geometry.shape, form, candidates, device, plan.seed).run() if plan.check else []
            results.append(_case(geometry, form, plan, candidates, machine, device, time) | {"checks": checks})
        except torch.OutOfMemoryError as error:
            raise PlanError(
                expected=f"GPU memory for {geometry.name} ({geometry.label}) in {form.kind}",
                found=str(error).partition("\n")[0],
                mend="leave this geometry or form out, take fewer --tokens, or stop what else uses the GPU",
            ) from error
        advance()
    return results


def _case(
    geometry: Geometry,
    form: WeightForm,
    plan: Plan,
    candidates: Sequence[Candidate],
    machine: Machine,
    device: str,
    time: TimeRow,
) -> Result:
    generator = torch.Generator(device=device).manual_seed(plan.seed)
    wanted = layers_needed(geometry.shape, form, min(plan.tokens), machine.l2_bytes)
    reserve = buffer_bytes(geometry.shape, form, max(plan.tokens))
    bank = Bank(geometry.shape, form, wanted, reserve, generator)
    rows = [time(candidates, bank, tokens, machine, plan.seed + tokens) for tokens in plan.tokens]
    shape = dataclasses.asdict(geometry.shape) | {"activation": str(geometry.shape.activation)}
    return {"geometry": geometry.name, "shape": shape, "form": form.kind, "group_size": form.group_size, "rows": rows}


def measure_seed_table(
    candidates: Sequence[Candidate], machine: Machine, advance: Advance, seed: int = 0, device: str = "cuda"
) -> list[Result]:
    """The loop over experts against ours in BF16, in the four widths of the seed's table: no checks, only times."""
    kept = [candidate for candidate in candidates if candidate.name in (*OURS, "loop")]
    plan = Plan(SEED_TABLE, [WeightForm("bf16")], SEED_TOKENS, check=False, seed=seed)
    return measure(plan, kept, machine, advance, device)


def tune(results: Sequence[Result], candidates: Sequence[Candidate]) -> DispatchTable:
    """The fastest backend of every case, by number of tokens.

    Raises:
        InputError: a case in which nothing for few tokens was measured.
    """
    invariant = {candidate.name for candidate in candidates if candidate.row_invariant}
    entries = []
    for result in results:
        times = {row["tokens"]: medians(row, BACKENDS) for row in result["rows"] if medians(row, BACKENDS)}
        shape = {
            name: result["shape"][name] for name in ("hidden_size", "moe_intermediate_size", "num_experts", "top_k")
        }
        entries.append(DispatchEntry(**shape, form=result["form"], ranges=choose_ranges(times, invariant)))
    return DispatchTable().merged(DispatchTable(tuple(entries)))


def best_shape(rows: Sequence[dict[str, float]], default: str, margin: float) -> str:
    """The name with the smallest geometric mean of its times over the default's, which stays unless beaten by a margin.

    Args:
        rows: microseconds by name; a name that is missing in one is out.
        default: a name in every row.
        margin: such as 1.01.
    """
    names = set.intersection(*(set(row) for row in rows)) if rows else {default}
    gain = {name: sum(math.log(row[name] / row[default]) for row in rows) / max(1, len(rows)) for name in names}
    best = min(sorted(names), key=gain.__getitem__)
    return best if gain[best] < -math.log(margin) else default


def medians(row: Result, names: Sequence[str] | None = None) -> dict[str, float]:
    """Median microseconds by candidate."""
    return {name: t["median_us"] for name, t in row["times"].items() if names is None or name in names}


def best_of(row: Result, names: Sequence[str] | None = None) -> tuple[str, float] | None:
    """The fastest candidate of a row and its time."""
    times = medians(row, names)
    return min(times.items(), key=lambda item: item[1]) if times else None


def case_table(result: Result, names: Sequence[str]) -> str:
    """One case as Markdown: a line a number of tokens, candidates side by side."""
    rows = []
    for row in result["rows"]:
        best = best_of(row)
        name, time_us = best if best is not None else ("none", float("nan"))
        rows.append(
            (
                str(row["tokens"]),
                number(row["experts"], 1),
                *(_cell(row["times"].get(candidate)) for candidate in names),
                name,
                number(row["bytes"] / time_us / 1e3, 0),
                number(row["flops"] / time_us / 1e6, 1),
                f"{number(row['floor_us'], 1)} ({row['bound']})",
                number(time_us / row["floor_us"]),
            )
        )
    head = (
        "tokens",
        "experts hit",
        *(f"{name}, us" for name in names),
        "best",
        "GB/s",
        "TFLOP/s",
        "floor, us",
        "ratio",
    )
    return markdown(head, rows)


def _cell(times: dict[str, Any] | None) -> str:
    if times is None:
        return "-"
    digits = 2 if times["median_us"] < 100 else 1
    low, high = number(times["low_us"], digits), number(times["high_us"], digits)
    return f"{number(times['median_us'], digits)} ({low}-{high})"


def case_title(result: Result, label: str) -> str:
    """What a table is of."""
    group = {"int4": True, "int8": True}.get(result["form"], False)
    scales = "" if not group else " per channel" if result["group_size"] == -1 else f" g{result['group_size']}"
    checked = len(result["checks"])
    return f"{result['geometry']} ({label}), {result['form']}{scales}: {checked} checks passed" + (
        "" if checked else " (not asked for)"
    )


def seed_table(results: Sequence[Result]) -> str:
    """Loop against ours as Markdown, TFLOP/s and ratio."""
    rows = []
    for result in results:
        for row in result["rows"]:
            loop, ours = medians(row).get("loop"), best_of(row, OURS)
            if loop is None or ours is None:
                continue
            tflop = row["flops"] / 1e6
            rows.append(
                (
                    str(result["shape"]["moe_intermediate_size"]),
                    str(row["tokens"]),
                    number(tflop / loop, 1),
                    number(tflop / ours[1], 1),
                    ours[0],
                    number(loop / ours[1]),
                )
            )
    return markdown(("inter", "tokens", "loop, TFLOP/s", "ours, TFLOP/s", "which", "ratio"), rows)
