"""Files that people bring: a `MoespeqError` or a right result, whatever is in them."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import save

from moespeq_cli.quantize.calibrate import make_sequences, read_texts
from moespeq_cli.run.prompts import PromptEncoder, from_file
from runtime.artifacts.checkpoint import Checkpoint
from runtime.artifacts.safetensors_file import read_header
from runtime.errors import InputError, MoespeqError
from runtime.model.families import describe
from runtime.model.loader import require_supported
from runtime.model.tokenizer import load_tokenizer
from tests.fuzz.mutations import bounded, changed, damaged
from tests.tiny import VOCAB, save_tiny

TENSORS = {"a": torch.arange(6).reshape(2, 3), "b": torch.ones(5, dtype=torch.bfloat16), "c": torch.zeros(0, 4)}
WHOLE = save(TENSORS, {"format": "pt"})
LENGTH = int.from_bytes(WHOLE[:8], "little")
HEADER = json.loads(WHOLE[8 : 8 + LENGTH])
DATA = WHOLE[8 + LENGTH :]


def file_of(header: Any) -> bytes:
    """A safetensors file with this header before the data of TENSORS."""
    text = json.dumps(header, ensure_ascii=True).encode()
    return len(text).to_bytes(8, "little") + text + DATA


def look(path: Path) -> None:
    """Read a header; what is accepted lies inside the file, in one piece, and the format's library reads the same."""
    try:
        found = read_header(path, "copy it again")
    except InputError:
        return
    size = path.stat().st_size
    ends = sorted((info.start, info.end) for info in found.values())
    assert all(8 <= start <= end <= size for start, end in ends)
    assert all(before[1] == after[0] for before, after in itertools.pairwise(ends))
    with safetensors.safe_open(path, "pt") as library:
        assert set(library.keys()) == set(found)
        for name, info in found.items():
            assert tuple(library.get_slice(name).get_shape()) == info.shape
            assert library.get_slice(name).get_dtype() == info.dtype
            assert math.prod(info.shape) >= 0


@bounded(60)
@given(header=changed(HEADER))
@example(header=HEADER | {"a": HEADER["a"] | {"shape": [2.0, 3]}})
@example(header=HEADER | {"a": HEADER["a"] | {"shape": ["2", 3]}})
@example(header=HEADER | {"a": HEADER["a"] | {"shape": [True, 6]}})
@example(header=HEADER | {"a": HEADER["a"] | {"shape": [-2, -3]}})
@example(header=HEADER | {"a": HEADER["a"] | {"shape": [2**40, 0]}})
@example(header=HEADER | {"a": HEADER["a"] | {"data_offsets": [0, 48, 1]}})
@example(header=HEADER | {"__metadata__": {"format": 3}})
def test_a_header_is_right_or_refused(header: Any, tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(file_of(header))
    look(tmp_path / "x.safetensors")


@bounded(60)
@given(data=damaged(WHOLE) | st.binary(max_size=200))
@example(data=WHOLE)
@example(data=b"")
@example(data=(2**63).to_bytes(8, "little") + b"{}")
@example(data=(2).to_bytes(8, "little") + b"{}")
@example(data=(6).to_bytes(8, "little") + b'{"a":')
@example(data=WHOLE[:8] + WHOLE[8:].replace(b'"b"', b'"a"'))
def test_a_file_is_right_or_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(data)
    look(tmp_path / "x.safetensors")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("qwen2_moe", tmp_path_factory.mktemp("fuzz") / "model", dtype=torch.bfloat16)


def config_of(kind: str) -> dict[str, Any]:
    from tests.tiny import make_config

    found: dict[str, Any] = make_config(kind).to_dict()
    return found


@bounded(50)
@given(config=changed(config_of("qwen2_moe"), most=2))
@example(config=config_of("qwen2_moe") | {"num_hidden_layers": 10**9})
@example(config=config_of("qwen2_moe") | {"num_experts": 10**9})
@example(config=config_of("qwen2_moe") | {"num_experts_per_tok": 9})
@example(config=config_of("qwen2_moe") | {"hidden_size": 10**9})
@example(config=config_of("qwen2_moe") | {"vocab_size": 10**12})
@example(config=config_of("qwen2_moe") | {"head_dim": 10**9})
@example(config=config_of("qwen2_moe") | {"num_attention_heads": 0})
@example(config=config_of("mixtral"))
def test_a_configuration_is_that_of_the_tensors_or_refused(config: Any, model: Path) -> None:
    """Sizes that the tensors belie are found before anything is made that large."""
    before = (model / "config.json").read_bytes()
    try:
        (model / "config.json").write_text(json.dumps(config))
        checkpoint = Checkpoint.open(model)
        spec = describe(checkpoint)
        require_supported(checkpoint, spec)
        assert (spec.num_layers, spec.num_experts, spec.hidden_size) == (2, 8, 64) and 1 <= spec.top_k <= 8
    except MoespeqError:
        pass
    finally:
        (model / "config.json").write_bytes(before)


INDEX = {
    "metadata": {"total_size": 1},
    "weight_map": {"a": "model-1.safetensors", "b": "model-1.safetensors", "c": "model-1.safetensors"},
}


@bounded(60)
@given(index=changed(INDEX))
@example(index={"weight_map": {"a": "../x.safetensors"}})
@example(index={"weight_map": {"a": "/etc/passwd"}})
@example(index={"weight_map": {"a": "\0"}})
@example(index={"weight_map": {"a": "n" * 300}})
@example(index={"weight_map": {"a": "."}})
@example(index={"weight_map": {}})
def test_an_index_names_files_of_its_folder_or_is_refused(index: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model-1.safetensors").write_bytes(WHOLE)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    try:
        checkpoint = Checkpoint.open(tmp_path)
    except MoespeqError:
        return
    for name, info in checkpoint.tensors.items():
        assert info.file == "model-1.safetensors" and torch.equal(checkpoint.read(name), TENSORS[name])


LINES = [
    '{"prompt": "two and two", "id": 1}', '{"messages": [{"role": "user", "content": "hello"}]}', '"plain"', "",
    '{"text": "calibration", "domain": "prose"}', '{"prompt": "\\ud800"}', '{"messages": [{"role": "user"}]}', 
    "[" * 9000,
    '{"messages": [{"role": 3, "content": {"type": "image"}}]}', '{"prompt": 3}', '{"id": "x"}', "\u2028", "1e999",
]  # fmt: skip
BODIES = (
    st.lists(st.sampled_from(LINES) | st.text(max_size=20), max_size=4)
    .map("\n".join)
    .map(lambda text: text.encode("utf-8", "surrogatepass"))
    | damaged("\n".join(LINES[:3]).encode())
    | st.binary(max_size=60)
)
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@bounded(60)
@given(body=BODIES, suffix=st.sampled_from([".jsonl", ".txt"]), template=st.booleans(), raw=st.booleans())
def test_prompts_become_ids_or_are_refused(
    body: bytes, suffix: str, template: bool, raw: bool, model: Path, tmp_path: Path
) -> None:
    path = tmp_path / f"prompts{suffix}"
    path.write_bytes(body)
    tokenizer = load_tokenizer(model)
    tokenizer.chat_template = TEMPLATE if template else None
    encoder = PromptEncoder(tokenizer, raw)
    try:
        prompts = list(from_file(str(path)))
    except InputError:
        return
    for prompt in prompts:
        try:
            ids = encoder.encode(prompt)
        except InputError:
            continue
        assert ids and all(0 <= token < VOCAB for token in ids)


@bounded(60)
@given(body=BODIES, suffix=st.sampled_from([".jsonl", ".txt", ""]), template=st.booleans())
def test_calibration_text_becomes_sequences_or_is_refused(
    body: bytes, suffix: str, template: bool, model: Path, tmp_path: Path
) -> None:
    path = tmp_path / f"text{suffix}"
    path.write_bytes(body)
    tokenizer = load_tokenizer(model)
    tokenizer.chat_template = TEMPLATE if template else None
    try:
        source, texts = read_texts(path, tokenizer, 4)
        sequences = make_sequences(source, texts, tokenizer, 4, 16, 0, VOCAB)
    except InputError:
        return
    assert 1 <= len(sequences.ids) <= 4 and all(1 <= len(ids) <= 16 for ids in sequences.ids)
