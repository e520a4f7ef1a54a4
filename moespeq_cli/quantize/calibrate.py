"""Calibration text: read from a file or taken from the package, cut into sequences of token ids."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtime.errors import InputError, brief

EMBEDDED = "embedded"
DEFAULT_SEQ_LEN = 512


@dataclass(frozen=True, slots=True)
class Text:
    """One text to calibrate with."""

    domain: str
    text: str
    formatted: bool = False  # the chat template has put special tokens in already


@dataclass(frozen=True, slots=True)
class Sequences:
    """Token ids to run the model on, one item a sequence, nothing padded."""

    source: str  # "embedded" or the file's name
    ids: list[Tensor]  # int64 [T_i]
    seq_len: int
    seed: int

    @property
    def tokens(self) -> int:
        """Tokens in all sequences."""
        return sum(len(sequence) for sequence in self.ids)

    @property
    def digest(self) -> str:
        """sha256 of the lengths and the ids: equal digests mean equal calibration."""
        digest = hashlib.sha256()
        for sequence in self.ids:
            digest.update(len(sequence).to_bytes(8, "little"))
            digest.update(sequence.to(torch.int64).contiguous().numpy().tobytes())
        return digest.hexdigest()


def read_texts(data: Path | None, tokenizer: Any, samples: int) -> tuple[str, list[Text]]:
    """Calibration texts and the name of where they come from.

    Args:
        data: a file: JSONL with `text` or `messages` in each line (and maybe `domain`), or else plain text. None takes
            the embedded texts.
        tokenizer: renders `messages`.
        samples: how many texts are wanted of the embedded ones.

    Raises:
        InputError: no such file, nothing in it, or a line that is neither.
    """
    if data is None:
        return EMBEDDED, _embedded_texts(tokenizer, samples)
    try:
        body = data.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            expected=f"a UTF-8 text or JSONL file at {data}", found=str(error), mend="pass another file with --data"
        ) from None
    if data.suffix in (".jsonl", ".ndjson", ".json") or body.lstrip().startswith('{"'):
        texts = [
            _jsonl_text(line, f"line {number} of {data}", tokenizer)
            for number, line in enumerate(body.split("\n"), 1)  # splitlines would cut at U+2028 in a string
            if line.strip()
        ]
    else:
        texts = [Text("text", body)] if body.strip() else []
    if not texts:
        raise InputError(expected=f"text in {data}", found="nothing", mend="pass another file with --data")
    return data.name, texts


def make_sequences(
    source: str, texts: list[Text], tokenizer: Any, samples: int, seq_len: int, seed: int, vocab_size: int
) -> Sequences:
    """Cut texts into at most `samples` sequences of at most `seq_len` tokens.

    Every text is cut from its start; a short end or a short text is a short sequence. Where there are more pieces than
    wanted, the domains are drawn from in turn, so that none crowds out another, and pieces under half the length are
    taken only where there are too few others.

    Raises:
        InputError: no token at all, or ids that the model has no embedding for.
    """
    domains: dict[str, list[Tensor]] = {}
    for text in texts:
        ids = tokenizer(text.text, add_special_tokens=not text.formatted, verbose=False)["input_ids"]
        for start in range(0, len(ids), seq_len):
            domains.setdefault(text.domain, []).append(torch.tensor(ids[start : start + seq_len], dtype=torch.int64))
    chosen = _in_turn(list(domains.values()), samples, seq_len, random.Random(seed))
    if not chosen:
        raise InputError(
            expected=f"tokens to calibrate with in {source}", found="none", mend="pass other text with --data"
        )
    highest = max(int(sequence.max()) for sequence in chosen)
    if highest >= vocab_size:
        raise InputError(
            expected=f"token ids below the model's vocabulary size, {vocab_size}",
            found=f"id {highest} from the tokenizer",
            mend="use the tokenizer that belongs to the model",
        )
    return Sequences(source, chosen, seq_len, seed)


def choose_seq_len(asked: int | None, context: int | None) -> int:
    """The length of sequences: what was asked for, or 512, or the model's context where that is shorter.

    Raises:
        InputError: a length that the model's context does not hold.
    """
    if asked is None:
        return min(DEFAULT_SEQ_LEN, context or DEFAULT_SEQ_LEN)
    if context is not None and asked > context:
        raise InputError(
            expected=f"--seq-len of at most {context}, the model's context",
            found=str(asked),
            mend=f"pass --seq-len {context} or less",
        )
    return asked


def _embedded_texts(tokenizer: Any, samples: int) -> list[Text]:
    from moespeq_cli.demo.calibration import SEPARATOR, calibration_texts

    ids = tokenizer(SEPARATOR, add_special_tokens=False)["input_ids"]
    known = ids == [tokenizer.eos_token_id, tokenizer.bos_token_id]
    return [Text(item.domain, item.text if known else item.plain) for item in calibration_texts(samples)]


def _jsonl_text(line: str, where: str, tokenizer: Any) -> Text:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(expected=f"JSON in {where}", found=str(error), mend="write one JSON object a line") from None
    fields = record if isinstance(record, dict) else {}
    domain = str(fields.get("domain", "text"))
    if isinstance(fields.get("text"), str):
        return Text(domain, _encodable(fields["text"], where))
    if isinstance(fields.get("messages"), list):
        try:
            text = tokenizer.apply_chat_template(fields["messages"], tokenize=False)
        except Exception as error:  # a template is a program: it raises whatever it likes
            raise InputError(
                expected=f"messages in {where} that the model's chat template renders",
                found=brief(error),
                mend="give `text` instead of `messages`",
            ) from error
        return Text(domain, _encodable(str(text), where), formatted=True)
    raise InputError(
        expected=f"an object with `text` or `messages` in {where}",
        found=f"keys {sorted(fields)}" if fields else type(record).__name__,
        mend='write each line as {"text": ...} or {"messages": [...]}',
    )


def _encodable(text: str, where: str) -> str:
    """Refuse half of a surrogate pair, which JSON's escapes can spell and no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            expected=f"text of whole characters in {where}",
            found=f"the lone surrogate U+{ord(text[error.start]):04X} at character {error.start + 1}",
            mend="correct the line, or leave it out",
        ) from None
    return text


def _in_turn(groups: list[list[Tensor]], count: int, seq_len: int, generator: random.Random) -> list[Tensor]:
    """`count` pieces, one of each group in turn; a group with too many is drawn from at random, in its own order."""
    quotas = [0] * len(groups)
    while sum(quotas) < min(count, sum(map(len, groups))):
        for place, group in enumerate(groups):
            if quotas[place] < len(group) and sum(quotas) < count:
                quotas[place] += 1
    drawn = []
    for quota, group in zip(quotas, groups, strict=True):
        drawn.append([group[place] for place in sorted(_draw(group, quota, seq_len, generator))])
    longest = max(map(len, drawn), default=0)
    return [group[turn] for turn in range(longest) for group in drawn if turn < len(group)]


def _draw(group: list[Tensor], quota: int, seq_len: int, generator: random.Random) -> list[int]:
    """Places of `quota` pieces at random, short ones last."""
    places = list(range(len(group)))
    generator.shuffle(places)
    return sorted(places, key=lambda place: 2 * len(group[place]) < seq_len)[:quota]
