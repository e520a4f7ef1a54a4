"""Where prompts come from, and how they become token ids."""

from __future__ import annotations

import json
import os
import select
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from runtime.errors import InputError

_PATIENCE_S = 2.0  # for a pipe on stdin that nobody announced


@dataclass(frozen=True, slots=True)
class Prompt:
    """One thing to answer.

    Attributes:
        text: plain text; None where `messages` are given.
        messages: a chat.
        id: whatever the input line called itself.
    """

    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    id: Any = None


def from_file(path: str) -> Iterator[Prompt]:
    """Prompts of a file: JSONL when its name ends so or it is `-` (stdin), else the whole text as one prompt.

    Raises:
        InputError: no such file (here); not UTF-8, or a line that is no prompt (while iterating).
    """
    if path == "-":
        return _decoded(from_jsonl(sys.stdin, "stdin"), "stdin")
    place = Path(path)
    try:
        handle = place.open(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise InputError(
            expected=f"a prompt file {path}",
            found=getattr(error, "strerror", None) or str(error),
            mend="correct --prompt-file",
        ) from None
    return _decoded(_read(handle, place), path)


def _read(handle: TextIO, place: Path) -> Iterator[Prompt]:
    with handle:
        if place.suffix in (".jsonl", ".ndjson"):
            yield from from_jsonl(handle, str(place))
        else:
            yield Prompt(handle.read())


def _decoded(prompts: Iterator[Prompt], where: str) -> Iterator[Prompt]:
    try:
        yield from prompts
    except UnicodeDecodeError as error:
        raise InputError(
            expected=f"UTF-8 text in {where}", found=f"byte {error.start}: {error.reason}", mend="convert it to UTF-8"
        ) from None


def from_jsonl(lines: TextIO, where: str) -> Iterator[Prompt]:
    """One prompt a line: a string, or an object with `prompt` or `messages` and perhaps an `id`.

    Raises:
        InputError: naming the line that is none of these.
    """
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            if isinstance(value, dict):
                json.dumps(value.get("id"), allow_nan=False)  # it goes out again, and JSON has no NaN
        except (ValueError, RecursionError) as error:
            raise _bad(where, number, f"{error}: {line.strip():.60}") from None
        if isinstance(value, str):
            yield Prompt(value)
        elif isinstance(value, dict) and isinstance(value.get("prompt"), str):
            yield Prompt(value["prompt"], id=value.get("id"))
        elif isinstance(value, dict) and _is_chat(value.get("messages")):
            yield Prompt(messages=value["messages"], id=value.get("id"))
        else:
            raise _bad(where, number, f"{line.strip():.60}")


def _is_chat(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(m, dict) and isinstance(m.get("role"), str) and "content" in m for m in value)
    )


def _bad(where: str, number: int, found: str) -> InputError:
    return InputError(
        expected='"...", {"prompt": "..."} or {"messages": [{"role": ..., "content": ...}]} '
        f"on line {number} of {where}",
        found=found,
        mend="write one of these a line, or pass plain text by --prompt or --prompt-file",
    )


def stdin_offers_prompts(wait: bool) -> bool:
    """Whether prompts come in on stdin: a redirected file, or a pipe on which something arrives.

    Args:
        wait: take a pipe's word for it, however long its writer needs.
    """
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):
        return False
    if stat.S_ISREG(mode):
        return True
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        return False
    return wait or bool(select.select([sys.stdin], [], [], _PATIENCE_S)[0])


class PromptEncoder:
    """Text and chats to token ids, with the model's own template."""

    def __init__(self, tokenizer: Any, raw: bool) -> None:
        """`raw` leaves plain text as it is, where the model has a chat template."""
        self._tokenizer = tokenizer
        self._raw = raw

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, the beginning-of-text id included where the tokenizer adds it.

        Raises:
            InputError: empty text, or a chat for a model without a template.
        """
        messages = prompt.messages
        if messages is None:
            if not (prompt.text or "").strip():
                raise InputError(
                    expected="a prompt with some text", found=repr(prompt.text), mend="pass some text to --prompt"
                )
            if self._raw or not self._tokenizer.chat_template:
                return self._ids(prompt.text or "", add_special_tokens=True)
            messages = [{"role": "user", "content": prompt.text}]
        if not self._tokenizer.chat_template:
            raise InputError(
                expected="a model with a chat template for `messages`",
                found="one without",
                mend="pass plain text as `prompt`",
            )
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates raise their own refusals, of many types
            raise InputError(
                expected="messages that the model's chat template takes", found=str(error), mend="correct the messages"
            ) from error
        return self._ids(text, add_special_tokens=False)

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                expected="a prompt of Unicode characters",
                found=f"half a surrogate pair, {text[error.start]!a}, at character {error.start}",
                mend="correct the escapes, or the encoding, of the prompt",
            ) from None
        return list(self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])
