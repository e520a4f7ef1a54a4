"""Packs of tiny models, and runs over them that keep what the target computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtime.artifacts.pack import Pack
from runtime.config import RunSettings
from runtime.decode.sampling import SamplingSettings
from runtime.engine import Engine, Request, Route
from runtime.run_plan import plan_run
from tests.pack.fixtures import make_pack, save_quantized
from tests.tiny import make_model, save_model

CONTEXT = 128
Step = Callable[[Tensor, int], Tensor]


@dataclass
class Run:
    """One generation.

    Attributes:
        tokens: ids given out.
        inputs: by position, the id that the target last read there.
        logits: by position, what the target last computed there.
        report: `Engine.report()` after it.
        passes: rows of each pass of the target.
    """

    tokens: list[int]
    inputs: dict[int, int] = field(default_factory=dict)
    logits: dict[int, Tensor] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)
    passes: list[int] = field(default_factory=list)


def build(
    folder: Path,
    kind: str = "qwen2_moe",
    dtype: torch.dtype = torch.float32,
    *,
    change: Callable[[Any], object] | None = None,
    **overrides: Any,
) -> Pack:
    """A tiny random model of a family, changed where the test wants it, rounded to INT4 and packed."""
    model = make_model(kind, dtype=dtype, **overrides)
    if change is not None:
        with torch.no_grad():
            change(model)
    return pack_model(model, folder)


def pack_model(model: Any, folder: Path) -> Pack:
    """Save a model as `folder/model`, its INT4 experts as `folder/quantized` and both as `folder/pack`."""
    source = save_model(model, folder / "model")
    return make_pack(source, save_quantized(source, folder / "quantized"), folder / "pack")


def decode(
    pack: Pack,
    prompt: Sequence[int],
    count: int,
    *,
    stop: frozenset[int] = frozenset(),
    sampling: SamplingSettings | None = None,
    exact_draft: bool = False,
    distort: Step | None = None,
    slots: int | None = None,
    **settings: Any,
) -> Run:
    """Generate `count` tokens at most.

    Args:
        pack: of which model.
        prompt: ids to continue.
        count: new tokens.
        stop: ids that end the text.
        sampling: greedy by default.
        exact_draft: the draft computes with the target's experts.
        distort: changes the draft's logits, given them and the position of their input.
        slots: of the expert cache; all experts by default.
        settings: of `RunSettings`.
    """
    size = f"{slots * pack.target_slot_bytes}" if slots is not None else "100%"
    chosen = RunSettings(expert_cache_size=size, context=CONTEXT, **settings)
    run = Run([])
    with Engine(pack, chosen, plan_run(pack, chosen)) as engine:
        assert slots is None or engine.plan.num_slots == min(slots, pack.spec.num_records)
        compute, step = engine.rows, engine.step

        def rows(tokens: Sequence[int], position: int, *begun: Any) -> tuple[Tensor, list[Route]]:
            logits, routes = compute(tokens, position, *begun)
            run.passes.append(len(tokens))
            for row, token in enumerate(tokens):
                run.inputs[position + row] = token
                run.logits[position + row] = logits[row].clone()
            return logits, routes

        def distorted(token: int, position: int) -> tuple[Tensor, Route]:
            if exact_draft:
                logits, route = (
                    engine.host.rows([token], position, engine._experts)[0],
                    engine._experts.routes.take()[0],
                )
            else:
                logits, route = step(token, position)
            return (logits if distort is None else distort(logits, position)), route

        engine.rows, engine.step = rows, distorted  # type: ignore[method-assign]
        run.tokens = list(engine.generate(Request(prompt, count, stop, sampling or SamplingSettings())))
        run.report = engine.report()
    return run


def assert_same(run: Run, reference: Run) -> None:
    """The same ids from the same logits, bit by bit, at every position that the reference computed."""
    assert run.tokens == reference.tokens
    for position, logits in reference.logits.items():
        assert run.inputs[position] == reference.inputs[position], f"another input at position {position}"
        different = int((run.logits[position] != logits).sum())
        assert different == 0, f"{different} logits differ at position {position}"


def prompt_of(length: int, seed: int = 11) -> list[int]:
    """Byte ids that look like nothing."""
    return [(i * 37 + seed) % 256 for i in range(length)]
