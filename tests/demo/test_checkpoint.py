"""The embedded checkpoint: whole, loadable, and able to answer."""

from __future__ import annotations

import json
import struct
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from moespeq_cli import demo
from moespeq_cli.demo.evaluate import Subject, evaluate, evaluation_rows

DEMO_FOLDER = Path(demo.__file__).parent
ROOT = DEMO_FOLDER.parents[1]


@pytest.fixture(scope="module")
def subject() -> Subject:
    torch.set_num_threads(1)
    return Subject(demo.checkpoint_path(), "float32", "cpu")


def test_index_names_every_tensor_of_the_shards() -> None:
    folder = demo.checkpoint_path()
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    found: dict[str, str] = {}
    for path in folder.glob("*.safetensors"):
        with open(path, "rb") as file:
            header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
            assert path.stat().st_size == file.tell() + max(ends)
        found |= {name: path.name for name in header if name != "__metadata__"}
    assert found == index


def test_model_answers_a_held_out_problem(subject: Subject) -> None:
    problem = demo.evaluation_problems()[0]
    (output,) = subject.continue_greedily([problem.prompt])
    assert output.strip() == problem.answer


def test_chat_template_renders_the_prompt_of_a_problem() -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo.checkpoint_path())
    problem = demo.evaluation_problems()[0]
    message = [{"role": "user", "content": problem.question}]
    text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    assert text == "<|bos|>" + problem.prompt


def test_evaluation_of_a_few_problems(subject: Subject) -> None:
    problems = demo.evaluation_problems()[:12]
    rows = evaluation_rows(subject, problems, None, 0, 0)
    rows = {domain: some[:12] for domain, some in rows.items()}
    result = evaluate(subject, problems, rows)
    assert result.exact_match >= 11 / 12 - 1e-4
    assert result.loss["maths"] < 0.4 < result.loss["prose"] < 6
    assert result.loss_tokens["maths"] == sum(len(row) - 1 for row in rows["maths"])
    assert len(result.wrong) == round(12 * (1 - result.exact_match))


def test_every_file_is_in_the_wheel() -> None:
    wheel = pytest.importorskip("hatchling.builders.wheel", reason="hatchling is needed to list the wheel's files")
    included = {file.distribution_path for file in wheel.WheelBuilder(str(ROOT)).recurse_included_files()}
    here = {
        path.relative_to(ROOT).as_posix()
        for path in DEMO_FOLDER.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert len([name for name in here if "/checkpoint/" in name]) == 8
    assert not here - included


def test_git_ignores_no_file() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "ls-files", "--others", "--ignored", "--exclude-standard", "--", str(DEMO_FOLDER)]
    ignored = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert not [name for name in ignored if "__pycache__" not in name]
