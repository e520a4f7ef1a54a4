"""Cleaning of source files and books, shared by the training corpus and the calibration texts."""

from __future__ import annotations

import ast
import re
import textwrap

_TYPOGRAPHY = (
    ("\u2018", "'"), ("\u2019", "'"), ("\u201c", '"'), ("\u201d", '"'), ("\u2014", "--"), ("\u2013", "-"),
    ("\u2026", "..."), ("\u00a0", " "), ("\ufeff", ""), ("\r\n", "\n"), ("&nbsp;", " "), ("&amp;", "&"),
)  # fmt: skip


def clean_code(text: str) -> str | None:
    """A Python file without its leading comments, or None where it is not worth learning from.

    Left out are files that are very short or long, that hold more than 0.2 % of non-ASCII characters or 12 % of
    digits (tables), or whose lines are longer than people write them.
    """
    text = text.replace("\r\n", "\n").expandtabs(4)
    if not 400 <= len(text) <= 120_000 or _non_ascii(text) > 0.002 * len(text):
        return None
    lines = text.split("\n")
    first = next((i for i, line in enumerate(lines) if line.strip() and not line.startswith("#")), len(lines))
    lines = [line.rstrip() for line in lines[first:]]  # before it: coding lines and licence headers
    if not lines or max(map(len, lines)) > 400 or sum(map(len, lines)) > 60 * len(lines):
        return None
    text = "\n".join(lines).strip() + "\n"
    if len(text) < 300 or sum(map(text.count, "0123456789")) > 0.12 * len(text):
        return None
    return text


def functions_of(text: str) -> list[str]:
    """Functions and methods of a file that have a docstring and a body, dedented, 120 to 1800 characters long."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):  # a file for another Python still counts as text
        return []
    lines, found = text.split("\n"), []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) and len(node.body) > 1:
            source = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])).strip()
            if 120 <= len(source) <= 1800 and source.startswith("def "):
                found.append(source + "\n")
    return found


def clean_prose(text: str) -> tuple[int | None, str]:
    """The year of a book (from a line `## Year: n`, None without one) and its text, one line a paragraph.

    Markdown marks go, typographic quotes and dashes become ASCII, and a header that ends in `-------` is dropped.
    """
    match = re.search(r"^## Year: *(-?\d+)", text, re.MULTILINE)
    year = int(match.group(1)) if match else None
    if "-------" in text[:2000]:
        text = text.split("-------", 1)[1]
    for typographic, plain in _TYPOGRAPHY:
        text = text.replace(typographic, plain)
    text = re.sub(r"^#+ *", "", text, flags=re.MULTILINE)
    text = re.sub(r"[_*\\]", "", text)
    text = re.sub(r"[ \t]+", " ", text)
    text = re.sub(r" *\n *", "\n", text)
    text = re.sub(r"(?<=[^\n])\n(?=[^\n])", " ", text)
    text = re.sub(r"\n{2,}", "\n\n", text)
    return year, text.strip() + "\n"


def is_english_book(text: str) -> bool:
    """Whether a cleaned text is long enough for a book, nearly all ASCII, and English by its commonest words."""
    if len(text) < 20_000 or _non_ascii(text) > 0.005 * len(text):
        return False
    return len(re.findall(r"\b(the|and|of|to|was)\b", text)) >= 0.08 * max(1, text.count(" "))


def _non_ascii(text: str) -> int:
    return 0 if text.isascii() else sum(ord(c) > 127 for c in text)
