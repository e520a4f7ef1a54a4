"""Every family through every stage, in float32, against transformers' own model of the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moespeq_cli.profile.measure import TextSequence, measure
from runtime.model.experts import find_experts
from runtime.model.families import read_layer
from runtime.model.stream import LayerStream
from tests.decode.packs import Run, assert_same, decode, prompt_of
from tests.families.cases import CASES, WINDOWS, source_of, texts, unpack
from tests.families.conftest import CaseOf

COUNT = 16  # after a prompt of 3, decoding passes the windows of 8 and 16; one of 30 has passed them
WINDOWED = ("gpt_oss", "exaone_moe", "afmoe", *WINDOWS)


def sometimes(logits: torch.Tensor, position: int) -> torch.Tensor:
    """A draft that proposes the unlikeliest token at every third position."""
    return -logits if position % 3 == 0 else logits


@pytest.mark.parametrize("name", CASES)
def test_quantised_without_loss_packed_and_unpacked_it_is_the_same_model(
    case_of: CaseOf, name: str, tmp_path: Path
) -> None:
    """Codes that can hold the weights give them back; what a pack holds is a model of the library, bit for bit."""
    from transformers import AutoModelForCausalLM

    case = case_of(name)
    checkpoint, spec = source_of(case)
    for layer_id in spec.moe_layers:
        source = read_layer(checkpoint, spec, layer_id).named()
        coded = case.quantized.read_layer(layer_id, torch.float32).named()
        assert source.keys() == coded.keys()
        assert all(torch.equal(coded[part], source[part]) for part in source), layer_id
    again = AutoModelForCausalLM.from_pretrained(unpack(case, tmp_path / "unpacked"), dtype=torch.float32).eval()
    for tokens in texts():
        with torch.no_grad():
            assert torch.equal(again(tokens[None]).logits[0], case.logits(tokens.tolist()))


@pytest.mark.parametrize("name", CASES)
def test_profile_records_the_routers_choices(case_of: CaseOf, name: str) -> None:
    """A hook on transformers' experts sees the same sets, token by token, in every layer that has experts."""
    case = case_of(name)
    checkpoint, spec = source_of(case)
    sequences = [TextSequence("text", tokens) for tokens in texts()]
    measured = measure(LayerStream(checkpoint, spec), sequences, case.quantized).tensors
    seen: list[torch.Tensor] = []

    def hook(module: torch.nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        seen.append(arguments[1] if len(arguments) > 1 else named["top_k_index"])

    modules = [find_experts(layer) for layer in case.library.model.layers]
    handles = [m.register_forward_pre_hook(hook, with_kwargs=True) for m in modules if m is not None]
    try:
        for sequence, start in zip(sequences, measured["trace_starts"].tolist(), strict=True):
            seen.clear()
            case.logits(sequence.input_ids.tolist())
            ours = measured["trace"][start : start + len(sequence.input_ids)].long()
            assert torch.equal(ours.sort(-1).values, torch.stack(seen, dim=1).sort(-1).values)
    finally:
        for handle in handles:
            handle.remove()
    assert measured["counts"].sum(-1).tolist() == [[60 * spec.top_k] * len(spec.moe_layers)]
    assert torch.equal(measured["draft_trace"], measured["trace"]), "a draft without loss routes alike"


@pytest.mark.parametrize("name", CASES)
def test_run_says_what_the_library_says(case_of: CaseOf, name: str) -> None:
    """Alone, with a draft that is always right, and with one that is often wrong: past windows, through few slots."""
    case = case_of(name)
    ways: list[tuple[int, dict[str, Any]]] = [(3, {}), (30, {"distort": sometimes, "slots": 3})]
    for length, way in ways:
        prompt = prompt_of(length)
        expected = case.text(prompt, COUNT)
        alone = decode(case.pack, prompt, COUNT, speculate=False)
        assert alone.tokens == expected
        assert_logits_of(alone, case.logits([*prompt, *expected]))
        run = decode(case.pack, prompt, COUNT, prefetch_window=7, verify_window=5, governor="fixed", **way)
        assert_same(run, alone)
        assert run.report["acceptance"] == 1.0 if not way else 0 < run.report["acceptance"] < 1


def assert_logits_of(run: Run, expected: torch.Tensor) -> None:
    """Equal but for the order of float32 sums, at every position that the target computed."""
    scale = float(expected.abs().max())
    for position, logits in run.logits.items():
        assert float((logits - expected[position]).abs().max()) < 5e-5 * scale, position


@pytest.mark.parametrize("name", WINDOWED)
def test_windows_are_what_the_oracle_sees(case_of: CaseOf, name: str) -> None:
    """The test above would not notice a window that is never reached: without it, late logits must be others."""
    case = case_of(name)
    config = case.library.config
    narrow = case.logits(prompt_of(40))
    config.sliding_window, before = 1000, config.sliding_window
    try:
        wide = case.logits(prompt_of(40))
    finally:
        config.sliding_window = before
    assert torch.allclose(wide[:8], narrow[:8], atol=1e-4) and not torch.allclose(wide[-1], narrow[-1], atol=1e-2)
