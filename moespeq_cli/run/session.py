"""Prompts through an engine to text: everything of `moespeq run` but its options."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

from moespeq_cli.run.prompts import Prompt, PromptEncoder
from runtime.artifacts.pack import Pack
from runtime.decode.sampling import SamplingSettings
from runtime.decode.text import TextStream, stop_ids
from runtime.engine import BaseEngine, Request
from runtime.errors import InputError, PlanError

Piece = Callable[[str], None]


class Session:
    """Answers prompts one after another."""

    def __init__(
        self,
        engine: BaseEngine,
        tokenizer: Any,
        sampling: SamplingSettings,
        max_new_tokens: int,
        stop: list[str],
        raw: bool,
        stop_ids: frozenset[int],
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._encoder = PromptEncoder(tokenizer, raw)
        self._sampling = sampling
        self._max_new_tokens = max_new_tokens
        self._stop = stop
        self._stop_ids = stop_ids

    def answer(self, prompt: Prompt, piece: Piece) -> dict[str, Any]:
        """Generate for one prompt.

        Args:
            prompt: what to answer.
            piece: called with each piece of text as it is certain.

        Returns:
            The result as one JSON object: text, token ids, counts, and why it ended (`stop`, `length` or `context`).
        """
        ids = self._encoder.encode(prompt)
        stream = TextStream(self._tokenizer, self._stop)
        tokens: list[int] = []
        room = self._engine.room(len(ids), self._max_new_tokens)
        started = time.perf_counter()
        generated = self._engine.generate(Request(ids, self._max_new_tokens, self._stop_ids, self._sampling))
        try:
            for token in generated:
                tokens.append(token)
                if token in self._stop_ids:
                    break
                if text := stream.push(token):
                    piece(text)
                if stream.stopped:
                    break
        finally:
            generated.close()  # type: ignore[attr-defined]
        if text := stream.finish():
            piece(text)
        stopped = stream.stopped or (bool(tokens) and tokens[-1] in self._stop_ids)
        reason = "stop" if stopped else "length" if room == self._max_new_tokens else "context"
        result: dict[str, Any] = {"id": prompt.id} if prompt.id is not None else {}
        return result | {
            "text": stream.text,
            "token_ids": tokens,
            "prompt_tokens": len(ids),
            "new_tokens": len(tokens),
            "finish_reason": reason,
            "seconds": round(time.perf_counter() - started, 4),
        }


def declared_stop_ids(pack: Pack, tokenizer: Any) -> frozenset[int]:
    """The ids that end a text, by the generation config, the config and the tokenizer together."""
    config, generation = (
        json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        for path in (pack.config_folder / "config.json", pack.config_folder / "generation_config.json")
    )
    return stop_ids(tokenizer, generation, config)


def answer_all(
    session: Session,
    prompts: Iterator[Prompt],
    piece: Piece,
    done: Callable[[dict[str, Any]], None],
    go_on: bool,
) -> int:
    """Answer every prompt.

    Args:
        session: what answers.
        prompts: in order.
        piece: called with pieces of text.
        done: called with each result.
        go_on: give a prompt that cannot be answered (empty, too long) a result with `error` and answer the others.

    Returns:
        How many prompts could not be answered.

    Raises:
        InputError, PlanError: a prompt cannot be answered and `go_on` is not set.
    """
    refused = 0
    for prompt in prompts:
        try:
            result = session.answer(prompt, piece)
        except (InputError, PlanError) as error:
            if not go_on:
                raise
            refused += 1
            result = {"id": prompt.id} if prompt.id is not None else {}
            result["error"] = {"expected": error.expected, "found": error.found, "mend": error.mend}
        done(result)
    return refused
