"""What the draft is worth: acceptance by domain, and answers of target, speculation and draft alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from moespeq_cli.bench.prompts import BenchPrompt, bench_prompts
from moespeq_cli.bench.tables import markdown, number, percent
from moespeq_cli.demo import DOMAINS, answer_of, evaluation_problems
from runtime.artifacts.pack import Pack
from runtime.config import RunSettings
from runtime.decode.sampling import SamplingSettings
from runtime.engine import Engine, Request
from runtime.run_plan import plan_run

Advance = Callable[[], None]


def decode_all(
    pack: Pack, settings: RunSettings, prompts: Sequence[BenchPrompt], max_new_tokens: int, stop_ids: frozenset[int],
    advance: Advance, by: str = "target",
) -> tuple[list[list[int]], dict[str, Any]]:  # fmt: skip
    """Greedy continuations of all prompts, and the engine's report.

    Args:
        by: `target` (with or without speculation, as the settings say) or `draft`, the quantised model alone.
    """
    with Engine(pack, settings, plan_run(pack, settings)) as engine:
        outputs = []
        for prompt in prompts:
            request = Request(prompt.ids, max_new_tokens, stop_ids, SamplingSettings())
            tokens: Iterator[int] = engine.generate(request) if by == "target" else engine.draft_alone(request)
            outputs.append(list(tokens))
            advance()
        return outputs, engine.report()


def measure_quality(
    packs: Mapping[str, Pack],
    base: RunSettings,
    tokenizer: Any,
    problems: int,
    prompts: int,
    max_new_tokens: int,
    stop_ids: frozenset[int],
    advance: Advance,
) -> dict[str, Any]:
    """Answers to the held-out problems and acceptance in each domain, for each pack.

    Args:
        packs: by name, all of the embedded model; the first one's target speaks for all.
        base: settings of the runs.
        tokenizer: the model's.
        problems: of the 500.
        prompts: of each domain for acceptance.
        max_new_tokens: of each answer.
        stop_ids: that end a text.
        advance: called after each text.
    """
    asked = evaluation_problems()[:problems]
    maths = bench_prompts(tokenizer, problems, ("maths",))
    plain = dataclasses.replace(base, speculate=False)
    target, _ = decode_all(next(iter(packs.values())), plain, maths, max_new_tokens, stop_ids, advance)
    result: dict[str, Any] = {
        "problems": len(asked),
        "target_alone": {"exact_match": _exact(target, asked, tokenizer)},
        "packs": {},
    }
    for name, pack in packs.items():
        spoken, _ = decode_all(pack, base, maths, max_new_tokens, stop_ids, advance)
        alone, _ = decode_all(pack, base, maths, max_new_tokens, stop_ids, advance, by="draft")
        domains = {}
        for domain in DOMAINS:
            _, report = decode_all(
                pack, base, bench_prompts(tokenizer, prompts, (domain,)), max_new_tokens, stop_ids, advance
            )
            keep = ("acceptance", "proposals_judged", "routing_agreement", "tokens_per_round", "new_tokens")
            domains[domain] = {field: report[field] for field in keep}
        result["packs"][name] = {
            "speculation": {
                "exact_match": _exact(spoken, asked, tokenizer),
                "identical_answers": sum(a == b for a, b in zip(spoken, target, strict=True)),
            },
            "draft_alone": {
                "exact_match": _exact(alone, asked, tokenizer),
                "identical_answers": sum(a == b for a, b in zip(alone, target, strict=True)),
            },
            "domains": domains,
        }
    return result


def _exact(outputs: Sequence[Sequence[int]], problems: Sequence[Any], tokenizer: Any) -> float:
    texts = [tokenizer.decode(list(ids), skip_special_tokens=True) for ids in outputs]
    right = sum(answer_of(text) == str(problem.number) for text, problem in zip(texts, problems, strict=True))
    return right / len(problems)


def quality_tables(result: dict[str, Any]) -> str:
    """Both tables as Markdown."""
    count = result["problems"]
    answers = [("target alone", percent(result["target_alone"]["exact_match"]), f"{count} of {count}")]
    acceptance = []
    for name, pack in result["packs"].items():
        for label, part in (("speculation", pack["speculation"]), ("draft alone", pack["draft_alone"])):
            answers.append(
                (f"{label}, {name}", percent(part["exact_match"]), f"{part['identical_answers']} of {count}")
            )
        for domain, figures in pack["domains"].items():
            acceptance.append(
                (
                    name,
                    domain,
                    percent(figures["acceptance"], 2),
                    str(figures["proposals_judged"]),
                    percent(figures["routing_agreement"]),
                    number(figures["tokens_per_round"]),
                )
            )
    return "\n\n".join(
        (
            markdown(("answers by", "exact match", "token for token as the target alone"), answers),
            markdown(
                ("draft", "domain", "accepted", "proposals", "experts as the target's", "tokens a round"), acceptance
            ),
        )
    )
