"""The texts of a profile, by domain: read and cut as calibration texts are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from moespeq_cli.profile.measure import TextSequence, in_turn
from moespeq_cli.quantize.calibrate import Text, make_sequences, read_texts
from runtime.errors import InputError

EVERY = 1 << 31
SEED = 0  # of no effect where every piece is taken
HELD_OUT = "held-out"  # in place of a file: the embedded evaluation texts, on which nothing was calibrated
UNNAMED = "text"  # the domain of texts whose file names none


def read_domains(
    data: list[str], tokenizer: Any, samples: int, seq_len: int, vocab_size: int
) -> tuple[str, list[TextSequence]]:
    """Where the texts come from, and sequences of token ids, the domains in turn.

    Args:
        data: `FILE` or `NAME=FILE`, any number, or `held-out` alone; none takes the embedded texts. A name is the
            domain of all texts of its file; without one, a text's own `domain` counts, or else the file's name.
        tokenizer: the model's.
        samples: sequences in all, divided evenly among the domains.
        seq_len: tokens of a sequence at most.
        vocab_size: ids must lie below.

    Raises:
        InputError: a file or text that cannot be used, or fewer samples than domains.
    """
    source, texts = _read(data, tokenizer, samples)
    domains: dict[str, list[Text]] = {}
    for text in texts:
        domains.setdefault(text.domain, []).append(text)
    if samples < len(domains):
        raise InputError(
            expected=f"at least one sample for each of {len(domains)} domains ({', '.join(domains)})",
            found=f"--samples {samples}",
            mend=f"pass --samples {len(domains)} or more",
        )
    each, extra = divmod(samples, len(domains))
    sequences = []
    for place, (name, members) in enumerate(domains.items()):
        quota = each + (place < extra)
        made = make_sequences(f"{source} ({name})", members, tokenizer, EVERY, seq_len, SEED, vocab_size)
        sequences += [TextSequence(name, ids) for ids in choose(made.ids, quota, seq_len)]
    return source, in_turn(sequences)


def choose(pieces: list[Tensor], count: int, seq_len: int) -> list[Tensor]:
    """`count` pieces in their order, short ends of texts only where there are too few others."""
    by_worth = sorted(range(len(pieces)), key=lambda place: 2 * len(pieces[place]) < seq_len)
    return [pieces[place] for place in sorted(by_worth[:count])]


def _read(data: list[str], tokenizer: Any, samples: int) -> tuple[str, list[Text]]:
    if not data:
        return read_texts(None, tokenizer, samples)
    if data == [HELD_OUT]:
        return HELD_OUT, _held_out()
    sources, texts = [], []
    for item in data:
        name, path = split_name(item)
        source, read = read_texts(path, tokenizer, samples)
        sources.append(f"{name}={source}" if name else source)
        for text in read:
            own = path.stem if text.domain == UNNAMED else text.domain
            texts.append(replace(text, domain=name or own))
    return ", ".join(sources), texts


def _held_out() -> list[Text]:
    from moespeq_cli.demo import DOMAINS, evaluation_problems, evaluation_prompts

    maths = [Text("maths", problem.text) for problem in evaluation_problems()]
    return maths + [Text(name, text) for name in DOMAINS if name != "maths" for text in evaluation_prompts(name)]


def split_name(item: str) -> tuple[str, Path]:
    """`NAME=FILE` or `FILE`; a file whose name holds a `=` is meant where it exists."""
    name, mark, path = item.partition("=")
    if not mark or Path(item).exists():
        return "", Path(item)
    if not name.strip() or not path:
        raise InputError(
            expected="--data FILE or --data NAME=FILE", found=repr(item), mend="name the domain and the file"
        )
    return name.strip(), Path(path)
