"""Calibration text: what is read, how it is cut, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moespeq_cli.quantize.calibrate import (
    Text,
    choose_seq_len,
    make_sequences,
    read_texts,
)
from runtime.errors import InputError
from runtime.model.tokenizer import load_tokenizer
from tests.tiny import save_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return load_tokenizer(folder)


def cut(texts: list[Text], tokenizer: Any, **changes: Any) -> Any:
    settings = {"samples": 8, "seq_len": 10, "seed": 0, "vocab_size": 260} | changes
    return make_sequences("test", texts, tokenizer, **settings)


def test_texts_are_cut_from_their_start_without_padding(tokenizer: Any) -> None:
    sequences = cut([Text("a", "x" * 23), Text("a", "yyy")], tokenizer)
    assert [len(ids) for ids in sequences.ids] == [10, 10, 3, 3] and sequences.tokens == 26
    assert all(ids.dtype == torch.int64 for ids in sequences.ids)


def test_domains_are_drawn_from_in_turn(tokenizer: Any) -> None:
    texts = [Text("many", "m" * 200), Text("few", "f" * 20), Text("one", "o")]
    sequences = cut(texts, tokenizer, samples=9)
    firsts = "".join(tokenizer.decode(ids[:1]) for ids in sequences.ids)
    assert firsts == "mfomfmmmm"


def test_the_seed_decides_what_is_drawn_and_the_digest_tells(tokenizer: Any) -> None:
    texts = [Text("a", "".join(chr(33 + i % 90) for i in range(500)))]
    digests = [cut(texts, tokenizer, seed=seed).digest for seed in (0, 0, 1)]
    assert digests[0] == digests[1] != digests[2]


def test_jsonl_with_text_messages_and_domains(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "one", "domain": "d"}\n\n{"messages": [{"role": "user", "content": "two"}]}\n')
    tokenizer.chat_template = "{% for m in messages %}<bos>{{ m['content'] }}{% endfor %}"
    source, texts = read_texts(path, tokenizer, 8)
    assert source == "data.jsonl"
    assert texts == [Text("d", "one"), Text("text", "<bos>two", formatted=True)]
    assert [ids.tolist() for ids in cut(texts, tokenizer).ids][1] == [256, *b"two"]


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_only_newlines_end_a_line_of_jsonl(newline: str, tokenizer: Any, tmp_path: Path) -> None:
    """JSON allows these in a string as they are, and str.splitlines cuts at each of them."""
    path = tmp_path / "data.jsonl"
    bodies = ["one\u2028two", "one\u2029two", "one\x85two", "three"]
    path.write_bytes("".join(f'{{"text": "{body}"}}{newline}' for body in bodies).encode())
    assert [text.text for text in read_texts(path, tokenizer, 8)[1]] == bodies


@pytest.mark.parametrize(
    ("name", "body"), [("a.jsonl", '{"text": "it"}'), ("b.txt", '{"text": "it"}'), ("c.txt", "it")]
)
def test_a_byte_order_mark_is_no_text(name: str, body: str, tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + body.encode())
    assert read_texts(tmp_path / name, tokenizer, 8)[1] == [Text("text", "it")]


def test_plain_text(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("It was late.\n\nNobody came.\n")
    assert read_texts(path, tokenizer, 8)[1] == [Text("text", "It was late.\n\nNobody came.\n")]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("", "found nothing"),
        ('{"text": "a"}\n{"text": \n', "line 2 of"),
        ('{"text": "a"}\n{"prompt": "b"}\n', r"line 2 .*keys \['prompt'\]"),
        ('{"text": 3}\n', "line 1"),
        ('{"text": "a"}\n' + "[" * 100_000, "JSON in line 2 of"),
        ('{"text": "a"}\n{"text": "b\\ud83d"}\n', r"line 2 .*U\+D83D at character 2"),
        ('{"messages": [{"role": "nobody"}]}\n', "chat template"),
    ],
)
def test_lines_that_cannot_be_used_are_named(body: str, message: str, tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.chat_template = "{{ raise_exception('unknown role') }}"
    path = tmp_path / "data.jsonl"
    path.write_text(body)
    with pytest.raises(InputError, match=message):
        read_texts(path, tokenizer, 8)


def test_a_file_that_is_not_there_or_not_text_is_named(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="absent"):
        read_texts(tmp_path / "absent.txt", tokenizer, 8)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(InputError, match="binary"):
        read_texts(tmp_path / "binary", tokenizer, 8)


def test_ids_beyond_the_vocabulary_are_refused(tokenizer: Any) -> None:
    with pytest.raises(InputError, match="vocabulary"):
        cut([Text("a", "zebra")], tokenizer, vocab_size=100)


def test_text_without_a_token_is_refused(tokenizer: Any) -> None:
    with pytest.raises(InputError, match="none"):
        cut([Text("a", "")], tokenizer)


def test_sequence_length_defaults_to_512_or_the_context() -> None:
    assert choose_seq_len(None, 128) == 128 and choose_seq_len(None, 4096) == 512 and choose_seq_len(64, 128) == 64
    with pytest.raises(InputError, match="at most 128"):
        choose_seq_len(129, 128)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a tokenizer in"):
        load_tokenizer(tmp_path)
