"""Residual records of every family that the engine for GPUs runs: the text and the logits of raw ones (H12)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.config import RunSettings
from tests.decode.packs import prompt_of
from tests.gpu.residual_packs import both_packs
from tests.gpu.runs import Logits, say
from tests.gpu.stand_in import open_gpu

COUNT = 8
FAMILIES = ("mixtral", "olmoe", "qwen3_moe", "phimoe", "deepseek_v2", "glm4_moe", "granitemoe", "minimax_m2")
LOOKING = {"prefetch_window": 6, "verify_window": 4, "governor": "fixed"}


@pytest.mark.parametrize("kind", FAMILIES)
def test_text_and_logits_are_those_of_raw_records(kind: str, tmp_path: Path) -> None:
    packs = both_packs(tmp_path, kind)

    def run(residual: bool, share: str, gates: bool = False, **changes: Any) -> tuple[list[int], Logits]:
        logits: Logits = {}
        settings = RunSettings(expert_cache_size=share, context=128, **changes)
        with open_gpu(packs.residual if residual else packs.raw, settings, gates=gates) as engine:
            return say(engine, prompt_of(20), COUNT, logits), logits

    tokens, right = run(False, "100%", speculate=False)
    for gates, share in ((False, "100%"), (False, "30%"), (True, "80%")):
        said, logits = run(True, share, gates, **LOOKING)
        assert said == tokens
        known = right.keys() & logits.keys()
        assert len(known) > COUNT // 2
        assert all(torch.equal(logits[text], right[text]) for text in known)
