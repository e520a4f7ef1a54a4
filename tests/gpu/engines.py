"""Engines on the processor in the place of a GPU, and what they say."""

from __future__ import annotations

from functools import cache
from typing import Any

from runtime.artifacts.pack import Pack
from runtime.config import RunSettings
from runtime.decode.sampling import SamplingSettings
from runtime.gpu.target import Way
from tests.decode.packs import prompt_of
from tests.gpu.runs import Logits, say
from tests.gpu.stand_in import TorchKernels, open_gpu

COUNT = 14


def settings_of(pack: Pack, slots: int | None = None, **changes: Any) -> RunSettings:
    size = "100%" if slots is None else str(slots * pack.target_slot_bytes)
    return RunSettings(expert_cache_size=size, context=128, **changes)


def generate(
    pack: Pack,
    length: int = 20,
    sampling: SamplingSettings | None = None,
    made: list[TorchKernels] | None = None,
    needs_pinned: bool = False,
    gates: bool = False,
    **changes: Any,
) -> tuple[list[int], dict[str, Any], Logits]:
    """Tokens, the report, and the logits of every row whose whole text is known, by that text."""
    logits: Logits = {}
    with open_gpu(pack, settings_of(pack, **changes), made=made, needs_pinned=needs_pinned, gates=gates) as engine:
        tokens = say(engine, prompt_of(length), COUNT, logits, sampling)
        gated = gates and not needs_pinned  # of memory that is not pinned nothing waits on the device
        assert all((way is Way.gated) == gated for _, way in engine._rows._passes)
        return tokens, engine.report(), logits


@cache
def alone(pack: Pack, length: int = 20) -> tuple[list[int], dict[str, Any], Logits]:
    return generate(pack, length, speculate=False)
