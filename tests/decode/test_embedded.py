"""The embedded model says the same with and without speculation, in each of its domains."""

from __future__ import annotations

from typing import Any

import pytest

from moespeq_cli.demo import DOMAINS, evaluation_prompts
from moespeq_cli.run.prompts import Prompt, PromptEncoder
from moespeq_cli.run.session import declared_stop_ids
from runtime.artifacts.pack import Pack
from runtime.model.tokenizer import load_tokenizer
from tests.decode.packs import assert_same, decode

COUNT = 60


@pytest.fixture(scope="module")
def tokenizer(embedded: Pack) -> Any:
    return load_tokenizer(embedded.config_folder)


@pytest.mark.parametrize("domain", DOMAINS)
def test_same_ids_and_bits_in_every_domain(embedded: Pack, tokenizer: Any, domain: str) -> None:
    stop = declared_stop_ids(embedded, tokenizer)
    for number, text in enumerate(evaluation_prompts(domain)[:2]):
        ids = PromptEncoder(tokenizer, raw=True).encode(Prompt(text))
        alone = decode(embedded, ids, COUNT, stop=stop, speculate=False)
        short = {"slots": 5, "prefetch_window": 6, "verify_window": 4, "governor": "fixed"}
        run = decode(embedded, ids, COUNT, stop=stop, **({"slots": 24} if number == 0 else short))
        assert_same(run, alone)
        assert run.report["acceptance"] > 0.8
        assert run.report["new_tokens"] == len(run.tokens) == len(alone.tokens) > 5


def test_maths_prompt_is_answered_rightly(embedded: Pack, tokenizer: Any) -> None:
    """The text is that of a trained model, not only a repeatable one."""
    from moespeq_cli.demo import answer_of, evaluation_problems

    problem = evaluation_problems()[0]
    ids = PromptEncoder(tokenizer, raw=False).encode(Prompt(problem.question))
    run = decode(embedded, ids, 120, stop=declared_stop_ids(embedded, tokenizer), prefetch_window=8)
    assert answer_of(tokenizer.decode(run.tokens)) == answer_of(problem.answer)
