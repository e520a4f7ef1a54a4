"""What sharing saves of a GPU's memory: draft and target apart, then one part after the other held once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moespeq_cli.bench.offload import PLAIN, Mode, Sweep, make_prompts
from runtime.errors import PlanError
from runtime.gpu.accelerator import SMALLER
from runtime.gpu.model import DeviceModel
from runtime.gpu.shortage import shortage

NEW_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Step:
    """A way of holding a draft and its target.

    Attributes:
        name: in the table.
        twice: which of "shared experts", "other dense weights" and "KV" the draft has for itself.
        mode: of the run that is measured.
    """

    name: str
    twice: tuple[str, ...]
    mode: Mode


LOOK = Mode("lookahead", {})
SHARED, DENSE, KV = "shared experts", "other dense weights", "KV"
STEPS = (
    Step("draft and target apart", (SHARED, DENSE, KV), LOOK),
    Step("shared experts held once", (DENSE, KV), LOOK),
    Step("all dense weights held once", (KV,), LOOK),
    Step("one KV cache: a run", (), LOOK),
    Step("a run without a draft", (), Mode("no draft", PLAIN)),
)


def parts_of(model: DeviceModel, kv_bytes: int) -> dict[str, list[int]]:
    """Bytes of every tensor that draft and target may share."""
    sizes: dict[str, list[int]] = {SHARED: [], DENSE: [], KV: [kv_bytes]}
    for name, parameter in model.model.named_parameters():
        sizes[SHARED if ".shared_expert" in name else DENSE].append(parameter.numel() * parameter.element_size())
    return sizes


def memory_table(
    sweep: Sweep, memory: str, context: int, done: Callable[[dict[str, Any]], None], steps: Sequence[Step] = STEPS
) -> list[dict[str, Any]]:
    """Every step at one context, planned and measured.

    The draft's own parts, where it has some, are really reserved on the device beside a run that does not use them; one
    work space serves both models, as they take turns. The prompt fills the context but for a few tokens.

    Args:
        sweep: of a model built for this context.
        memory: for draft and slots, as in `Sweep.settings`.
        context: tokens of prompt and answer.
        done: is told each row.
        steps: what to measure.

    Returns:
        A row a step; what was measured is None where the device has not the memory, which `refused` says.

    Raises:
        InputError, PlanError: a run alone does not fit.
    """
    (prompt,) = make_prompts(1, context - NEW_TOKENS, *sweep.ids, seed=context)
    one = sweep.of_prompt(prompt, NEW_TOKENS)
    rows = []
    for step in steps:
        plan = one.plan(one.settings(step.mode, memory))
        sizes = parts_of(one.model, plan.kv_bytes)
        twice = [size for part in step.twice for size in sizes[part]]
        measured: dict[str, Any] = {"peak_bytes": None, "taken_bytes": None, "left_over_bytes": None, "refused": None}
        try:
            figures = one.run(step.mode, memory, partial(_reserve, twice, one.model.device)).figures
            measured |= {name: figures[name] for name in ("peak_bytes", "taken_bytes", "left_over_bytes")}
        except PlanError as error:
            if not twice:
                raise
            measured["refused"] = str(error)
        row = {
            "step": step.name,
            "context": plan.context_tokens,
            "shared_expert_bytes": sum(sizes[SHARED]),
            "dense_bytes": plan.dense_bytes,
            "kv_bytes": plan.kv_bytes,
            "draft_bytes": plan.draft_bytes,
            "slot_bytes": plan.cache_bytes,
            "workspace_bytes": plan.workspace_bytes,
            "twice_bytes": sum(twice),
            "planned_bytes": plan.total_bytes + sum(twice),
        }
        rows.append(row | measured)
        done(rows[-1])
    return rows


def _reserve(sizes: Sequence[int], device: torch.device) -> list[Tensor]:
    with shortage("device memory for the draft's own parts", SMALLER):
        return [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
