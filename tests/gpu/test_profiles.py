"""Deployment profiles: all load, and those of a card fit it with the models that they name."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest

from moespeq_cli.bench.synthetic.architecture import Architecture
from moespeq_cli.bench.synthetic.models import make_config
from moespeq_cli.bench.synthetic.parts import DRAFT_FORM, spec_of
from runtime.config import find_profile, make_settings
from runtime.errors import PlanError
from runtime.gpu.geometry import expert_shape
from runtime.gpu.plan import make_gpu_plan
from runtime.kernels.layout import SlotLayout
from runtime.kernels.shape import Activation, WeightForm
from runtime.memory.clairvoyant import replay
from runtime.memory.eviction import make_policy
from runtime.memory.plan import MemoryPlan

FOLDER = find_profile("cpu").parent
NAMES = {
    "Qwen1.5-MoE": "qwen1.5-moe",
    "DeepSeek-V2-Lite": "deepseek-v2-lite",
    "Phi-3.5-MoE": "phi-3.5-moe",
    "Mixtral-8x7B": "mixtral-8x7b",
}
CARDS = {"gpu-24gb": 24, "gpu-24gb-no-draft": 24, "gpu-40gb": 40}


def plan_of(profile: str, geometry: str) -> MemoryPlan:
    """The plan of a real model on the profile's card."""
    settings, config = make_settings(profile, {}), make_config(geometry)
    architecture = Architecture.of(config)
    spec = spec_of(architecture)
    shape = expert_shape(spec, Activation.silu)
    draft_bytes = spec.num_records * SlotLayout(shape, DRAFT_FORM).slot_bytes
    return make_gpu_plan(
        spec,
        config.to_dict(),
        settings,
        dense_bytes=sum(tensor.stored_bytes for tensor in architecture.tensors() if ".experts." not in tensor.name),
        draft_bytes=draft_bytes if settings.speculate else 0,
        slot_bytes=SlotLayout(shape, WeightForm("bf16")).slot_bytes,
        device_bytes=CARDS[profile] * 10**9,
        host_bytes=128 * 10**9,
    )


def rows(profile: str) -> dict[str, list[float]]:
    """The figures that the comments of a profile have of each model."""
    found = {}
    for line in (FOLDER / f"{profile}.yaml").read_text(encoding="utf-8").splitlines():
        name, _, figures = line.removeprefix("#   ").partition(" ")
        if name in NAMES:
            found[name] = [float(figure) for figure in re.findall(r"\d+\.\d+", figures)]
    return found


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_profile_loads_and_says_how_its_values_were_found(path: Path) -> None:
    make_settings(path.stem, {})
    assert path.read_text(encoding="utf-8").startswith("# ")


@pytest.mark.parametrize("profile", CARDS)
def test_a_cards_profile_fits_it_with_the_figures_that_it_names(profile: str) -> None:
    settings = make_settings(profile, {})
    told = rows(profile)
    assert told and set(told) <= set(NAMES)
    for name, figures in told.items():
        plan = plan_of(profile, NAMES[name])
        assert plan.total_bytes <= CARDS[profile] * 10**9
        draft = [plan.draft_bytes] if settings.speculate else []
        planned = [plan.dense_bytes, *draft, plan.kv_bytes, plan.workspace_bytes, plan.cache_bytes]
        assert figures == [pytest.approx(part / 1e9, abs=0.006) for part in planned], name


def test_every_model_has_a_profile_of_each_card() -> None:
    named: dict[int, set[str]] = {24: set(), 40: set()}
    for profile, size in CARDS.items():
        named[size] |= set(rows(profile))
    assert named[24] == named[40] == set(NAMES)


@pytest.mark.parametrize("geometry", ["phi-3.5-moe", "mixtral-8x7b"])
def test_a_draft_of_a_large_model_does_not_fit_24_gb(geometry: str) -> None:
    with pytest.raises(PlanError, match="for dense weights, draft and KV cache"):
        plan_of("gpu-24gb", geometry)


@pytest.mark.parametrize(
    ("geometry", "hits"), [("phi-3.5-moe", {"lru": 0.27, "lfu": 0.22}), ("mixtral-8x7b", {"lru": 0.0, "lfu": 0.15})]
)
def test_eviction_without_a_draft_is_as_replayed(geometry: str, hits: dict[str, float]) -> None:
    """The profile's own figures, on routing with the overlap of the built models."""
    plan, config = plan_of("gpu-24gb-no-draft", geometry), make_config(geometry)
    trace = _routing(config.num_hidden_layers, config.num_local_experts, config.num_experts_per_tok, 0.26, 200)
    for name, wanted in hits.items():
        assert replay(trace, plan.num_slots, make_policy(name)).hit_rate == pytest.approx(wanted, abs=0.015)


def _routing(layers: int, num_experts: int, top_k: int, overlap: float, tokens: int) -> list[Any]:
    """Each token keeps some of the last one's experts and draws the others, so that neighbours share `overlap`."""
    drawn, chance = random.Random(0), top_k / num_experts
    keep = max(0.0, (overlap - chance) / (1 - chance))
    trace, last = [], [[] for _ in range(layers)]  # type: ignore[var-annotated]
    for _ in range(tokens):
        for layer_id in range(layers):
            kept = [expert_id for expert_id in last[layer_id] if drawn.random() < keep]
            others = [expert_id for expert_id in range(num_experts) if expert_id not in kept]
            last[layer_id] = kept + drawn.sample(others, top_k - len(kept))
            trace.append([(layer_id, expert_id) for expert_id in last[layer_id]])
    return trace
