"""Prepare the training data of the demo model.

    python -m moespeq_cli.demo.corpus clean     --code PACKAGE... --prose BOOKS --out corpus
    python -m moespeq_cli.demo.corpus tokenizer --corpus corpus --out checkpoint
    python -m moespeq_cli.demo.corpus encode    --corpus corpus --tokenizer checkpoint --out tokens
    python -m moespeq_cli.demo.corpus maths     --count 1500000 --tokenizer checkpoint --out tokens

`clean` writes `{code,snippets,prose}.{train,heldout}.jsonl`, one document a line. `encode` and `maths` write one
`NAME.bin` of little-endian uint16 token ids for each, every document framed as `<|bos|> ... <|eos|>`; they are what
`python -m moespeq_cli.demo.train` reads. docs/demo_model.md names the sources and their licences.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

from moespeq_cli.demo.cleaning import clean_code, clean_prose, functions_of, is_english_book
from moespeq_cli.demo.tokens import encode_corpus, encode_maths, train_tokenizer

HELD_OUT_CODE = 0.01  # share of the files
HELD_OUT_BOOKS = 8
LAST_YEAR = 1925  # books first published later are left out
TEST_SHARE = 0.25  # tests repeat themselves, so most of them are left out

_SKIPPED_CODE = re.compile(
    r"(^|/)(lib2to3/tests|encodings|idlelib/idle_test|test/(data|encoded_modules)|_vendor|vendored?|externals?|"
    r"migrations|locale|conf/locale|test_data|testdata|sample_data)(/|$)|_pb2|_nonunicode|/badsyntax|parsetab|lextab"
)
_TEST_CODE = re.compile(r"(^|/)(tests?|testing)(/|$)|/test_")


class CorpusWriter:
    """JSON lines files of documents, opened when their first document comes; counts documents and characters."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.counts: dict[str, tuple[int, int]] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, part: str, name: str, text: str) -> None:
        """Append one document to the file of its part."""
        documents, characters = self.counts.get(part, (0, 0))
        with open(self.folder / f"{part}.jsonl", "a" if documents else "w", encoding="utf-8") as file:
            file.write(json.dumps({"name": name, "text": text}) + "\n")
        self.counts[part] = (documents + 1, characters + len(text))


def clean(code: list[Path], prose: Path, out: Path) -> dict[str, tuple[int, int]]:
    """Write the cleaned corpus; returns the number of documents and of characters of each part."""
    writer = CorpusWriter(out)
    seen: set[str] = set()
    for name, raw in code_files(code):
        text = clean_code(raw)
        if text is None or not _is_new(text, seen):
            continue
        part = "heldout" if _share_of(name) < HELD_OUT_CODE else "train"
        writer.write(f"code.{part}", name, text)
        for function in functions_of(text):
            if _is_new(function, seen):
                writer.write(f"snippets.{part}", name, function)
    found = list(books(prose))
    random.Random(1).shuffle(found)
    for index, (name, text) in enumerate(found):
        writer.write("prose.heldout" if index < HELD_OUT_BOOKS else "prose.train", name, text)
    return writer.counts


def code_files(folders: list[Path]) -> Iterator[tuple[str, str]]:
    """Name and text of the Python files of packages, without vendored and generated files and most tests."""
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            name = f"{folder.name}/{path.relative_to(folder).as_posix()}"
            if _SKIPPED_CODE.search(name) or "site-packages" in path.relative_to(folder).parts:
                continue
            if _TEST_CODE.search(name) and _share_of("t" + name) >= TEST_SHARE:
                continue
            try:
                yield name, path.read_text(encoding="utf-8")
            except UnicodeDecodeError:  # a test file in another encoding teaches nothing
                continue


def books(folder: Path) -> Iterator[tuple[str, str]]:
    """Name and cleaned text of the English books of a folder of Markdown or plain text files."""
    for path in sorted(folder.rglob("*")):
        if path.suffix not in (".md", ".txt") or path.stem.upper() == "README":
            continue
        year, text = clean_prose(path.read_text(encoding="utf-8", errors="replace"))
        if (year is None or year <= LAST_YEAR) and is_english_book(text):
            yield path.relative_to(folder).as_posix(), text


def _is_new(text: str, seen: set[str]) -> bool:
    """Whether no text before was the same but for white space; remembers this one."""
    key = hashlib.blake2b(re.sub(r"\s+", "", text).encode(), digest_size=8).hexdigest()
    new = key not in seen
    seen.add(key)
    return new


def _share_of(name: str) -> float:
    """A number from 0 to 1 that depends on the name alone."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big") / 2**32


def _limits(pairs: list[str]) -> dict[str, float]:
    return {name: float(megabytes) for name, megabytes in (pair.split("=") for pair in pairs)}


def parser() -> argparse.ArgumentParser:
    """The command line of this module."""
    main = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = main.add_subparsers(dest="command", required=True)
    command = commands.add_parser("clean", help="clean packages and books")
    command.add_argument("--code", nargs="+", type=Path, required=True, metavar="PACKAGE")
    command.add_argument("--prose", type=Path, required=True, metavar="BOOKS")
    command.add_argument("--out", type=Path, required=True)
    command = commands.add_parser("tokenizer", help="train the byte-level BPE tokenizer")
    command.add_argument("--corpus", type=Path, required=True)
    command.add_argument("--out", type=Path, required=True)
    command.add_argument("--sample-mb", type=float, default=12, help="of code and of prose")
    command = commands.add_parser("encode", help="encode the cleaned corpus")
    command.add_argument("--corpus", type=Path, required=True)
    command.add_argument("--tokenizer", type=Path, required=True)
    command.add_argument("--out", type=Path, required=True)
    command.add_argument("--limit", nargs="*", default=[], metavar="PART=MB", help="for example prose.train=125")
    command = commands.add_parser("maths", help="generate and encode word problems")
    command.add_argument("--count", type=int, default=1_500_000)
    command.add_argument("--tokenizer", type=Path, required=True)
    command.add_argument("--out", type=Path, required=True)
    command.add_argument("--workers", type=int, help="processes, default one a core")
    return main


def main(argv: list[str] | None = None) -> None:
    """Run one command and print what it made."""
    args = parser().parse_args(argv)
    if args.command == "clean":
        for part, (documents, characters) in sorted(clean(args.code, args.prose, args.out).items()):
            print(f"{part:18s} {documents:7d} documents {characters / 1e6:8.2f} MB")
    elif args.command == "tokenizer":
        print("vocabulary", train_tokenizer(args.corpus, args.out, args.sample_mb))
    else:
        if args.command == "encode":
            counts = encode_corpus(args.corpus, args.tokenizer, args.out, _limits(args.limit))
        else:
            counts = encode_maths(args.count, args.tokenizer, args.out, args.workers)
        for part, tokens in counts.items():
            print(f"{part:18s} {tokens / 1e6:8.2f} M tokens")


if __name__ == "__main__":
    main()
