"""Every family on a GPU: its passes can be recorded, and its text does not depend on the memory or on who else computes
there (H12)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.artifacts.pack import Pack
from runtime.decode.sampling import SamplingSettings
from runtime.engine import Request
from runtime.gpu import engine as engine_module
from tests.decode.packs import build, prompt_of
from tests.gpu.residual_packs import both_packs
from tests.gpu.runs import engine_on_gpu
from tests.gpu.test_recordable import LONGROPE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(300),
]

FAMILIES = ("mixtral", "olmoe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "glm4_moe", "granitemoe", "minimax_m2")
CONTEXT, COUNT = 64, 24
CASES: dict[str, Callable[[Path], Pack]] = {
    **{kind: lambda folder, kind=kind: build(folder, kind, torch.bfloat16) for kind in (*FAMILIES, "phimoe")},
    "phimoe as published": lambda folder: build(folder, "phimoe", torch.bfloat16, rope_parameters=LONGROPE),
}


def text(pack: Pack, slots: int | None = None, graphs: bool = True, **changes: Any) -> list[int]:
    size = "100%" if slots is None else str(slots * pack.target_slot_bytes)
    with engine_on_gpu(pack, size, CONTEXT, graphs, **changes) as engine:
        return list(engine.generate(Request(prompt_of(20), COUNT, frozenset(), SamplingSettings())))


@pytest.mark.parametrize("name", CASES)
def test_the_text_is_the_same_in_any_memory(name: str, tmp_path: Path) -> None:
    pack = CASES[name](tmp_path)
    alone = text(pack, speculate=False)
    assert len(alone) == COUNT
    assert text(pack, graphs=False, speculate=False) == alone
    assert text(pack, prefetch_window=6, verify_window=4, governor="fixed") == alone
    for slots in (pack.spec.num_records // 2, 3):
        assert text(pack, slots=slots, prefetch_window=6, verify_window=4, governor="fixed") == alone


@pytest.mark.parametrize("kind", [*FAMILIES, "phimoe"])
def test_residual_records_give_the_text_of_raw_ones(kind: str, tmp_path: Path) -> None:
    packs = both_packs(tmp_path, kind)
    alone = text(packs.raw, speculate=False)
    for slots in (None, packs.raw.spec.num_records // 2, 3):
        assert text(packs.residual, slots=slots, prefetch_window=6, verify_window=4, governor="fixed") == alone


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    return build(tmp_path_factory.mktemp("mixtral"), "mixtral", torch.bfloat16)


@cache
def undisturbed(pack: Pack, graphs: bool) -> list[int]:
    return text(pack, graphs=graphs)


@pytest.mark.parametrize("late", ["slot_experts", "RowsTarget", "DeviceDraft", "BlockTarget"])
@pytest.mark.parametrize("graphs", [True, False])
def test_a_stream_that_is_late_changes_nothing(
    late: str, graphs: bool, mixtral: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fills a new table runs on another stream than what uses it, and on a GPU that others keep busy far later."""
    wanted, make = undisturbed(mixtral, graphs), getattr(engine_module, late)

    def made(*args: Any, **named: Any) -> Any:
        torch.cuda._sleep(1_000_000_000)  # cycles, about half a second
        return make(*args, **named)

    monkeypatch.setattr(engine_module, late, made)
    assert text(mixtral, graphs=graphs) == wanted
