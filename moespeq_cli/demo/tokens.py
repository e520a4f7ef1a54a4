"""The tokenizer of the demo model, and documents encoded with it."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from multiprocessing import Pool
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from moespeq_cli.demo.problems import held_out_problems, make_problem, question_key

PAD, BOS, EOS = "<|pad|>", "<|bos|>", "<|eos|>"  # ids 0, 1, 2
VOCAB_SIZE = 4096
TRAINING_SEED = 7

# The pieces that byte pairs may not cross: words with the space before them, single digits, punctuation, line ends.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'user' %}{{ 'Question: ' + m['content'] | trim + '\n' }}"
    "{% elif m['role'] == 'assistant' %}{{ 'Answer: ' + m['content'] | trim + eos_token }}"
    "{% else %}{{ m['content'] | trim + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Answer:' }}{% endif %}"
)
_PROBLEMS_A_JOB = 10_000

TokenIds: TypeAlias = NDArray[np.uint16]


def train_tokenizer(corpus: Path, out: Path, sample_mb: float = 12) -> int:
    """Train the tokenizer on code, prose and problems and write its three files; returns the vocabulary's size."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, BOS, EOS],
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_tokenizer_texts(corpus, sample_mb), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    special = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        "model_max_length": 2048,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": True,
        "add_eos_token": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    (out / "special_tokens_map.json").write_text(json.dumps(special, indent=2))
    return int(tokenizer.get_vocab_size())


def encode_corpus(corpus: Path, tokenizer_folder: Path, out: Path, limits_mb: dict[str, float]) -> dict[str, int]:
    """Encode every `PART.jsonl` to `PART.bin`, a random subset where a limit is given; returns token counts."""
    tokenizer, counts = load_tokenizer(tokenizer_folder), {}
    out.mkdir(parents=True, exist_ok=True)
    for path in sorted(corpus.glob("*.jsonl")):
        documents = _documents(path)
        random.Random(5).shuffle(documents)
        if path.stem in limits_mb:
            documents = list(_first_characters(documents, limits_mb[path.stem] * 1e6))
        ids = encode_documents(tokenizer, documents)
        ids.tofile(out / f"{path.stem}.bin")
        counts[path.stem] = len(ids)
    return counts


def encode_maths(count: int, tokenizer_folder: Path, out: Path, workers: int | None = None) -> dict[str, int]:
    """Generate `count` problems, rounded up to ten thousand, none of them held out, and encode them.

    The held-out ones go to `maths.heldout.bin`. Returns token counts.
    """
    out.mkdir(parents=True, exist_ok=True)
    jobs = range(-(-count // _PROBLEMS_A_JOB))
    with Pool(workers or os.cpu_count()) as pool:
        parts = pool.starmap(_maths_job, [(job, str(tokenizer_folder)) for job in jobs], chunksize=1)
    train = np.concatenate(parts)
    train.tofile(out / "maths.train.bin")
    held_out = encode_documents(load_tokenizer(tokenizer_folder), [problem.text for problem in held_out_problems()])
    held_out.tofile(out / "maths.heldout.bin")
    return {"maths.train": len(train), "maths.heldout": len(held_out)}


def encode_documents(tokenizer: Any, documents: list[str]) -> TokenIds:
    """The token ids of all documents in one row, each framed by `<|bos|>` and `<|eos|>`."""
    bos, eos = tokenizer.token_to_id(BOS), tokenizer.token_to_id(EOS)
    parts = [np.zeros(0, dtype=np.uint16)]
    for start in range(0, len(documents), 256):
        for encoding in tokenizer.encode_batch_fast(documents[start : start + 256], add_special_tokens=False):
            parts.append(np.array([bos, *encoding.ids, eos], dtype=np.uint16))
    return np.concatenate(parts)


def load_tokenizer(folder: Path) -> Any:
    """The fast tokenizer of a checkpoint's folder, which reads special tokens within a document as plain text."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.encode_special_tokens = True  # a source file may spell one out
    return tokenizer


def _maths_job(job: int, tokenizer_folder: str) -> TokenIds:
    """The encoded problems of one job; its number seeds them."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the pool's processes already fill the cores
    held_out = {question_key(problem.question) for problem in held_out_problems()}
    rng = random.Random(TRAINING_SEED * 1_000_003 + job)
    texts: list[str] = []
    while len(texts) < _PROBLEMS_A_JOB:
        problem = make_problem(rng)
        if question_key(problem.question) not in held_out:
            texts.append(problem.text)
    return encode_documents(load_tokenizer(Path(tokenizer_folder)), texts)


def _tokenizer_texts(corpus: Path, sample_mb: float) -> Iterator[str]:
    for part in ("code", "prose"):
        documents = _documents(corpus / f"{part}.train.jsonl")
        random.Random(0).shuffle(documents)
        for document in _first_characters(documents, sample_mb * 1e6):
            yield from (document[start : start + 50_000] for start in range(0, len(document), 50_000))
    rng = random.Random(3)
    yield from (make_problem(rng).text for _ in range(20_000))


def _documents(path: Path) -> list[str]:
    with open(path, encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in lines]


def _first_characters(documents: list[str], characters: float) -> Iterator[str]:
    """Documents until they hold that many characters."""
    total = 0
    for document in documents:
        if total >= characters:
            return
        total += len(document)
        yield document
