"""`moespeq run`: what it prints where (H16, H17, H18)."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from runtime.artifacts.pack import Pack
from tests.cli.conftest import TEXT, Command, save_talker
from tests.decode.packs import decode


def results(stdout: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stdout.splitlines()]


def test_text_alone_goes_to_stdout(moespeq: Command, talker: Pack) -> None:
    done = moespeq("run", "--pack", talker.folder, "--prompt", "A")
    assert (done.status, done.stdout) == (0, TEXT + "\ufffd\n")
    assert "expert cache" in done.stderr and "ms a token" in done.stderr
    assert "draft right 100.0%" in done.stderr and "--host-cache" not in done.stderr
    done = moespeq("run", "--pack", talker.folder, "--prompt", "A", "--device", "cpu", "--host-cache", "50%")
    assert done.status == 0 and "--host-cache is for runs on a GPU" in done.stderr


def test_json_is_one_object_a_prompt(moespeq: Command, talker: Pack, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "A", "id": 7}\n\n"xA"\n{"prompt": "zA", "id": {"a": [1]}, "more": 1}\n')
    done = moespeq("run", "--pack", talker.folder, "--prompt-file", file, "--json")
    assert done.status == 0 and done.stdout.isascii()
    first, second, third = results(done.stdout)
    assert (first["id"], third["id"], "id" in second) == (7, {"a": [1]}, False)
    for result, length in ((first, 1), (second, 2), (third, 2)):
        assert result["text"] == TEXT + "\ufffd"
        assert result["token_ids"] == [*TEXT.encode(), 0xC3, 258]
        assert (result["prompt_tokens"], result["new_tokens"]) == (length, len(TEXT.encode()) + 2)
        assert result["finish_reason"] == "stop"


def test_file_of_plain_text_is_one_prompt(moespeq: Command, talker: Pack, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_bytes(b"\xef\xbb\xbf{\n}A")
    done = moespeq("run", "--pack", talker.folder, "--prompt-file", tmp_path / "prompt.txt", "--json")
    assert [r["prompt_tokens"] for r in results(done.stdout)] == [4]


def test_prompts_come_from_stdin(moespeq: Command, talker: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO('"A"\n{"prompt": "A"}\n'))
    done = moespeq("run", "--pack", talker.folder, "--prompt-file", "-")
    assert done.stdout == (TEXT + "\ufffd\n") * 2
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    done = moespeq("run", "--pack", talker.folder, "--prompt-file", "-", "--json")
    assert (done.status, done.stdout) == (0, "") and "no prompts came in" in done.stderr


@pytest.mark.parametrize("window", [1, 4, 16])
@pytest.mark.parametrize("stop", ["漢", "字z", "😀 漢", "z"])
def test_stop_text_ends_the_answer_and_the_counts(
    moespeq: Command, talker: Pack, tmp_path: Path, window: int, stop: str
) -> None:
    figures = tmp_path / "figures.json"
    done = moespeq(
        "run", "--pack", talker.folder, "-p", "A", "--stop", stop, "--json", "--stats", figures,
        "--prefetch-window", window, "--verify-window", window, "--governor", "fixed",
    )  # fmt: skip
    (result,) = results(done.stdout)
    before = TEXT[: TEXT.index(stop)]
    assert (result["text"], result["finish_reason"]) == (before, "stop")
    assert result["new_tokens"] == len((before + stop).encode())
    assert json.loads(figures.read_text())["new_tokens"] == result["new_tokens"]


def test_stop_id_of_the_generation_config_alone(moespeq: Command, tmp_path: Path) -> None:
    pack = save_talker(tmp_path, 258, eos_token_id=None)
    settings = pack.config_folder / "generation_config.json"
    assert json.loads(settings.read_text()).get("eos_token_id") is None
    done = moespeq("run", "--pack", pack.folder, "-p", "A", "--json", "-n", 20)
    assert results(done.stdout)[0]["finish_reason"] == "length", "258 is no stop id yet"

    source = tmp_path / "model" / "generation_config.json"
    source.write_text(json.dumps(json.loads(source.read_text()) | {"eos_token_id": [3, 258]}))
    again = moespeq(
        "pack", "--model", tmp_path / "model", "--quantized", tmp_path / "quantized", "--out", tmp_path / "b"
    )
    assert again.status == 0, again.stderr
    done = moespeq("run", "--pack", tmp_path / "b", "-p", "A", "--json", "-n", 20)
    assert results(done.stdout)[0]["token_ids"][-1] == 258


def test_stop_id_of_the_tokenizer_alone(moespeq: Command, tmp_path: Path) -> None:
    pack = save_talker(tmp_path, 257, eos_token_id=None)
    assert json.loads((pack.config_folder / "config.json").read_text()).get("eos_token_id") is None
    done = moespeq("run", "--pack", pack.folder, "-p", "A", "--json", "-n", 20)
    (result,) = results(done.stdout)
    assert (result["token_ids"][-1], result["finish_reason"]) == (257, "stop")


def test_limit_of_tokens_and_of_the_context(moespeq: Command, talker: Pack) -> None:
    for count in (0, 1, 2):
        done = moespeq("run", "--pack", talker.folder, "-p", "A", "--json", "-n", count, "--prefetch-window", 8)
        (result,) = results(done.stdout)
        assert (result["new_tokens"], result["finish_reason"]) == (count, "length")
    done = moespeq("run", "--pack", talker.folder, "-p", "x" * 126 + "A", "--json", "-n", 9)
    (result,) = results(done.stdout)
    assert (result["new_tokens"], result["finish_reason"]) == (1, "context")


def test_figures_hold_settings_counts_and_results(moespeq: Command, tiny: Pack, tmp_path: Path) -> None:
    figures = tmp_path / "new" / "figures.json"
    done = moespeq(
        "run", "--pack", tiny.folder, "-p", "abc", "-p", "d", "-n", 9, "--stats", figures, "--config", "example",
        "--prefetch-window", 3, "--expert-cache", "50%", "--eviction", "lru",
    )  # fmt: skip
    assert done.status == 0
    report = json.loads(figures.read_text())
    assert report["finished"] is True and len(report["results"]) == 2
    settings = report["settings"]
    assert (settings["prefetch_window"], settings["max_parallel_transfers"]) == (3, 4), "command line over profile"
    assert (settings["expert_cache_size"], settings["eviction"]) == ("50%", "lru")
    assert report["plan"]["num_slots"] == 8
    assert report["new_tokens"] == 18 and report["prompt_tokens"] == 4
    assert 0 < report["acceptance"] <= 1 and report["expert_cache"]["hits"] > 0


def test_no_draft_reports_no_acceptance(moespeq: Command, tiny: Pack, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    done = moespeq("run", "--pack", tiny.folder, "-p", "abc", "-n", 5, "--no-speculate", "--stats", figures)
    assert "draft right n/a, its experts n/a" in done.stderr
    report = json.loads(figures.read_text())
    assert report["acceptance"] is None and report["plan"]["draft_bytes"] == 0


def test_same_text_with_and_without_speculation(moespeq: Command, tiny: Pack) -> None:
    ask = ("run", "--pack", tiny.folder, "-p", "What now?", "-n", 30, "--json")
    alone = results(moespeq(*ask, "--no-speculate").stdout)[0]
    for options in (("--prefetch-window", 5), ("--expert-cache", tiny.target_slot_bytes, "--verify-window", 8)):
        other = results(moespeq(*ask, *options).stdout)[0]
        assert (other["text"], other["token_ids"]) == (alone["text"], alone["token_ids"])
    assert alone["token_ids"] == decode(tiny, list(b"What now?"), 30, speculate=False, stop=frozenset({257})).tokens


def test_seed_makes_the_text(moespeq: Command, tiny: Pack) -> None:
    ask = ("run", "--pack", tiny.folder, "-p", "abc", "-n", 20, "--temperature", 1.5, "--json")
    texts = [
        results(moespeq(*ask, *more).stdout)[0]["token_ids"] for more in ((), (), ("--seed", 1), ("--no-speculate",))
    ]
    assert texts[0] == texts[1] == texts[3] != texts[2]


def test_dry_run_prints_the_plan_and_nothing_else(moespeq: Command, tiny: Pack) -> None:
    done = moespeq("run", "--pack", tiny.folder, "--dry-run", "--expert-cache", "25%")
    assert done.status == 0 and "expert cache: " in done.stdout and "4 of 16 experts, 25%" in done.stdout
    done = moespeq("run", "--pack", tiny.folder, "--dry-run", "--json", "--context", 64)
    plan = json.loads(done.stdout)
    assert plan["path"] == str(tiny.folder) and plan["minimum_cache_bytes"] == tiny.target_slot_bytes


def test_model_may_be_named_when_it_is_the_right_one(moespeq: Command, tiny: Pack) -> None:
    done = moespeq("run", "--pack", tiny.folder, "--model", tiny.folder.parent / "model", "-p", "a", "-n", 1)
    assert done.status == 0, done.stderr


def test_figures_go_through_links_and_into_devices(moespeq: Command, tiny: Pack, tmp_path: Path) -> None:
    """A rename would put a file in place of the link, or of /dev/null."""
    (tmp_path / "link").symlink_to(tmp_path / "figures.json")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE, text=True)
    for place in (tmp_path / "link", pipe):
        assert moespeq("run", "--pack", tiny.folder, "-p", "a", "-n", 2, "--stats", place).status == 0
    assert (tmp_path / "link").is_symlink() and pipe.is_fifo()
    assert json.loads((tmp_path / "figures.json").read_text())["new_tokens"] == 2
    out, _ = reader.communicate(timeout=20)
    assert json.loads(out)["new_tokens"] == 2, "one object, not a beginning and an end"


def test_stdout_that_only_takes_ascii_gets_escapes(
    moespeq: Command, talker: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with PYTHONIOENCODING=ascii."""
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    monkeypatch.setattr(sys, "stdout", stdout)
    done = moespeq("run", "--pack", talker.folder, "--prompt", "A")
    assert done.status == 0, done.stderr
    assert stdout.buffer.getvalue() == TEXT.encode("ascii", "backslashreplace") + b"\\ufffd\n"  # type: ignore[attr-defined]


# In a process of its own: what depends on the interpreter's start and end.


def python(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(str(argument) for argument in arguments)]
    environment = {**os.environ, **options.pop("env", {})}
    return subprocess.run(command, text=True, env=environment, timeout=120, **options)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_full_stdout_is_told_without_a_traceback(talker: Pack) -> None:
    with open("/dev/full", "w") as full:
        ask = ("-m", "moespeq_cli", "run", "--pack", talker.folder, "-p", "A", "--threads", 1)
        done = python(*ask, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1 and "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    assert "to write to standard output; found No space left on device" in done.stderr


def test_help_needs_half_a_second_and_no_model_library() -> None:
    code = (
        "import sys, moespeq_cli.app; "
        "sys.exit(sum(name in sys.modules for name in ('torch', 'transformers', 'numpy', 'safetensors', 'cupy')))"
    )
    assert python("-c", code).returncode == 0
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        done = python("-m", "moespeq_cli", "--help", capture_output=True)
        seconds.append(time.perf_counter() - started)
    assert done.returncode == 0 and all(command in done.stdout for command in ("quantize", "profile", "pack", "run"))
    busy = os.getloadavg()[0] / (os.cpu_count() or 1)  # half a second on a machine that has nothing else to do
    assert min(seconds) < 0.5 * max(1.0, busy), seconds


def test_one_prompt_that_cannot_be_answered_leaves_the_others(moespeq: Command, tiny: Pack, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": "a", "id": 1},
        {"prompt": "b" * 500, "id": 2},
        {"prompt": " ", "id": 3},
        {"prompt": "c", "id": 4},
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    done = moespeq("run", "--pack", tiny.folder, "--prompt-file", file, "--json", "-n", 4)
    answers = results(done.stdout)
    assert done.status == 1 and [answer["id"] for answer in answers] == [1, 2, 3, 4]
    assert ["error" in answer for answer in answers] == [False, True, True, False]
    assert "500 tokens" in answers[1]["error"]["found"] and "2 of 4 prompts" in done.stderr


def test_help_states_the_defaults_that_hold() -> None:
    """They stand in the help because a profile may come between, so nothing else keeps them true."""
    import inspect
    from typing import get_args, get_type_hints

    from moespeq_cli.run.command import run
    from runtime.config import RunSettings

    hints = get_type_hints(run, include_extras=True)
    defaults = RunSettings()
    checked = 0
    for name in inspect.signature(run).parameters:
        option = get_args(hints[name])[1]
        if isinstance(option.show_default, str) and name not in ("pack", "expert_cache", "host_cache"):
            assert option.show_default == str(getattr(defaults, name)), name
            checked += 1
    assert checked >= 8
