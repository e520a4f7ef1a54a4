"""The embedded model: a small trained Mixture-of-Experts checkpoint with its calibration and evaluation texts.

It is the default model of every command. Importing this package imports neither torch nor transformers.
"""

from __future__ import annotations

from pathlib import Path

from moespeq_cli.demo.calibration import DOMAINS, SEPARATOR, CalibrationText, calibration_texts
from moespeq_cli.demo.problems import Problem, answer_of, held_out_problems
from moespeq_cli.demo.texts import read_rows
from runtime.errors import InputError

__all__ = [
    "DOMAINS",
    "SEPARATOR",
    "CalibrationText",
    "Problem",
    "answer_of",
    "calibration_texts",
    "checkpoint_path",
    "evaluation_problems",
    "evaluation_prompts",
]


def checkpoint_path() -> Path:
    """The folder of the checkpoint: configuration, tokenizer and two safetensors shards."""
    return Path(__file__).parent / "checkpoint"


def evaluation_problems() -> list[Problem]:
    """The 500 word problems held out of training, made anew from their seed."""
    return held_out_problems()


def evaluation_prompts(domain: str) -> list[str]:
    """What the model is asked to continue: 500 maths questions, 50 function heads or 50 openings of prose.

    Raises:
        InputError: the domain is none of `DOMAINS`.
    """
    if domain == "maths":
        return [problem.prompt for problem in evaluation_problems()]
    if domain in DOMAINS:
        return [row["prompt"] for row in read_rows(f"prompts_{domain}.jsonl")]
    raise InputError(
        expected=f"one of the domains {', '.join(DOMAINS)}", found=repr(domain), mend="name one of these domains"
    )
