"""An engine on the GPU, and a text out of one with the logits behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from runtime.artifacts.pack import Pack
from runtime.config import RunSettings
from runtime.decode.sampling import SamplingSettings
from runtime.engine import BaseEngine, Request
from runtime.gpu.engine import GpuEngine
from runtime.gpu.parts import Toolkit, load_pack
from runtime.gpu.plan import plan_gpu

Logits = dict[tuple[int, ...], Tensor]
"""By the whole text before them, the logits that the target last computed; rows after an unknown text are left out."""


def say(
    engine: BaseEngine, prompt: Sequence[int], count: int, logits: Logits, sampling: SamplingSettings | None = None
) -> list[int]:
    """Generate, and add to `logits`."""
    text, inner = list(prompt), engine.rows

    def rows(tokens: Sequence[int], position: int, *begun: Any) -> Any:
        scores, routes = inner(tokens, position, *begun)
        for row, score in enumerate(scores):
            known = (*text[:position], *tokens[: row + 1])
            if len(known) == position + row + 1:
                logits[known] = score.values().clone()  # type: ignore[operator]
        return scores, routes

    engine.rows = rows  # type: ignore[method-assign]
    try:
        for token in engine.generate(Request(prompt, count, frozenset(), sampling or SamplingSettings())):
            text.append(token)
    finally:
        engine.rows = inner  # type: ignore[method-assign]
    return text[len(prompt) :]


def engine_on_gpu(pack: Pack, size: str, context: int, graphs: bool = True, **changes: Any) -> GpuEngine:
    """With an expert cache of a size."""
    settings = RunSettings(expert_cache_size=size, context=context, **changes)
    plan, toolkit = plan_gpu(pack, settings), Toolkit.cuda(settings, graphs)
    return GpuEngine(load_pack(pack, settings, plan, toolkit), settings, plan, toolkit)
