"""Prompts and limits at the edge of the context (H20), stop ids in a real run (H16), and what the plan promises."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.artifacts.pack import Pack
from runtime.config import RunSettings
from runtime.decode.sampling import SamplingSettings
from runtime.engine import Engine, Request, context_room
from runtime.errors import InputError, MoespeqError, PlanError
from runtime.run_plan import plan_run
from tests.decode.conftest import PackOf
from tests.decode.packs import assert_same, build, decode, prompt_of

WINDOW = {"prefetch_window": 8, "verify_window": 8, "governor": "fixed"}


@pytest.fixture(scope="module")
def pack(pack_of: PackOf) -> Pack:
    return pack_of("qwen2_moe", torch.float32)


@pytest.mark.parametrize(("length", "wanted", "got"), [(120, 64, 8), (120, 8, 8), (127, 5, 1), (128, 0, 0)])
def test_answer_ends_with_the_context(pack: Pack, length: int, wanted: int, got: int) -> None:
    alone = decode(pack, prompt_of(length), wanted, speculate=False)
    assert len(alone.tokens) == got
    assert_same(decode(pack, prompt_of(length), wanted, **WINDOW), alone)
    assert max(alone.logits, default=0) <= 127


@pytest.mark.parametrize(("length", "wanted"), [(128, 1), (129, 0), (129, 5)])
def test_prompt_that_does_not_fit_is_refused_with_both_numbers(pack: Pack, length: int, wanted: int) -> None:
    with pytest.raises(MoespeqError, match=rf"context of 128 tokens; found {length} tokens"):
        decode(pack, prompt_of(length), wanted)


def test_empty_prompt_unknown_id_and_negative_limit_are_refused(pack: Pack) -> None:
    with pytest.raises(InputError, match="at least one token"):
        decode(pack, [], 4)
    for token in (-1, 260):
        with pytest.raises(InputError, match=f"below the vocabulary size 260; found {token}"):
            decode(pack, [5, token], 4)
    with pytest.raises(InputError, match="0 or more new tokens; found -1"):
        context_room(4, -1, 128)


@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_very_few_tokens_with_a_long_window(pack: Pack, wanted: int) -> None:
    run = decode(pack, prompt_of(20), wanted, **WINDOW)
    assert run.tokens == decode(pack, prompt_of(20), 2, speculate=False).tokens[:wanted]
    assert run.report["new_tokens"] == wanted
    assert run.report["verify_rows"] <= wanted and run.report["draft_steps"] <= wanted


def test_prompt_of_one_token_has_no_prefill(pack: Pack) -> None:
    assert_same(decode(pack, [65], 12, **WINDOW), decode(pack, [65], 12, speculate=False))


def test_sequences_of_one_engine_do_not_disturb_each_other(pack: Pack) -> None:
    settings = RunSettings(expert_cache_size="40%", context=128)
    alone = [decode(pack, prompt_of(n), 10, speculate=False).tokens for n in (30, 3, 60)]
    with Engine(pack, settings, plan_run(pack, settings)) as engine:

        def ask(length: int) -> list[int]:
            return list(engine.generate(Request(prompt_of(length), 10, frozenset(), SamplingSettings())))

        abandoned = engine.generate(Request(prompt_of(9), 40, frozenset(), SamplingSettings()))
        next(abandoned)
        abandoned.close()  # type: ignore[attr-defined]
        assert [ask(n) for n in (30, 3, 60)] == alone
        assert engine.stats.new_tokens == 31


@pytest.mark.parametrize("length", [1, 2, 3, 4, 9, 20])
@pytest.mark.parametrize("window", [1, 4, 16])
def test_text_ends_at_258_wherever_it_falls(scripted: Pack, window: int, length: int) -> None:
    """The chain counts up to 199 and then says 258, one of two stop ids."""
    prompt, stop = [200 - length], frozenset({257, 258})
    settings: dict[str, Any] = {"prefetch_window": window, "verify_window": window, "governor": "fixed"}
    run = decode(scripted, prompt, 40, stop=stop, **settings)
    assert run.tokens == [*range(201 - length, 200), 258]
    assert_same(run, decode(scripted, prompt, 40, stop=stop, speculate=False))
    assert run.report["new_tokens"] == length
    assert run.report["acceptance"] == 1.0
    assert max(run.logits) == length - 1, "nothing was computed from the stop id"
    assert run.report["draft_steps"] <= length


def test_without_stop_ids_the_chain_goes_on(scripted: Pack) -> None:
    assert decode(scripted, [198], 4, **WINDOW).tokens == [199, 258, 100, 101]


@pytest.mark.parametrize("kind", ["qwen2_moe", "gpt_oss", "deepseek_v2"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_plan_is_what_the_run_takes(pack_of: PackOf, kind: str, dtype: str) -> None:
    """Planned bytes are allocated bytes, in the type of the arithmetic whatever the type on disk."""
    pack = pack_of(kind, torch.bfloat16)
    report = decode(pack, prompt_of(100), 28, slots=3, dtype=dtype).report
    measured, plan = report["measured_bytes"], report["plan"]
    assert plan["dense_bytes"] == pytest.approx(measured["dense"], rel=0.01)  # some routers stay in float32
    assert plan["draft_bytes"] == measured["draft"]
    assert plan["kv_bytes"] == measured["kv"]
    assert plan["num_slots"] == 3


def test_plan_counts_linears_that_stayed_unrounded(tmp_path: Any) -> None:
    from tests.decode.packs import build

    pack = build(tmp_path, dtype=torch.bfloat16, moe_intermediate_size=48)
    report = decode(pack, prompt_of(4), 4, dtype="float32").report
    assert report["plan"]["draft_bytes"] == report["measured_bytes"]["draft"]


def test_draft_alone_says_what_the_draft_proposes(scripted: Pack, pack: Pack) -> None:
    settings = RunSettings(context=128)
    with Engine(scripted, settings, plan_run(scripted, settings)) as engine:
        request = Request([190], 40, frozenset({258}), SamplingSettings())
        assert list(engine.draft_alone(request)) == [*range(191, 200), 258]
    silent = RunSettings(context=128, speculate=False)
    with Engine(pack, silent, plan_run(pack, silent)) as engine, pytest.raises(InputError, match="with a draft"):
        next(engine.draft_alone(Request([1], 4, frozenset(), SamplingSettings())))


def test_a_second_text_on_an_engine_ends_the_first(pack_of: PackOf) -> None:
    """Both would write to one KV cache; the older one is refused instead of going on with the other's keys."""
    settings = RunSettings(prefetch_window=4)
    pack = pack_of("qwen2_moe", torch.float32)
    with Engine(pack, settings, plan_run(pack, settings)) as engine:
        first, second = (engine.generate(Request(prompt_of(n), 8, frozenset(), SamplingSettings())) for n in (5, 9))
        next(first)
        next(second)
        with pytest.raises(InputError, match="one text at a time"):
            list(first)
        assert len(list(second)) == 7


@pytest.mark.parametrize("kind", ["phimoe", "qwen2_moe"])
def test_long_rope_ends_at_the_original_context(kind: str, tmp_path: Path) -> None:
    """Beyond it the library rotates the whole text with other factors, those in the KV cache too."""
    rope = {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8,
        "short_mscale": 1.0, "long_mscale": 1.2, "original_max_position_embeddings": 32,
    }  # fmt: skip
    pack = build(tmp_path, kind, rope_parameters=rope, original_max_position_embeddings=32)
    settings = RunSettings()
    with Engine(pack, settings, plan_run(pack, settings)) as engine:
        assert engine.max_context == 32
        with pytest.raises(PlanError, match="context of 32"):
            next(engine.generate(Request(prompt_of(40), 4, frozenset(), SamplingSettings())))


@pytest.mark.parametrize("kind", ["qwen2_moe", "gpt_oss", "deepseek_v2"])
def test_prompts_in_several_blocks_give_the_librarys_text(
    pack_of: PackOf, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    pack = pack_of(kind, torch.float32)
    monkeypatch.setattr("runtime.model.host.PREFILL_TOKENS", 16)
    prompt = prompt_of(70)
    model = AutoModelForCausalLM.from_pretrained(pack.folder.parent / "model")
    expected = model.generate(torch.tensor([list(prompt)]), max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert decode(pack, prompt, 12).tokens == expected[0, 70:].tolist()
    assert decode(pack, prompt, 12, slots=2, prefetch_window=0).tokens == expected[0, 70:].tolist()


def test_the_cache_of_a_finished_text_is_freed_at_once(pack_of: PackOf) -> None:
    """Not by the collector, some time: the plan has room for one."""
    settings = RunSettings()
    pack = pack_of("qwen2_moe", torch.float32)
    gc.disable()
    try:
        with Engine(pack, settings, plan_run(pack, settings)) as engine:
            list(engine.generate(Request(prompt_of(5), 4, frozenset(), SamplingSettings())))
            first = weakref.ref(engine.host.kv.layers[0].keys)
            list(engine.generate(Request(prompt_of(6), 4, frozenset(), SamplingSettings())))
            assert first() is None
    finally:
        gc.enable()
