"""What cannot be done ends with status 1, a message and a hint, and nothing on stdout; wrong usage with status 2."""

from __future__ import annotations

import io
import json
import os
import shutil
import stat
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from runtime.artifacts.pack import Pack
from runtime.memory.location import RecordLocation
from tests.cli.conftest import Command, Outcome
from tests.tiny import make_config, save_model, save_tiny


def assert_refused(done: Outcome, *words: str) -> None:
    assert (done.status, done.stdout) == (1, ""), done
    assert "error: expected " in done.stderr and "\nhint: " in done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr, done.stderr


@pytest.fixture
def damaged(tiny: Pack, tmp_path: Path) -> Pack:
    """A copy of the tiny pack, to be spoilt."""
    return Pack.open(Path(shutil.copytree(tiny.folder, tmp_path / "pack")))


def flip(location: RecordLocation, place: int = 5) -> None:
    with location.path.open("r+b") as file:
        file.seek(location.offset_bytes + place)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("command", ["quantize", "profile", "pack"])
def test_unknown_model_path(moespeq: Command, tmp_path: Path, command: str) -> None:
    done = moespeq(command, "--model", tmp_path / "nowhere", "--artifacts", tmp_path / "artifacts")
    assert_refused(done, str(tmp_path / "nowhere"))
    assert not (tmp_path / "artifacts").exists()


@pytest.mark.parametrize("command", ["quantize", "profile"])
def test_model_without_experts(moespeq: Command, tmp_path: Path, command: str) -> None:
    config = AutoConfig.for_model(
        "llama", vocab_size=260, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2
    )
    save_model(AutoModelForCausalLM.from_config(config), tmp_path / "dense")
    done = moespeq(command, "--model", tmp_path / "dense", "--artifacts", tmp_path / "artifacts")
    assert_refused(done, "llama")
    assert not list(tmp_path.glob("artifacts/*/manifest.json"))


def test_run_of_an_unknown_model_pack_or_prompt_file(moespeq: Command, tiny: Pack, tmp_path: Path) -> None:
    done = moespeq("run", "--pack", tiny.folder, "--model", tmp_path / "nowhere", "-p", "a")
    assert_refused(done, str(tmp_path / "nowhere"))
    assert_refused(moespeq("run", "--pack", tmp_path / "nowhere", "-p", "a"), str(tmp_path / "nowhere"))
    done = moespeq("run", "--artifacts", tmp_path / "new", "--model", tmp_path / "m", "-p", "a")
    assert_refused(done, f"a pack of {tmp_path / 'm'}", "moespeq quantize --model")
    done = moespeq("run", "--artifacts", tmp_path / "new", "--prompt-file", tmp_path / "none.jsonl")
    assert_refused(done, "none.jsonl", "No such file")
    assert not (tmp_path / "new").exists(), "no pack was made for a prompt that is not there"


def test_pack_of_another_model(moespeq: Command, tiny: Pack, tmp_path: Path) -> None:
    other = save_tiny("qwen2_moe", tmp_path / "other", seed=1, dtype=torch.bfloat16)
    done = moespeq("run", "--pack", tiny.folder, "--model", other, "-p", "a")
    assert_refused(done, "a pack artifact of this model", str(tiny.folder))


def test_half_written_pack(moespeq: Command, damaged: Pack) -> None:
    (damaged.folder / "manifest.json").rename(damaged.folder / "manifest.json.part")
    (damaged.folder / "progress.json").write_text('{"settings": {}, "done": {}}')
    assert_refused(moespeq("run", "--pack", damaged.folder, "-p", "a"), str(damaged.folder))
    assert_refused(moespeq("run", "--pack", damaged.folder, "--dry-run"), str(damaged.folder))


@pytest.mark.parametrize("name", ["target-0000.safetensors", "draft-0000.safetensors", "dense.safetensors"])
@pytest.mark.parametrize("left", [-1000, 0])
def test_cut_shard_is_named_with_both_sizes(moespeq: Command, damaged: Pack, name: str, left: int) -> None:
    size = (damaged.folder / name).stat().st_size
    with (damaged.folder / name).open("r+b") as file:
        file.truncate(max(size + left, 0) if left else 0)
    now = (damaged.folder / name).stat().st_size
    assert_refused(moespeq("run", "--pack", damaged.folder, "-p", "a"), f"{name} of {size} bytes; found {now} bytes")


def test_one_flipped_byte_of_the_draft_is_found_whatever_the_prompt(moespeq: Command, damaged: Pack) -> None:
    flip(damaged.draft_location((1, 7)))
    done = moespeq("run", "--pack", damaged.folder, "-p", "a")
    assert_refused(done, "draft-0000.safetensors", "layer 1, expert 7", damaged.draft_location((1, 7)).sha256)


def test_one_flipped_byte_of_the_target_is_found_whatever_the_prompt(moespeq: Command, damaged: Pack) -> None:
    key = damaged.spec.expert_keys()[-1]
    flip(damaged.target_location(key))
    done = moespeq("run", "--pack", damaged.folder, "-p", "a")
    assert_refused(
        done, "target-0000.safetensors", f"layer {key[0]}, expert {key[1]}", damaged.target_location(key).sha256
    )


@pytest.mark.parametrize("slots", [1, 16])
def test_flipped_bytes_of_the_target_are_found_on_first_use(moespeq: Command, damaged: Pack, slots: int) -> None:
    for key in damaged.spec.expert_keys():
        flip(damaged.target_location(key))
    size = slots * damaged.target_slot_bytes
    for prompt in ("a", "a longer prompt, which all experts see"):
        done = moespeq("run", "--pack", damaged.folder, "-p", prompt, "--expert-cache", size, "--check", "first-use")
        assert_refused(done, "target-0000.safetensors", "sha256", "layer 0")


@pytest.mark.parametrize("size", [1000, "1%", "0"])
def test_cache_too_small(moespeq: Command, tiny: Pack, size: object) -> None:
    done = moespeq("run", "--pack", tiny.folder, "-p", "a", "--expert-cache", size)
    assert_refused(done, f"one slot, {tiny.target_slot_bytes} bytes", f"--expert-cache {tiny.target_slot_bytes}")


def test_memory_that_is_not_there(moespeq: Command, tiny: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.memory.plan.available_memory_bytes", lambda: 100_000)
    assert_refused(moespeq("run", "--pack", tiny.folder, "-p", "a"), "bytes of memory", "100000 bytes available")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--expert-cache", "lots"), "lots"),
        (("--governor", "best"), "a governor of fixed, threshold, roofline"),
        (("--prefetch", "oracle"), "oracle"),
        (("--eviction", "fifo"), "fifo"),
        (("--dtype", "int8"), "int8"),
        (("--accept", "always"), "always"),
        (("--top-p", "0"), "--top-p"),
        (("--config", "nowhere"), "a profile nowhere"),
        (("--prefetch-window", "9999"), "9999"),
        (("--max-parallel-transfers", "65"), "65"),
        (("--prompt-file", "x.txt"), "both"),
        (("--host-cache", "much"), "much"),
        (("--temperature", "inf"), "a finite --temperature"),
    ],
)
def test_impossible_options(moespeq: Command, tiny: Pack, options: tuple[str, str], words: str) -> None:
    assert_refused(moespeq("run", "--pack", tiny.folder, "-p", "a", *options), words)


@pytest.mark.parametrize(
    "options", [("--prefetch-window", "-1"), ("--seed", "x"), ("--nonsense",), ("-n", "-1"), ("--temperature", "nan")]
)
def test_wrong_usage_is_status_2(moespeq: Command, tiny: Pack, options: tuple[str, ...]) -> None:
    done = moespeq("run", "--pack", tiny.folder, "-p", "a", *options)
    assert (done.status, done.stdout) == (2, "") and "Usage" in done.stderr


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "17",
        '{"text": "a"}',
        '{"messages": []}',
        '{"prompt": 3}',
        "plain text",
        "null",
        '{"prompt": "a", "id": NaN}',
        '{"prompt": "a", "id": [-1e999]}',
    ],
)
def test_line_that_is_no_prompt_is_named(moespeq: Command, tiny: Pack, tmp_path: Path, line: str) -> None:
    (tmp_path / "prompts.jsonl").write_text(f'"a"\n\n{line}\n"b"\n', encoding="utf-8")
    done = moespeq("run", "--pack", tiny.folder, "--prompt-file", tmp_path / "prompts.jsonl", "-n", 1, "--json")
    assert done.status == 1 and "on line 3 of" in done.stderr and "Traceback" not in done.stderr
    assert [json.loads(text)["new_tokens"] for text in done.stdout.splitlines()] == [1], "what came before is answered"


@pytest.mark.parametrize("prompt", ["", " \n", "\udc80", "half \ud83d"])
def test_prompts_that_are_no_text(moespeq: Command, tiny: Pack, prompt: str) -> None:
    assert_refused(moespeq("run", "--pack", tiny.folder, "-p", prompt), "a prompt")


def test_bytes_that_are_no_utf8(moespeq: Command, tiny: Pack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "prompt.txt").write_bytes(b"caf\xe9")
    done = moespeq("run", "--pack", tiny.folder, "--prompt-file", tmp_path / "prompt.txt")
    assert_refused(done, "UTF-8 text in", "prompt.txt", "byte 3")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'"caf\xe9"\n'), encoding="utf-8"))
    assert_refused(moespeq("run", "--pack", tiny.folder, "--prompt-file", "-"), "UTF-8 text in stdin")


def test_chat_for_a_model_without_a_template(moespeq: Command, tiny: Pack, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}')
    assert_refused(moespeq("run", "--pack", tiny.folder, "--prompt-file", tmp_path / "p.jsonl"), "a chat template")


@pytest.mark.parametrize("length", [128, 129, 500])
def test_prompt_longer_than_the_context(moespeq: Command, tiny: Pack, length: int) -> None:
    done = moespeq("run", "--pack", tiny.folder, "-p", "x" * length)
    assert_refused(done, "context of 128 tokens", f"{length} tokens", "shorten")


def test_figures_that_cannot_be_written_are_refused_before_loading(
    moespeq: Command, tiny: Pack, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    ask = ("run", "--pack", tiny.folder, "-p", "a", "--stats")
    assert_refused(moespeq(*ask, tmp_path), "the folder", str(tmp_path))
    assert_refused(moespeq(*ask, tmp_path / "file" / "figures.json"), "figures", "--stats")
    if Path("/proc/self").exists():
        assert_refused(moespeq(*ask, "/proc/figures.json"), "/proc/figures.json")


def test_full_disk_for_the_figures(moespeq: Command, tiny: Pack, tmp_path: Path) -> None:
    full = tmp_path / "full"  # a device of our own: what is under test could replace the system's
    try:
        os.mknod(full, stat.S_IFCHR | 0o600, os.makedev(1, 7))
        full.open("w").close()
    except OSError:
        pytest.skip("devices cannot be made here")
    done = moespeq("run", "--pack", tiny.folder, "-p", "a", "-n", 2, "--stats", full)
    assert done.status == 1 and "No space left on device" in done.stderr and "--stats" in done.stderr
    assert "Traceback" not in done.stderr
    assert full.is_char_device(), "and the device is still one"


def test_tokenizer_that_is_not_there(moespeq: Command, tmp_path: Path) -> None:
    from tests.pack.fixtures import make_pack, save_quantized
    from tests.tiny import make_model

    model = save_model(make_model("mixtral"), tmp_path / "model")
    quantized = save_quantized(model, tmp_path / "quantized")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).unlink()
    pack = make_pack(model, quantized, tmp_path / "pack")
    assert_refused(moespeq("run", "--pack", pack.folder, "-p", "a"), "a tokenizer in")


def test_model_type_that_the_library_does_not_know(moespeq: Command, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    config = make_config("mixtral").to_dict() | {"model_type": "unheard_of"}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    done = moespeq("quantize", "--model", tmp_path / "model", "--artifacts", tmp_path / "artifacts")
    assert_refused(done, str(tmp_path / "model"))


def test_a_flipped_byte_of_the_dense_weights_is_found(moespeq: Command, damaged: Pack) -> None:
    place = damaged.dense_info("lm_head.weight").start + 1
    with (damaged.folder / "dense.safetensors").open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))
    assert_refused(moespeq("run", "--pack", damaged.folder, "-p", "a"), "dense.safetensors with sha256")


@pytest.mark.parametrize("name", ["model/config.json", "records.json"])
def test_a_changed_small_file_is_found(moespeq: Command, damaged: Pack, name: str) -> None:
    text = (damaged.folder / name).read_text(encoding="utf-8")
    (damaged.folder / name).write_text(text.replace("1", "2", 1), encoding="utf-8")
    assert_refused(moespeq("run", "--pack", damaged.folder, "-p", "a"), f"{name} with sha256")


def test_linear_attention_is_refused_before_any_work(moespeq: Command, tmp_path: Path) -> None:
    config = {"model_type": "qwen3_next", "num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config | {"layer_types": ["linear_attention", "full_attention"]}))
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    for stage in ("quantize", "profile"):
        assert_refused(moespeq(stage, "--model", tmp_path), "linear_attention")


def test_the_embedded_model_stands_in_for_no_other(moespeq: Command, tiny: Pack, tmp_path: Path) -> None:
    """Somebody who has begun with a model of their own must not get an answer from another one."""
    shutil.copytree(tiny.folder.parent / "quantized", tmp_path / "quantized")
    assert_refused(moespeq("run", "--artifacts", tmp_path, "-p", "a"), "a quantized artifact of a qwen2_moe model")
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "progress.json").write_text("{}")
    assert_refused(moespeq("run", "--artifacts", tmp_path, "-p", "a"), "an unfinished one", "moespeq pack")


def test_json_without_a_prompt_answers_nothing(moespeq: Command, tiny: Pack) -> None:
    assert_refused(moespeq("run", "--pack", tiny.folder, "--json"), "expected a prompt")


def test_strangers_files_are_left_alone(moespeq: Command, tiny: Pack, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    source = tiny.folder.parent / "model"
    for stage, more in (("quantize", ()), ("profile", ("--quantized", "none")), ("pack", ("--quantized", tiny.folder))):
        for force in ((), ("--force",)):
            done = moespeq(stage, "--model", source, "--out", tmp_path, *more, *force)
            assert done.status == 1 and (tmp_path / "thesis.txt").read_text() == "mine", done
