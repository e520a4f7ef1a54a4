"""The target's text and logits do not depend on speculation, memory or transfers (H12, H14)."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from runtime.artifacts.pack import Pack
from runtime.config import RunSettings
from runtime.errors import PlanError
from runtime.run_plan import plan_run
from tests.decode.conftest import PackOf
from tests.decode.packs import Run, assert_same, build, decode, prompt_of

FAMILIES = ["qwen2_moe", "mixtral", "olmoe", "deepseek_v2", "gpt_oss"]
PROMPTS = (1, 12, 40)  # gpt_oss's window of 16 is passed while decoding after 12, in the prompt at 40
COUNT = 14

WAYS = st.fixed_dictionaries(
    {
        "prefetch_window": st.integers(0, 24),
        "verify_window": st.one_of(st.integers(0, 8), st.just(16)),
        "slots": st.one_of(st.integers(1, 6), st.integers(1, 16), st.none()),
        "eviction": st.sampled_from(["lru", "lfu", "priority", "lookahead"]),
        "prefetch": st.sampled_from(["draft", "history", "none"]),
        "governor": st.sampled_from(["fixed", "threshold", "roofline"]),
        "max_parallel_transfers": st.sampled_from([1, 4]),
        "fetch_rows": st.sampled_from([None, 0, 1, 3]),
    }
)


@cache
def reference(pack: Pack, length: int, count: int = COUNT) -> Run:
    """The target alone, all its experts resident."""
    return decode(pack, prompt_of(length), count, speculate=False)


def way(window: int, verify: int, slots: int | None, **more: Any) -> dict[str, Any]:
    return {"prefetch_window": window, "verify_window": verify, "slots": slots, "governor": "fixed", **more}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_same_ids_and_bits_in_every_way(pack_of: PackOf, kind: str, dtype: torch.dtype) -> None:
    pack = pack_of(kind, dtype)

    @settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
    @given(way=WAYS, length=st.sampled_from(PROMPTS))
    @example(way(24, 16, 1), 40)
    @example(way(8, 7, None), 12)
    @example(way(24, 8, 3, prefetch="history", eviction="lru", max_parallel_transfers=1), 1)
    def same(way: dict[str, Any], length: int) -> None:
        assert_same(decode(pack, prompt_of(length), COUNT, **way), reference(pack, length))

    same()


@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe", "granitemoe", "phimoe", "qwen3_moe"])
def test_other_families_too(pack_of: PackOf, kind: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        pack = pack_of(kind, dtype)
        assert_same(decode(pack, prompt_of(12), COUNT, **way(8, 7, 4)), reference(pack, 12))


def test_stored_bfloat16_runs_in_float32(pack_of: PackOf) -> None:
    pack = pack_of("qwen2_moe", torch.bfloat16)
    alone = decode(pack, prompt_of(12), COUNT, speculate=False, dtype="float32")
    assert_same(decode(pack, prompt_of(12), COUNT, **way(8, 4, 3, dtype="float32")), alone)
    rounded = reference(pack, 12)
    assert any(not torch.equal(rounded.logits[p], alone.logits[p]) for p in alone.logits if p in rounded.logits)


@pytest.mark.parametrize("more", [{"dtype": "float16"}, {"threads": 2}], ids=["float16", "two threads"])
def test_other_arithmetic_is_as_exact(pack_of: PackOf, more: dict[str, Any]) -> None:
    for kind in ("qwen2_moe", "gpt_oss"):
        pack = pack_of(kind, torch.float32)
        alone = decode(pack, prompt_of(12), COUNT, speculate=False, **more)
        assert_same(decode(pack, prompt_of(12), COUNT, **way(8, 7, 5, **more)), alone)


def test_no_prefetch_reads_on_demand_only(wide: Pack) -> None:
    run = decode(wide, prompt_of(40), COUNT, slots=8, prefetch="none", prefetch_window=8)
    counted = run.report["expert_cache"]
    assert counted["prefetch_bytes"] == 0 < counted["demand_bytes"]
    ahead = decode(wide, prompt_of(40), COUNT, slots=8, prefetch="draft", prefetch_window=8)
    assert ahead.report["expert_cache"]["prefetch_bytes"] > 0
    assert_same(ahead, run)


@pytest.mark.parametrize("slots", [1, 2, 3, 16])
def test_prompt_of_100_passes_through_a_cache_of_any_size(wide: Pack, slots: int) -> None:
    alone = reference(wide, 100, 16)
    run = decode(wide, prompt_of(100), 16, slots=slots, prefetch_window=8, verify_window=8, governor="fixed")
    assert_same(run, alone)
    counted = run.report["expert_cache"]
    assert counted["evictions"] > 0 and counted["demand_bytes"] > 0


@pytest.mark.parametrize("size", ["0", "1%", "1KB"])
def test_cache_below_one_expert_is_refused_with_the_minimum(wide: Pack, size: str) -> None:
    with pytest.raises(PlanError) as refusal:
        plan_run(wide, RunSettings(expert_cache_size=size))
    assert f"{wide.target_slot_bytes} bytes" in str(refusal.value)
    assert f"--expert-cache {wide.target_slot_bytes}" in refusal.value.mend


def never(logits: torch.Tensor, position: int) -> torch.Tensor:
    return -logits


def sometimes(logits: torch.Tensor, position: int) -> torch.Tensor:
    return -logits if position % 3 == 0 else logits


@pytest.mark.parametrize("window", [1, 2, 3, 5, 8])
def test_drafts_that_agree_always_never_and_sometimes(pack_of: PackOf, window: int) -> None:
    pack, settings = pack_of("qwen2_moe", torch.float32), way(window, window, None)
    always, opposite, mixed = (
        decode(pack, prompt_of(12), COUNT, exact_draft=True, distort=distort, **settings)
        for distort in (None, never, sometimes)
    )
    for run in (always, opposite, mixed):
        assert_same(run, reference(pack, 12))
    assert always.report["acceptance"] == 1.0 and always.report["routing_agreement"] == 1.0
    assert opposite.report["acceptance"] == 0.0
    assert 0.5 < mixed.report["acceptance"] < 1


@pytest.mark.parametrize("distort", [None, never, sometimes])
def test_every_choice_a_tie(tied: Pack, distort: Any) -> None:
    alone = reference(tied, 12)
    for window in (1, 8):
        run = decode(tied, prompt_of(12), COUNT, exact_draft=True, distort=distort, **way(window, window, 5))
        assert_same(run, alone)
    assert all(int((logits == logits.max()).sum()) == 2 for logits in alone.logits.values())
    assert set(alone.tokens) <= set(range(128)), "the first of equals"


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    """Each row of the head exists twice, so the two likeliest tokens are always equal."""

    def double(model: Any) -> None:
        model.lm_head.weight[128:256] = model.lm_head.weight[:128]
        model.lm_head.weight[256:] = 0

    return build(tmp_path_factory.mktemp("tied"), change=double)


@pytest.mark.parametrize("kind", ["qwen2_moe", "mixtral", "olmoe"])
def test_random_models_keep_their_text_and_their_bits(kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Weights, experts, top k and layers drawn too; 40 tokens: tails are kept, dropped and refilled (H14)."""

    @settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        seed=st.integers(0, 10**6),
        experts=st.sampled_from([3, 5, 8]),
        top_k=st.integers(1, 3),
        layers=st.integers(1, 3),
        dtype=st.sampled_from([torch.float32, torch.bfloat16]),
        way=WAYS,
    )
    def same(seed: int, experts: int, top_k: int, layers: int, dtype: torch.dtype, way: dict[str, Any]) -> None:
        key = "num_local_experts" if kind == "mixtral" else "num_experts"
        shape = {key: experts, "num_experts_per_tok": top_k, "num_hidden_layers": layers, "seed": seed}
        pack = build(tmp_path_factory.mktemp("random"), kind, dtype, **shape)
        assert_same(decode(pack, prompt_of(9), 40, **way), reference(pack, 9, 40))

    same()
