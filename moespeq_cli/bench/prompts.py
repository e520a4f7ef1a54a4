"""The prompts of a benchmark, by domain, as token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moespeq_cli.demo import DOMAINS, evaluation_prompts


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """One prompt of the embedded evaluation texts."""

    domain: str
    ids: tuple[int, ...]


def bench_prompts(tokenizer: Any, count: int, domains: tuple[str, ...] = DOMAINS) -> list[BenchPrompt]:
    """The first `count` prompts of each domain."""
    return [
        BenchPrompt(domain, tuple(tokenizer(text)["input_ids"]))
        for domain in domains
        for text in evaluation_prompts(domain)[:count]
    ]
