"""A profile marks the hot experts in a pack, and a run begins with them."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime import engine as engine_module
from runtime.artifacts.heat import HEAT, hot_half, hottest, load_heat
from runtime.artifacts.manifest import FileEntry
from runtime.artifacts.pack import Pack
from runtime.artifacts.profile import Profile
from runtime.config import RunSettings
from runtime.decode.sampling import SamplingSettings
from runtime.engine import Engine, Request
from runtime.errors import ArtifactError
from runtime.run_plan import plan_run
from tests.pack.fixtures import make_pack, save_profile, save_quantized
from tests.tiny import save_tiny


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    """Two layers of eight experts; layer 1's are used more, and in each the last ones most."""
    folder = tmp_path_factory.mktemp("heat")
    model = save_tiny("qwen3_moe", folder / "model")
    counts = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8], [0, 2, 4, 6, 8, 10, 12, 14]])
    profile = save_profile(model, folder / "profile", torch.diag_embed(counts))
    quantized = save_quantized(model, folder / "quantized")
    make_pack(model, quantized, folder / "bare")
    return make_pack(model, quantized, folder / "pack", profile=profile)


def test_heat_is_the_profiles(pack: Pack) -> None:
    assert pack.heat == pytest.approx(Profile.open(pack.folder.parent / "profile").heat(), abs=1e-6)
    report = json.loads((pack.folder / "report.json").read_text())
    assert report["hot_experts"] == len(hot_half(pack.heat or {}))
    bare = Pack.open(pack.folder.parent / "bare")
    assert bare.heat is None and HEAT not in bare.manifest.files
    assert json.loads((bare.folder / "report.json").read_text())["hot_experts"] is None


def test_hottest_first_and_half_of_the_uses() -> None:
    heat = {(0, 0): 0.5, (0, 1): 0.125, (1, 0): 0.5, (1, 1): 0.25}
    assert hottest(heat, 3) == [(0, 0), (1, 0), (1, 1)]
    assert hot_half(heat) == [(0, 0), (1, 0)]
    assert hottest(heat, 99) == [(0, 0), (1, 0), (1, 1), (0, 1)] and hot_half({}) == []


@pytest.mark.parametrize("damage", [[], {"layers": {"0": [0.1] * 8}}, {"layers": {"0": [0.1] * 8, "1": [-1] * 8}}])
def test_damaged_heat_is_refused(pack: Pack, tmp_path: Path, damage: Any) -> None:
    folder = Path(shutil.copytree(pack.folder, tmp_path / "pack"))
    (folder / HEAT).write_text(json.dumps(damage))
    with pytest.raises(ArtifactError, match=HEAT):
        Pack.open(folder)
    body = json.loads((folder / "manifest.json").read_text())
    entry = FileEntry.of(folder / HEAT)
    body["files"][HEAT] = {"size_bytes": entry.size_bytes, "sha256": entry.sha256}
    (folder / "manifest.json").write_text(json.dumps(body))
    with pytest.raises(ArtifactError, match="8 shares of 0 or more"):
        Pack.open(folder)
    with pytest.raises(ArtifactError, match="8 shares"):
        load_heat(pack.folder / HEAT, (0, 7), 8)


def open_engine(pack: Pack, slots: int, **changes: Any) -> Engine:
    settings = RunSettings(expert_cache_size=str(slots * pack.target_slot_bytes), context=64, threads=1, **changes)
    return Engine(pack, settings, plan_run(pack, settings))


def test_an_empty_cache_is_filled_with_the_hottest(pack: Pack) -> None:
    with open_engine(pack, 5) as engine:
        deadline = time.monotonic() + 20
        while engine.cache.stats.prefetch_reads < 5 and time.monotonic() < deadline:
            time.sleep(0.005)
        wanted = hottest(pack.heat or {}, 5)
        assert wanted == [(1, 7), (1, 6), (1, 5), (0, 7), (1, 4)]
        assert engine.cache.missing_bytes(wanted) == 0
        assert engine.cache.stats.prefetch_reads == 5 and engine.cache.stats.demand_reads == 0
    with open_engine(pack, 5, warm=False) as engine:
        time.sleep(0.05)
        assert engine.cache.stats.read_bytes == 0


@pytest.mark.parametrize("eviction", ["lookahead", "priority", "lru"])
def test_warming_changes_no_token(pack: Pack, eviction: str) -> None:
    """With room for 1 and 5 of 16 experts, and with prompts short and long."""
    answers = []
    for warm in (False, True):
        for slots in (1, 5):
            with open_engine(pack, slots, warm=warm, eviction=eviction) as engine:
                for prompt in ([5, 6], list(range(20))):
                    request = Request(prompt, 8, frozenset(), SamplingSettings())
                    answers.append((len(prompt), list(engine.generate(request))))
    for length in (2, 20):
        assert len({tuple(tokens) for size, tokens in answers if size == length}) == 1


def test_priority_weighs_the_packs_heat(pack: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    real = engine_module.make_policy

    def keep(name: str, **options: Any) -> Any:
        seen.append(options)
        return real(name, **options)

    monkeypatch.setattr(engine_module, "make_policy", keep)
    with open_engine(pack, 4, eviction="priority", alpha=1.0, beta=0.0, gamma=0.0):
        pass
    assert seen[0]["heat"] == pack.heat
    policy = real("priority", **seen[0])
    assert policy.victim([(0, 7), (1, 0), (1, 7), (0, 0)], {}) == (1, 0)
