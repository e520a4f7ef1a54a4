"""Residual records on a GPU: the embedded model's text and logits are those of its raw pack, bit by bit (H12)."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moespeq_cli.bench.prompts import bench_prompts
from moespeq_cli.demo import checkpoint_path
from runtime.artifacts.pack import Pack
from runtime.decode.sampling import SamplingSettings
from runtime.engine import Request
from runtime.errors import ArtifactError
from runtime.gpu.engine import GpuEngine
from runtime.model.tokenizer import load_tokenizer
from tests.gpu.residual_packs import Packs, packs_of
from tests.gpu.runs import Logits, engine_on_gpu, say
from tests.gpu.test_residual_run import corrupted, slot_bytes, used_experts
from tests.pack.fixtures import save_quantized

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(300),
]

CONTEXT = 512
RAW = {(1, 3), (1, 9), *((4, expert) for expert in range(16))}  # in the mixed packs


def in_groups(model: Path, folder: Path, group_size: int) -> Packs:
    return packs_of(model, save_quantized(model, folder / "quantized", group_size), folder)


def with_wild(folder: Path) -> Path:
    """The embedded model with experts whose records do not become shorter: most of their weights are very small."""
    shutil.copytree(checkpoint_path(), folder)
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        for layer, expert in RAW:
            for name in ("gate_proj", "up_proj", "down_proj"):
                weights = tensors.get(f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight")
                if weights is not None:
                    weights[:, torch.arange(weights.shape[1]) % 32 != 0] *= 1e-20
        save_file(tensors, path, {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Packs]:
    folder = tmp_path_factory.mktemp("residual")
    made = {f"g{size}": in_groups(checkpoint_path(), folder / str(size), size) for size in (32, 128)}
    made["mixed"] = in_groups(with_wild(folder / "wild"), folder / "mixed", 32)
    found = {key for key, entry in made["mixed"].residual.records["target"].items() if entry.encoding == "raw"}
    assert found == RAW and all(made[name].residual.leans_on_draft for name in made)
    return made


@pytest.fixture(scope="module")
def prompts(packs: dict[str, Packs]) -> list[list[int]]:
    """Of a few tokens, which are computed from records, and of many, which are computed from decoded ones."""
    whole = [list(prompt.ids) for prompt in bench_prompts(load_tokenizer(packs["g128"].raw.config_folder), 2)]
    return [whole[0][:9], *whole[:2]]


def engine_of(pack: Pack, slots: int | None = None, graphs: bool = True, **changes: Any) -> GpuEngine:
    size = "100%" if slots is None else str(slots * slot_bytes(pack))
    engine = engine_on_gpu(pack, size, CONTEXT, graphs, **changes)
    assert slots is None or engine.plan.num_slots == slots
    return engine


def run_of(engine: GpuEngine, prompts: list[list[int]], count: int = 100) -> tuple[list[list[int]], Logits]:
    logits: Logits = {}
    with engine:
        return [say(engine, prompt, count, logits) for prompt in prompts], logits


@pytest.fixture(scope="module")
def alone(packs: dict[str, Packs], prompts: list[list[int]]) -> dict[str, tuple[list[list[int]], Logits]]:
    """What the raw packs say without speculation, everything resident."""
    return {name: run_of(engine_of(both.raw, speculate=False), prompts) for name, both in packs.items()}


WAYS: dict[str, dict[str, Any]] = {
    "plain, everything resident": {"speculate": False},
    "graphs left out": {"graphs": False, "speculate": False},
    "plain, a few slots": {"slots": 20, "speculate": False, "prefetch": "none", "eviction": "lru"},
    "look-ahead": {"slots": 20, "fetch_rows": 4},
    "all rows of a pass": {"slots": 20, "prefetch_window": 16, "verify_window": 7, "governor": "fixed"},
    "fewer slots than a row needs": {"slots": 3, "verify_window": 3, "governor": "fixed"},
    "everything resident": {"prefetch_window": 8, "verify_window": 4, "governor": "fixed"},
    "half on disk": {"slots": 30, "host_cache_size": "50%"},
}


@pytest.mark.parametrize(
    ("which", "way"), [*(("g128", way) for way in WAYS), ("g32", "look-ahead"), *(("mixed", way) for way in WAYS)]
)
def test_text_and_logits_are_those_of_the_raw_pack(
    packs: dict[str, Packs],
    prompts: list[list[int]],
    alone: dict[str, tuple[list[list[int]], Logits]],
    which: str,
    way: str,
) -> None:
    tokens, logits = run_of(engine_of(packs[which].residual, **WAYS[way]), prompts)
    wanted, right = alone[which]
    assert tokens == wanted
    common = right.keys() & logits.keys()
    assert len(common) > len(right) * 0.9
    assert all(torch.equal(logits[text], right[text]) for text in common)


@pytest.mark.parametrize("which", ["g128", "mixed"])
def test_a_prompts_experts_are_decoded_a_few_at_a_time(
    packs: dict[str, Packs],
    prompts: list[list[int]],
    alone: dict[str, tuple[list[list[int]], Logits]],
    monkeypatch: pytest.MonkeyPatch,
    which: str,
) -> None:
    monkeypatch.setattr("runtime.gpu.residual_facts._SCRATCH_BYTES", 5 * packs[which].raw.target_slot_bytes)
    tokens, logits = run_of(engine_of(packs[which].residual), prompts)
    wanted, right = alone[which]
    assert tokens == wanted
    assert all(torch.equal(logits[text], right[text]) for text in right.keys() & logits.keys())


@pytest.mark.parametrize("changes", [{}, {"slots": 30}, {"slots": 30, "host_cache_size": "50%"}])
def test_a_record_that_contradicts_itself_ends_the_text_by_name(
    packs: dict[str, Packs], prompts: list[list[int]], tmp_path: Path, changes: dict[str, Any]
) -> None:
    with engine_of(packs["g128"].residual, speculate=False) as engine:
        uses = used_experts(engine, prompts[1])
        key = max(uses, key=lambda key: uses[key])
    pack = corrupted(packs["g128"].residual, tmp_path / "pack", key)
    with engine_of(pack, **changes) as engine:
        for _ in range(2):
            with pytest.raises(ArtifactError, match=rf"layer {key[0]}, expert {key[1]}.*blocks that do not"):
                list(engine.generate(Request(prompts[1], 100, frozenset(), SamplingSettings())))


def test_the_plan_is_what_is_measured(packs: dict[str, Packs]) -> None:
    with engine_of(packs["g128"].residual, slots=30) as engine:
        plan, found = engine.plan, engine.report()["measured_bytes"]
    assert found["draft"] == plan.draft_bytes and found["expert_cache"] == plan.cache_bytes
