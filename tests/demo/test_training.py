"""The recipe in small: corpus, tokenizer, training model and export."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from moespeq_cli import demo
from moespeq_cli.demo import corpus, tokens
from moespeq_cli.demo.cleaning import clean_code, clean_prose, functions_of
from moespeq_cli.demo.export import check_agreement, transformers_config, transformers_state
from moespeq_cli.demo.network import DemoModel, Shape
from moespeq_cli.demo.rows import TokenStream, documents_of, even_rows
from moespeq_cli.demo.texts import read_rows
from moespeq_cli.demo.train import Settings, domain_slices, learning_rate, split_rows, train
from runtime.errors import InputError

TINY = Shape(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=16,
    max_position_embeddings=128,
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def token_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Streams of every part, made of the embedded texts by the model's own tokenizer."""
    folder = tmp_path_factory.mktemp("tokens")
    tokenizer = tokens.load_tokenizer(demo.checkpoint_path())
    texts = {
        domain: [
            document
            for text in demo.calibration_texts(24)
            if text.domain == domain
            for document in text.text.split(demo.SEPARATOR)
        ]
        for domain in demo.DOMAINS
    }
    texts["snippets"] = demo.evaluation_prompts("code") * 2
    for name, documents in texts.items():
        ids = tokens.encode_documents(tokenizer, documents)
        ids.tofile(folder / f"{name}.train.bin")
        ids.tofile(folder / f"{name}.heldout.bin")
    return folder


def test_training_model_and_transformers_agree() -> None:
    agreement = check_agreement(TINY, tokens=24)
    assert agreement.close, agreement
    assert set(agreement.logits) == {"dense float32", "dense bfloat16", "grouped float32", "grouped bfloat16"}
    assert agreement.gradients > 0  # the two ways of computing experts really differ


def test_default_shape_is_that_of_the_checkpoint() -> None:
    config = json.loads((demo.checkpoint_path() / "config.json").read_text())
    ours = transformers_config(Shape()).to_dict()
    names = [name for name in config if name not in ("architectures", "dtype", "transformers_version")]
    assert {name: ours[name] for name in names} == {name: config[name] for name in names}


@pytest.mark.parametrize("experts", ["dense", "grouped"])
def test_training_lowers_the_loss_and_writes_a_checkpoint(token_folder: Path, tmp_path: Path, experts: str) -> None:
    settings = Settings(
        steps=30,
        experts=experts,
        compile=False,
        warmup_steps=5,
        batch_tokens=512,
        row_tokens=32,
        long_row_tokens=64,
        log_every=10,
    )
    model = train(settings, token_folder, tmp_path, "cpu", TINY)
    log = [json.loads(line) for line in (tmp_path / "train_log.jsonl").read_text().splitlines()]
    assert [line.get("step") for line in log] == [None, 10, 20, 30, 30]
    assert all(log[3]["loss"][domain] < log[1]["loss"][domain] for domain in demo.DOMAINS)
    assert log[1]["row_tokens"] == 32 and log[3]["row_tokens"] == 64
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint", dtype=torch.float32)
    assert torch.equal(again.model.norm.weight, model.norm.weight.to(torch.bfloat16).float())


def test_batch_shares_cover_every_row() -> None:
    for rows in (4, 16, 64, 128):
        counts = split_rows(rows)
        assert sum(counts.values()) == rows and min(counts.values()) >= 1
        slices = domain_slices(counts)
        assert [index for part in slices.values() for index in range(rows)[part]] == list(range(rows))


def test_learning_rate_warms_up_and_decays() -> None:
    settings = Settings(learning_rate=1.0, warmup_steps=10, final_rate=0.1)
    assert learning_rate(settings, 0, 0.0) == pytest.approx(0.1)
    assert learning_rate(settings, 9, 0.0) == pytest.approx(1.0)
    assert learning_rate(settings, 50, 0.5) == pytest.approx(0.55)
    assert learning_rate(settings, 99, 1.0) == pytest.approx(0.1)


def test_aligned_rows_begin_with_a_document() -> None:
    ids = np.concatenate([[1, *range(10, 10 + length), 2] for length in (5, 9, 3, 12, 7)]).astype(np.uint16)
    rows = TokenStream(ids, "cpu", aligned=True, seed=0).rows(200, 6)
    assert rows.shape == (200, 7) and (rows[:, 0] == 1).all()
    assert {int(row[1]) for row in rows} == {10}


def test_unaligned_rows_cover_a_stream_once_an_epoch() -> None:
    ids = np.arange(3, 3 + 100, dtype=np.uint16)
    stream = TokenStream(ids, "cpu", aligned=False, seed=0)
    rows = stream.rows(9, 10)
    assert (rows[:, 0] == 1).all()
    assert len(set(rows[:, 1:].flatten().tolist())) == 90
    with pytest.raises(InputError, match="10 rows of 10 tokens"):
        stream.rows(10, 10)


def test_rows_for_evaluation() -> None:
    ids = np.array([1, 5, 6, 2, 1, 7, 2], dtype=np.uint16)
    assert documents_of(ids) == [[1, 5, 6, 2], [1, 7, 2]]
    rows = even_rows(np.arange(1000, dtype=np.uint16), 4, 50)
    assert [row[:3] for row in rows] == [[1, 0, 1], [1, 237, 238], [1, 474, 475], [1, 711, 712]]
    assert {len(row) for row in rows} == {50}


def test_corpus_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package, books, out = tmp_path / "package", tmp_path / "books", tmp_path / "corpus"
    package.mkdir()
    books.mkdir()
    sources = [Path(str(source.__file__)).read_text() for source in (corpus, tokens)]
    for index, source in enumerate([*sources, sources[0]]):  # the last is a copy of the first
        (package / f"module{index}.py").write_text(source)
    passages = "\n\n".join(row["text"] for row in read_rows("prose.jsonl"))
    for index in range(9):
        (books / f"{index}.md").write_text(f"# Title\n## Year: {1900 + index}\n-------\n{index}\n\n{passages}")
    (books / "late.md").write_text(f"## Year: 1926\n{passages}")
    corpus.main(["clean", "--code", str(package), "--prose", str(books), "--out", str(out)])
    corpus.main(["tokenizer", "--corpus", str(out), "--out", str(tmp_path / "tokenizer")])
    corpus.main(
        ["encode", "--corpus", str(out), "--tokenizer", str(tmp_path / "tokenizer"), "--out", str(tmp_path / "tokens")]
    )
    printed = capsys.readouterr().out
    names = [json.loads(line)["name"] for line in (out / "code.train.jsonl").read_text().splitlines()]
    assert names == ["package/module0.py", "package/module1.py"]
    assert len((out / "prose.heldout.jsonl").read_text().splitlines()) == 8
    assert len((out / "prose.train.jsonl").read_text().splitlines()) == 1
    assert "prose.train" in printed and "vocabulary" in printed
    ids = np.fromfile(tmp_path / "tokens" / "code.train.bin", dtype=np.uint16)
    tokenizer = tokens.load_tokenizer(tmp_path / "tokenizer")
    decoded = {tokenizer.decode(part) for part in documents_of(ids)}
    assert all((part[0], part[-1]) == (1, 2) for part in documents_of(ids))
    assert decoded == {clean_code(source) for source in sources}  # even where a source spells out a special token
    assert any("<|bos|>" in source for source in sources)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        ours, theirs = ((folder / name).read_text() for folder in (tmp_path / "tokenizer", demo.checkpoint_path()))
        assert json.loads(ours) == json.loads(theirs)


def test_maths_command_leaves_out_held_out_problems(tmp_path: Path) -> None:
    counts = tokens.encode_maths(1, demo.checkpoint_path(), tmp_path, workers=1)
    train_ids, held_out = (
        np.fromfile(tmp_path / f"maths.{part}.bin", dtype=np.uint16) for part in ("train", "heldout")
    )
    assert counts == {"maths.train": len(train_ids), "maths.heldout": len(held_out)}
    assert (len(documents_of(train_ids)), len(documents_of(held_out))) == (10_000, 500)
    questions = {tuple(document) for document in documents_of(train_ids)}
    assert not questions & {tuple(document) for document in documents_of(held_out)}


def test_cleaning_of_code() -> None:
    body = "def twice(value: int) -> int:\n    '''Return the double.'''\n\n    return 2 * value\n\n\n" * 6
    assert clean_code("# licence\n\n" + body.replace("\n", "\r\n")) == body.rstrip() + "\n"
    assert clean_code("x = 1\n") is None
    assert clean_code(body + "x = '" + "y" * 500 + "'\n") is None
    assert clean_code("table = [\n" + "    1234567890,\n" * 100 + "]\n") is None
    assert functions_of("def short():\n    return 1\n") == []
    long = "def name(value):\n    '''" + "Say something about it. " * 6 + "'''\n    return value\n"
    assert functions_of("class A:\n" + "".join(f"    {line}\n" for line in long.splitlines())) == [long]
    assert functions_of("def broken(:\n") == []


def test_cleaning_of_prose() -> None:
    year, text = clean_prose(
        "# A Title\n## Year: 1899\n-------\nOne _line_\nand \u201canother\u201d\u2014here.\n\n\n\nNext."
    )
    assert year == 1899
    assert text == 'One line and "another"--here.\n\nNext.\n'
    assert clean_prose("no header")[0] is None


def test_model_has_the_size_of_the_checkpoint() -> None:
    index = json.loads((demo.checkpoint_path() / "model.safetensors.index.json").read_text())
    parameters = sum(parameter.numel() for parameter in DemoModel(Shape()).parameters())
    assert parameters == index["metadata"]["total_parameters"]


def test_weights_that_add_to_the_residual_stream_start_smaller() -> None:
    torch.manual_seed(0)
    state = transformers_state(DemoModel(Shape()))
    assert state["model.layers.0.self_attn.q_proj.weight"].std() == pytest.approx(0.02, rel=0.05)
    assert state["model.layers.0.mlp.experts.down_proj"].std() == pytest.approx(0.02 / 12**0.5, rel=0.05)
