"""Ids to text, piece by piece (H17), and which ids end it (H16)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.decode.text import TextStream, stop_ids
from tests.tiny import EOS, save_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


def pieces(tokenizer: Any, ids: list[int], *stop: str) -> tuple[list[str], TextStream]:
    """What comes out for each id, and at the end."""
    stream = TextStream(tokenizer, stop)
    out = [stream.push(token) for token in ids]
    return [*out, stream.finish()], stream


@pytest.mark.parametrize(
    "text", ["😀", "漢字", "  two spaces", " a\n\n b ", "é€😀", "🏴‍☠️ flag", "🤔", "\ufffd kept", "naïve 漢 ok"]
)
def test_joined_pieces_are_the_whole_text(tokenizer: Any, text: str) -> None:
    out, stream = pieces(tokenizer, list(text.encode()))
    assert "".join(out) == text == stream.text
    assert not any("\ufffd" in piece for piece in out) or "\ufffd" in text


def test_characters_come_whole_and_at_once(tokenizer: Any) -> None:
    out, _ = pieces(tokenizer, list("a😀漢 b".encode()))
    assert out == ["a", "", "", "", "😀", "", "", "漢", " ", "b", ""]


def test_unfinished_character_at_the_end_is_flushed(tokenizer: Any) -> None:
    out, stream = pieces(tokenizer, list("ok 😀".encode())[:-1])
    assert out[-1] == "\ufffd" and stream.text == "ok \ufffd"
    out, _ = pieces(tokenizer, [0xFF, 0x41, 0xC3])
    assert "".join(out) == tokenizer.decode([0xFF, 0x41, 0xC3])


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.one_of(st.integers(0, 259), st.sampled_from(list("😀漢é ".encode()))), max_size=30))
def test_any_ids_give_the_text_of_the_whole(tokenizer: Any, ids: list[int]) -> None:
    out, stream = pieces(tokenizer, ids)
    whole = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert "".join(out) == whole == stream.text


@settings(max_examples=150, deadline=None)
@given(
    text=st.text(alphabet="ab😀 \n", max_size=20),
    stop=st.lists(st.text(alphabet="ab😀 \n", min_size=1, max_size=4), max_size=3),
)
def test_text_ends_before_the_first_stop_text(tokenizer: Any, text: str, stop: list[str]) -> None:
    stream, out, read = TextStream(tokenizer, stop), "", 0
    for token in text.encode():
        out += stream.push(token)
        read += 1
        if stream.stopped:
            break
    out += stream.finish()
    seen = text.encode()[:read].decode()  # a stop text ends with a whole character
    places = [place for s in stop if (place := seen.find(s)) >= 0]
    assert out == stream.text == seen[: min(places, default=len(seen))]
    assert stream.stopped == any(s in text for s in stop)


def test_what_may_become_a_stop_text_is_held_back(tokenizer: Any) -> None:
    out, stream = pieces(tokenizer, list(b"x##y####"), "###")
    assert out[:5] == ["x", "", "", "##y", ""]
    assert "".join(out) == "x##y" and stream.stopped
    out, stream = pieces(tokenizer, list(b"end##"), "###")
    assert "".join(out) == "end##" and not stream.stopped


def test_empty_stop_text_stops_nothing(tokenizer: Any) -> None:
    out, stream = pieces(tokenizer, list(b"abc"), "")
    assert "".join(out) == "abc" and not stream.stopped


def test_special_ids_are_no_text(tokenizer: Any) -> None:
    assert "".join(pieces(tokenizer, [256, 72, 105, 258, 33, 257])[0]) == "Hi!"


def test_stop_ids_are_collected_from_everywhere(tokenizer: Any) -> None:
    assert stop_ids(tokenizer, {}, {}) == {EOS}
    assert stop_ids(tokenizer, {"eos_token_id": [3, 4]}, {"eos_token_id": 5}) == {3, 4, 5, EOS}
    assert stop_ids(tokenizer, {"eos_token_id": None}, {"eos_token_id": [6]}) == {6, EOS}
    without = type("T", (), {"eos_token_id": None})()
    assert stop_ids(without, {"eos_token_id": True}, {}) == frozenset()


def test_decoding_costs_do_not_grow_with_the_text(tokenizer: Any) -> None:
    """Each id is decoded with its neighbours, not with the whole text before it."""
    longest = 0

    class Counting:
        def decode(self, ids: list[int], **options: Any) -> str:
            nonlocal longest
            longest = max(longest, len(ids))
            return str(tokenizer.decode(ids, **options))

    stream = TextStream(Counting())
    for token in ("word 😀 " * 40).encode():
        stream.push(token)
    assert longest <= 12


def test_blanks_of_a_tokenizer_that_marks_words_survive() -> None:
    """A tokenizer that joins words with a leading blank: the blank of the second word survives."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.WordLevel({"▁a": 0, "▁b": 1, "c": 2, "<unk>": 3}, unk_token="<unk>"))
    raw.decoder = decoders.Metaspace()
    words = PreTrainedTokenizerFast(tokenizer_object=raw)
    out, _ = pieces(words, [0, 1, 2, 0])
    assert "".join(out) == words.decode([0, 1, 2, 0]) == "a bc a"
