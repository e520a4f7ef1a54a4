"""Token ids to text, piece by piece, and where the text ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

_UNFINISHED = "�"


class TextStream:
    """Turns ids into pieces of text whose concatenation is the decoding of all ids.

    A piece is held back while the last character is unfinished (an emoji may be four ids) or while it could still begin
    a stop string; `finish` flushes what is left.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        """Begin.

        Args:
            tokenizer: the library's.
            stop: strings at which the text ends; neither they nor what follows is given out.
        """
        self._tokenizer = tokenizer
        self._stop = [text for text in stop if text]
        self._ids: list[int] = []
        self._start = 0  # the ids from here on are decoded again for context
        self._read = 0  # those before here are in the text
        self._text = ""
        self._given = 0
        self.stopped = False

    @property
    def text(self) -> str:
        """Everything given out so far."""
        return self._text[: self._given]

    def push(self, token: int) -> str:
        """Add one id and return the text that is now certain, perhaps empty."""
        self._ids.append(token)
        before = self._decode(self._ids[self._start : self._read])
        after = self._decode(self._ids[self._start :])
        if len(after) > len(before) and not after.endswith(_UNFINISHED):
            self._text += after[len(before) :]
            self._start, self._read = self._read, len(self._ids)
        return self._give(final=False)

    def finish(self) -> str:
        """The rest: an unfinished character, and what might have become a stop string."""
        if not self.stopped:
            whole = self._decode(self._ids)
            if whole.startswith(self._text):
                self._text = whole
        return self._give(final=True)

    def _give(self, final: bool) -> str:
        if self.stopped:
            return ""
        places = [place for text in self._stop if (place := self._text.find(text)) >= 0]
        if places:
            self.stopped = True
            self._text = self._text[: min(places)]
            end = len(self._text)
        else:
            end = len(self._text) if final else len(self._text) - self._held()
        piece = self._text[self._given : max(end, self._given)]
        self._given = max(end, self._given)
        return piece

    def _held(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        return max((n for text in self._stop for n in range(1, len(text)) if self._text.endswith(text[:n])), default=0)

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text


def stop_ids(tokenizer: Any, generation_config: dict[str, Any], config: dict[str, Any]) -> frozenset[int]:
    """Every id that any part of a model folder declares to end the text."""
    ids: set[int] = set()
    for value in (generation_config.get("eos_token_id"), config.get("eos_token_id"), tokenizer.eos_token_id):
        ids.update(_as_ids(value))
    return frozenset(ids)


def _as_ids(value: Any) -> Iterable[int]:
    if isinstance(value, int) and not isinstance(value, bool):
        return [value]
    return [item for item in value if isinstance(item, int)] if isinstance(value, list | tuple) else []
