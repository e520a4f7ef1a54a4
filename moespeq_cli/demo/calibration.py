"""Calibration texts of the three domains that the embedded model was trained on.

Nothing of the training corpus is needed: the maths comes from the problem generator, the code from the standard
library of the running Python, the prose from passages written for this project.
"""

from __future__ import annotations

import itertools
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from moespeq_cli.demo.cleaning import clean_code
from moespeq_cli.demo.problems import distinct_problems, held_out_problems, question_key
from moespeq_cli.demo.texts import read_rows
from runtime.errors import InputError

DOMAINS = ("maths", "code", "prose")
SEPARATOR = "<|eos|><|bos|>"  # the model's tokenizer reads these as its special tokens, also within a text
CHARS_PER_TOKEN = {"maths": 2.86, "code": 3.26, "prose": 3.60}  # of these texts, by the model's tokenizer
CALIBRATION_SEED = 20_260_202

# Modules that exist in every supported Python, each long enough for a slice of its own.
STDLIB_MODULES = (
    "argparse", "ast", "base64", "bdb", "calendar", "cmd", "codecs", "configparser", "contextlib", "copy", "csv",
    "dataclasses", "datetime", "difflib", "dis", "doctest", "enum", "fileinput", "filecmp", "fnmatch", "fractions",
    "ftplib", "functools", "getopt", "gettext", "glob", "graphlib", "gzip", "hashlib", "heapq", "imaplib", "inspect",
    "ipaddress", "linecache", "mailbox", "mimetypes", "netrc", "numbers", "optparse", "pdb", "pickle",
    "pickletools", "platform", "plistlib", "poplib", "pprint", "profile", "queue", "random", "reprlib", "sched",
    "selectors", "shelve", "shlex", "shutil", "smtplib", "socket", "socketserver", "statistics", "string",
    "subprocess", "tarfile", "tempfile", "textwrap", "threading", "timeit", "tokenize", "trace", "traceback", "typing",
    "uuid", "warnings", "weakref", "zipfile",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class CalibrationText:
    """One text; documents inside it are divided by `SEPARATOR`, and a leading `<|bos|>` is left to the tokenizer."""

    domain: str
    text: str

    @property
    def plain(self) -> str:
        """The text for another model's tokenizer: documents divided by an empty line."""
        return self.text.replace(SEPARATOR, "\n\n")


def calibration_texts(count: int = 128, approx_chars: int = 1690) -> list[CalibrationText]:
    """Texts of the three domains in turn, each domain with the same number of the model's tokens.

    The same call gives the same texts under one version of Python; another version has another standard library.

    Args:
        count: number of texts; a prefix of them is as balanced as the whole.
        approx_chars: mean length of a text; the default gives about 512 tokens. A maths text is shorter and a prose
            text longer than that, as their tokens are.

    Raises:
        InputError: count or approx_chars is not positive, or the running Python has no source of its standard library.
    """
    if count < 1 or approx_chars < 1:
        raise InputError(
            expected="a positive number of texts and of characters",
            found=f"count {count}, approx_chars {approx_chars}",
            mend="ask for at least one text of at least one character",
        )
    tokens = approx_chars * len(DOMAINS) / sum(CHARS_PER_TOKEN.values())
    makers = {"maths": _maths_texts, "code": _code_texts, "prose": _prose_texts}
    streams = {domain: makers[domain](max(1, round(tokens * CHARS_PER_TOKEN[domain]))) for domain in DOMAINS}
    in_turn = itertools.islice(itertools.cycle(DOMAINS), count)
    return [CalibrationText(domain, next(streams[domain])) for domain in in_turn]


def _maths_texts(chars: int) -> Iterator[str]:
    """Problems that are not held out; every text begins with a new one, as the rows of training did."""
    exclude = {question_key(problem.question) for problem in held_out_problems()}
    documents = (problem.text for problem in distinct_problems(random.Random(CALIBRATION_SEED), exclude))
    while True:
        yield _cut(_joined(documents, chars), chars, "\n")[0]


def _prose_texts(chars: int) -> Iterator[str]:
    """A stream of passages, cut where a text is full; after the last passage they come again in another order."""
    documents = _shuffled_rounds([row["text"] for row in read_rows("prose.jsonl")])
    rest = ""
    while True:
        if len(rest) <= chars:
            rest = SEPARATOR.join(filter(None, (rest, _joined(documents, chars))))
        text, rest = _cut(rest, chars, " ")
        yield text


def _code_texts(chars: int) -> Iterator[str]:
    """A slice of a module at a time; when every module has been used, other slices of them."""
    index = 0
    while True:
        before = index
        for source in _standard_library():
            fraction = index * 0.6180339887 % 1  # spreads the slices over the beginning, middle and end of modules
            start = source.find("\n", int(fraction * max(0, len(source) - chars))) + 1
            yield _cut(source[start:], chars, "\n")[0]
            index += 1
        if index == before:
            raise InputError(
                expected="the source of Python's standard library, for calibration texts of code",
                found=f"none of {len(STDLIB_MODULES)} modules in {_library_folder()}",
                mend="install Python with its library sources, or give your own texts",
            )


def _standard_library() -> Iterator[str]:
    """Cleaned sources of the listed modules, without importing them; the missing ones are left out."""
    for name in STDLIB_MODULES:
        path = _library_folder() / f"{name}.py"
        text = clean_code(path.read_text(encoding="utf-8")) if path.is_file() else None
        if text is not None:
            yield text


def _library_folder() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _shuffled_rounds(documents: list[str]) -> Iterator[str]:
    rng = random.Random(CALIBRATION_SEED)
    while True:
        yield from rng.sample(documents, len(documents))


def _joined(documents: Iterator[str], chars: int) -> str:
    """Whole documents with separators, at least `chars` characters of them."""
    text = next(documents)
    while len(text) <= chars:
        text += SEPARATOR + next(documents)
    return text


def _cut(text: str, chars: int, mark: str) -> tuple[str, str]:
    """The text up to the last `mark` within `chars` characters, and the rest.

    A separator is not cut in two, and none is left at the end of the text or the start of the rest.
    """
    if len(text) <= chars:
        return text, ""
    end = text.rfind(mark, 1, chars + 1)
    end = chars if end < 1 else end
    inside = text.rfind(SEPARATOR, 0, end + len(SEPARATOR) - 1)
    if inside > 0 and inside + len(SEPARATOR) >= end:
        end = inside
    return text[:end], text[end:].removeprefix(SEPARATOR)
