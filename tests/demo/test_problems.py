"""The generator of word problems: reproducible, consistent, and never a held-out question."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import re

import pytest

from moespeq_cli import demo
from moespeq_cli.demo.problems import TEMPLATES, distinct_problems, make_problem, question_key

# Of the 500 problems as JSON lines [question, answer, number, template]: those that the checkpoint was measured with.
HELD_OUT_SHA256 = "4364518dc32bd8470c3acf719697dd7767bef215b372ff206b0786822494ea5f"
CALCULATION = re.compile(r"(?<![\d=] )(\d+(?: [+*/-] \d+)+) = \$?(\d+)")


def test_held_out_problems_are_the_ones_the_checkpoint_was_measured_with() -> None:
    problems = demo.evaluation_problems()
    lines = (json.dumps([p.question, p.answer, p.number, p.template]) + "\n" for p in problems)
    assert len(problems) == 500
    assert hashlib.sha256("".join(lines).encode()).hexdigest() == HELD_OUT_SHA256


def test_held_out_questions_differ() -> None:
    assert len({problem.question for problem in demo.evaluation_problems()}) == 500


def test_there_are_fifty_templates_and_random_problems_use_all() -> None:
    rng = random.Random(3)
    assert len(TEMPLATES) == 50
    assert {make_problem(rng).template for _ in range(2000)} == set(TEMPLATES)


@pytest.mark.parametrize("template", sorted(TEMPLATES))
def test_worked_answer_is_right(template: str) -> None:
    rng = random.Random(template)
    for _ in range(200):
        problem = make_problem(rng, template)
        *steps, last = problem.answer.split("\n")
        assert problem.template == template
        assert last == f"#### {problem.number}"
        assert problem.number >= 0
        assert demo.answer_of(problem.text) == str(problem.number)
        calculations = [found for step in steps for found in CALCULATION.findall(step)]
        assert len(calculations) == len(steps)
        for expression, result in calculations:
            assert eval(expression) == int(result), problem
        assert int(calculations[-1][1]) == problem.number
        assert problem.text == f"Question: {problem.question}\nAnswer: {problem.answer}"
        assert "{" not in problem.text and problem.text.isascii()


def test_distinct_problems_leave_out_what_they_are_told_to() -> None:
    first = list(itertools.islice(distinct_problems(random.Random(5)), 50))
    exclude = {question_key(problem.question) for problem in first[:10]}
    again = list(itertools.islice(distinct_problems(random.Random(5), exclude), 40))
    assert again == first[10:]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("5 + 4 = 9\n#### 9", "9"),
        ("####  -12 of them", "-12"),
        ("#### 7\n#### 8", "7"),
        ("the answer is 9", None),
        ("#### none", None),
    ],
)
def test_answer_of_reads_the_number_after_the_marks(text: str, number: str | None) -> None:
    assert demo.answer_of(text) == number
