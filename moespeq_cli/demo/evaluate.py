"""Measure the demo model, unquantised, with plain transformers: loss by domain and exact match on maths.

    python -m moespeq_cli.demo.evaluate --json
    python -m moespeq_cli.demo.evaluate --problems 50 --dtype bfloat16

Without `--tokens` the losses are those of the embedded texts: the held-out problems, the 50 function heads and the
project's own prose, of which the model was trained on none. With it (a folder made by `python -m
moespeq_cli.demo.corpus`) they are those of held-out rows of code and prose.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from moespeq_cli.demo import DOMAINS, Problem, answer_of, checkpoint_path, evaluation_problems, evaluation_prompts
from moespeq_cli.demo.rows import even_rows, read_tokens
from moespeq_cli.demo.texts import read_rows

MAX_NEW_TOKENS = 96  # the longest worked answer has fewer


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What was measured, and how."""

    dtype: str
    device: str
    loss: dict[str, float]  # nats a token
    loss_tokens: dict[str, int]
    problems: int
    exact_match: float
    wrong: list[dict[str, str]]  # question, expected number, output
    seconds: float


class Subject:
    """A model with its tokenizer, on one device, in one type of arithmetic."""

    def __init__(self, folder: Path, dtype: str, device: str) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval().to(device)
        self.device = device

    @torch.no_grad()
    def continue_greedily(self, prompts: list[str], batch: int = 100) -> Iterator[str]:
        """The continuation of each prompt, up to the end of the document."""
        for start in range(0, len(prompts), batch):
            inputs = self.tokenizer(prompts[start : start + batch], return_tensors="pt", padding=True).to(self.device)
            outputs = self.model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                max_new_tokens=MAX_NEW_TOKENS,
                do_sample=False,
            )
            yield from self.tokenizer.batch_decode(outputs[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    @torch.no_grad()
    def loss(self, rows: list[list[int]]) -> tuple[float, int]:
        """Mean loss of all tokens after the first of each row, and their number; a row at a time, no padding."""
        total, count = 0.0, 0
        for row in rows:
            ids = torch.tensor([row], device=self.device)
            logits = self.model(ids, use_cache=False).logits[0, :-1].float()
            total += torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
            count += len(row) - 1
        return total / count, count

    def rows_of(self, texts: list[str], ended: bool) -> list[list[int]]:
        """Token ids of texts, with `<|bos|>` in front and, where the text is a whole document, `<|eos|>` behind."""
        end = [self.tokenizer.eos_token_id] if ended else []
        return [self.tokenizer(text)["input_ids"] + end for text in texts]


def evaluate(subject: Subject, problems: list[Problem], rows: dict[str, list[list[int]]]) -> Evaluation:
    """Answer the problems and take the losses of the rows of each domain."""
    start = time.monotonic()
    outputs = list(subject.continue_greedily([problem.prompt for problem in problems]))
    wrong = [
        {"question": problem.question, "expected": str(problem.number), "output": output}
        for problem, output in zip(problems, outputs, strict=True)
        if answer_of(output) != str(problem.number)
    ]
    losses = {domain: subject.loss(rows[domain]) for domain in DOMAINS}
    return Evaluation(
        dtype=str(subject.model.dtype).removeprefix("torch."),
        device=subject.device,
        loss={domain: round(loss, 4) for domain, (loss, _) in losses.items()},
        loss_tokens={domain: count for domain, (_, count) in losses.items()},
        problems=len(problems),
        exact_match=round(1 - len(wrong) / len(problems), 4),
        wrong=wrong,
        seconds=round(time.monotonic() - start, 1),
    )


def evaluation_rows(
    subject: Subject, problems: list[Problem], tokens: Path | None, count: int, length: int
) -> dict[str, list[list[int]]]:
    """Rows of each domain: `count` held-out ones of `length` tokens of code and prose, or the embedded texts."""
    rows = {"maths": subject.rows_of([problem.text for problem in problems], ended=True)}
    if tokens is not None:
        for domain in ("code", "prose"):
            rows[domain] = even_rows(read_tokens(tokens, f"{domain}.heldout"), count, length)
        return rows
    rows["code"] = subject.rows_of(evaluation_prompts("code"), ended=False)
    rows["prose"] = subject.rows_of([row["text"] for row in read_rows("prose.jsonl")], ended=False)
    return rows


def parser() -> argparse.ArgumentParser:
    """The command line of this module."""
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("--model", type=Path, default=checkpoint_path(), help="default: the embedded checkpoint")
    command.add_argument("--tokens", type=Path, help="folder with code.heldout.bin and prose.heldout.bin")
    command.add_argument("--problems", type=int, default=500)
    command.add_argument("--rows", type=int, default=100, help="held-out rows of code and of prose, with --tokens")
    command.add_argument("--row-tokens", type=int, default=512)
    command.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="type of the arithmetic")
    command.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    command.add_argument("--threads", type=int, default=1, help="of the CPU; more are slow where cores are busy")
    command.add_argument("--json", action="store_true", help="one JSON object, with the wrong answers")
    return command


def main(argv: list[str] | None = None) -> None:
    """Measure one checkpoint and print the result."""
    args = parser().parse_args(argv)
    torch.set_num_threads(args.threads)
    subject = Subject(args.model, args.dtype, args.device)
    problems = evaluation_problems()[: args.problems]
    rows = evaluation_rows(subject, problems, args.tokens, args.rows, args.row_tokens)
    result = evaluate(subject, problems, rows)
    if args.json:
        print(json.dumps(asdict(result)))
        return
    print(f"exact match  {100 * result.exact_match:.1f} % of {result.problems} problems")
    for domain in DOMAINS:
        print(f"loss {domain:6s}  {result.loss[domain]:.4f} nats a token, {result.loss_tokens[domain]} tokens")
    print(f"{result.dtype} on {result.device}, {result.seconds:.1f} s")


if __name__ == "__main__":
    main()
