"""Calibration and evaluation texts: deterministic, balanced, disjoint."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from moespeq_cli import demo
from moespeq_cli.demo import calibration
from moespeq_cli.demo.texts import read_rows
from runtime.errors import InputError


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(demo.checkpoint_path() / "tokenizer.json"))


@pytest.fixture(scope="module")
def texts() -> list[demo.CalibrationText]:
    return demo.calibration_texts()


def test_same_call_gives_same_texts_also_in_another_process(texts: list[demo.CalibrationText]) -> None:
    assert demo.calibration_texts() == texts
    script = (
        "import hashlib; from moespeq_cli import demo; "
        "print(hashlib.sha256(repr(demo.calibration_texts()).encode()).hexdigest())"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(demo.__file__).parents[2])},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert runs[0] == runs[1]


def test_domains_have_equal_numbers_of_tokens(texts: list[demo.CalibrationText], tokenizer: Tokenizer) -> None:
    tokens: dict[str, list[int]] = defaultdict(list)
    for text in texts:
        tokens[text.domain].append(len(tokenizer.encode(text.text).ids))
    totals = {domain: sum(counts) for domain, counts in tokens.items()}
    assert set(totals) == set(demo.DOMAINS)
    assert max(totals.values()) < 1.05 * min(totals.values()), totals  # the three domains share 128 texts 43 : 43 : 42
    assert 480 < sum(totals.values()) / len(texts) < 540
    assert max(max(counts) for counts in tokens.values()) < 2048  # the model's context


def test_separators_become_special_tokens(texts: list[demo.CalibrationText], tokenizer: Tokenizer) -> None:
    for text in texts:
        ids = tokenizer.encode(text.text).ids
        documents = text.text.count(demo.SEPARATOR) + 1
        assert ids[0] == 1 and ids.count(1) == documents and ids.count(2) == documents - 1
        assert "<|" not in text.plain
        assert not text.text.startswith("<|") and not text.text.endswith("|>")


def test_maths_texts_hold_no_held_out_question(texts: list[demo.CalibrationText]) -> None:
    held_out = [problem.question for problem in demo.evaluation_problems()]
    maths = [text.text for text in texts if text.domain == "maths"]
    assert all(text.startswith("Question: ") for text in maths)
    everything = "\n".join(maths)
    assert not [question for question in held_out if question in everything]


def test_code_texts_are_slices_of_the_standard_library(texts: list[demo.CalibrationText]) -> None:
    code = [text.text for text in texts if text.domain == "code"]
    sources = list(calibration._standard_library())
    assert len(set(code)) == len(code)
    assert all(any(text in source for source in sources) for text in code)


def test_texts_are_made_in_less_than_a_second() -> None:
    start = time.process_time()
    demo.calibration_texts()
    assert time.process_time() - start < 1


@pytest.mark.parametrize(("count", "approx_chars"), [(1, 1), (2, 10), (7, 25), (12, 5000), (300, 120)])
def test_any_count_and_length(count: int, approx_chars: int) -> None:
    texts = demo.calibration_texts(count, approx_chars)
    assert len(texts) == count
    assert [text.domain for text in texts] == [demo.DOMAINS[i % 3] for i in range(count)]
    assert all(text.text and len(text.text) <= 1.3 * approx_chars + 1 for text in texts)


@pytest.mark.parametrize(("count", "approx_chars"), [(0, 100), (-1, 100), (4, 0)])
def test_refuses_what_is_not_positive(count: int, approx_chars: int) -> None:
    with pytest.raises(InputError, match="positive number"):
        demo.calibration_texts(count, approx_chars)


def test_missing_modules_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = calibration._library_folder() / "argparse.py"
    (tmp_path / "argparse.py").write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(calibration, "_library_folder", lambda: tmp_path)
    assert len({text.text for text in demo.calibration_texts(12) if text.domain == "code"}) == 4
    (tmp_path / "argparse.py").unlink()
    with pytest.raises(InputError, match="source of Python's standard library"):
        demo.calibration_texts(12)


def test_prose_passages_differ_and_have_the_length_of_a_paragraph() -> None:
    passages = [row["text"] for row in read_rows("prose.jsonl")]
    words = [len(passage.split()) for passage in passages]
    assert len(passages) >= 36 and len(set(passages)) == len(passages)
    assert min(words) >= 120 and max(words) <= 250
    assert all(passage.isascii() for passage in passages)  # as training saw quotes and dashes


def test_no_sentence_occurs_twice_in_prose_and_its_prompts() -> None:
    texts = [row["text"] for row in read_rows("prose.jsonl")] + demo.evaluation_prompts("prose")
    runs: dict[str, int] = {}
    for index, text in enumerate(texts):
        words = text.split()
        for start in range(len(words) - 7):
            run = " ".join(words[start : start + 8])
            assert runs.setdefault(run, index) == index, run


def test_prompts() -> None:
    maths, code, prose = (demo.evaluation_prompts(domain) for domain in demo.DOMAINS)
    assert (len(maths), len(code), len(prose)) == (500, 50, 50)
    assert all(prompt.startswith("Question: ") and prompt.endswith("\nAnswer:") for prompt in maths)
    assert all(prompt.startswith("def ") and prompt.endswith('"""\n') for prompt in code)
    assert all(40 <= len(prompt.split()) <= 50 for prompt in prose)
    assert len(set(code)) == len(set(prose)) == 50
    with pytest.raises(InputError, match="one of the domains maths, code, prose"):
        demo.evaluation_prompts("poetry")


def test_import_is_light() -> None:
    script = "import sys, moespeq_cli.demo; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    root = str(Path(demo.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", script], env={"PYTHONPATH": root}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
