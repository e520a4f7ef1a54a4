"""Generator of grade-school word problems with worked answers: 50 templates of one to three steps."""

from __future__ import annotations

from moespeq_cli.demo.problems.generator import (
    Problem,
    answer_of,
    distinct_problems,
    held_out_problems,
    make_problem,
    question_key,
)
from moespeq_cli.demo.problems.protagonist import TEMPLATES

__all__ = [
    "TEMPLATES",
    "Problem",
    "answer_of",
    "distinct_problems",
    "held_out_problems",
    "make_problem",
    "question_key",
]
