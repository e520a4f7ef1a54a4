"""`bench kernels` from measured times to tables and profiles, and what it says where there is no GPU."""

from __future__ import annotations

import contextlib
import errno
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from moespeq_cli.bench import kernel_session, kernels
from moespeq_cli.bench.command import kernels as measure_kernels
from moespeq_cli.bench.geometry import Geometry, parse_geometry
from moespeq_cli.bench.kernel_candidate import Candidate
from moespeq_cli.bench.kernel_ours import interleave
from moespeq_cli.bench.kernel_session import DEFAULT, KernelSession, candidates, choose_candidates, parse_forms
from moespeq_cli.bench.kernel_time import Bank, Machine, Times, layers_needed, make_work, weight_bytes
from moespeq_cli.bench.kernels import Plan, best_shape, case_table, case_title, measure, seed_table, tune
from runtime.errors import InputError, KernelError, ShapeError, StorageError
from runtime.kernels import read_bytes
from runtime.kernels.fused_config import FusedConfig
from runtime.kernels.layout import SlotLayout
from runtime.kernels.shape import ExpertShape, WeightForm
from runtime.kernels.tuning import BACKENDS, TokenRange
from tests.bench.simulated import Fault, Simulated
from tests.cli.conftest import Command, moespeq

__all__ = ["moespeq"]

MACHINE = Machine(4370.0, 4300.0, 744.0, 60 << 20)
SMALL = Geometry("small", ExpertShape(6, 2, 64, 40))
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def times(median: float) -> dict[str, Any]:
    return {"median_us": median, "low_us": median * 0.99, "high_us": median * 1.02, "replays": 25, "calls": 48}


def fake(candidates: Sequence[Candidate], bank: Bank, tokens: int, machine: Machine, seed: int) -> dict[str, Any]:
    """The fused kernel slows down with the tokens, the loop does not."""
    medians = {"fused": 2.0 * tokens, "loop": 100.0}
    return {
        "tokens": tokens, "experts": 5.5, "layers": len(bank.layers), "bytes": 4.37e6, "flops": 7.44e6,
        "floor_us": 1.0, "bound": "bytes", "times": {c.name: times(medians[c.name]) for c in candidates},
    }  # fmt: skip


def run(fault: Fault | None = None, check: bool = True) -> list[dict[str, Any]]:
    found: list[Candidate] = [
        Simulated(fault or Fault(), most=17),
        Simulated(Fault(), "loop", row_invariant=False, most=17),
    ]
    plan = Plan([SMALL], [WeightForm("int4", 32)], (1, 16, 64, 256), check)
    return measure(plan, found, MACHINE, lambda: None, device="cpu", time=fake)


def test_results_hold_checks_and_times_and_are_json() -> None:
    (result,) = run()
    assert json.loads(json.dumps(result))["shape"]["activation"] == "silu"
    assert {record["candidate"] for record in result["checks"]} == {"fused", "loop"}
    assert [row["tokens"] for row in result["rows"]] == [1, 16, 64, 256]
    assert result["rows"][0]["layers"] == 32, "a small layer is taken in many copies"


def test_nothing_is_timed_after_a_wrong_answer() -> None:
    class Wrong(Fault):
        def h(self, h: torch.Tensor) -> torch.Tensor:
            return h * 1.5

    with pytest.raises(KernelError, match="fused to pass 'one-hot x' at 1 tokens"):
        run(Wrong())
    assert run(Wrong(), check=False)[0]["checks"] == []


def test_table_names_the_best_and_its_distance_from_the_floor() -> None:
    (result,) = run()
    text = case_table(result, ["fused", "gemm", "loop"])
    lines = text.splitlines()
    assert len(lines) == 6 and "| tokens | experts hit | fused, us | gemm, us | loop, us | best |" in lines[0]
    assert lines[2].startswith("| 1 | 5.5 | 2.00 (1.98-2.04) | - | 100.0 (99.0-102.0) | fused | 2185 | 3.7 |")
    assert lines[5].split(" | ")[5] == "loop" and lines[5].endswith("| 1.0 (bytes) | 100.00 |")
    assert case_title(result, SMALL.label) == f"small (6, 2, 64 x 40), int4 g32: {len(result['checks'])} checks passed"


def test_tuning_follows_the_times() -> None:
    entry = tune(run(), [Simulated(Fault()), Simulated(Fault(), "loop", row_invariant=False)]).entries[0]
    assert (entry.hidden_size, entry.num_experts, entry.form) == (64, 6, "int4")
    assert [part.backend for part in entry.ranges] == ["fused", "loop"]
    assert entry.ranges[0] == TokenRange(48, "fused"), "2 us a token reaches 100 us at 50: three launches"


def test_seed_table_has_the_ratio() -> None:
    result = {
        "shape": {"moe_intermediate_size": 512},
        "rows": [
            {"tokens": 64, "flops": 6e9, "times": {"loop": times(300.0), "fused": times(90.0), "gemm": times(60.0)}}
        ],
    }
    assert seed_table([result]).splitlines()[2] == "| 512 | 64 | 20.0 | 100.0 | gemm | 5.00 |"


def test_best_shape_needs_a_margin() -> None:
    assert best_shape([{"default": 10.0, "a": 9.95}, {"default": 30.0, "a": 29.9}], "default", 1.01) == "default"
    assert best_shape([{"default": 10.0, "a": 9.0, "b": 8.0}, {"default": 30.0, "a": 29.0}], "default", 1.01) == "a"
    assert best_shape([], "default", 1.01) == "default"


@pytest.mark.parametrize(
    ("form", "expected_bytes"),
    [
        (WeightForm("int4", 128), 3 * 2048 * 1408 // 2 + 2 * 3 * 2048 * 1408 // 128),
        (WeightForm("int8", -1), 3 * 2048 * 1408 + 2 * (2816 + 2048)),
        (WeightForm("bf16"), 6 * 2048 * 1408),
    ],
)
def test_floor_counts_every_weight_once(form: WeightForm, expected_bytes: int) -> None:
    shape = parse_geometry("qwen1.5-moe").shape
    assert weight_bytes(shape, form) == expected_bytes
    assert weight_bytes(ExpertShape(60, 4, 2048, 1408, has_bias=True), form) == expected_bytes + 2 * (2816 + 2048)


def test_floor_of_the_issue() -> None:
    shape = parse_geometry("qwen1.5-moe").shape
    assert MACHINE.floor_us(4 * weight_bytes(shape, WeightForm("bf16")), 0) == pytest.approx(15.8, abs=0.05)
    assert MACHINE.floor_us(4 * weight_bytes(shape, WeightForm("int4", 128)), 0) == pytest.approx(4.1, abs=0.05)
    assert MACHINE.floor_us(0, shape.flops_per_pair * 4 * 4096) == pytest.approx(381, abs=1)


def test_layers_are_enough_for_the_cache_and_no_more() -> None:
    shape, form = parse_geometry("qwen1.5-moe").shape, WeightForm("int4", 128)
    wanted = layers_needed(shape, form, 1, 60 << 20)
    assert (wanted - 1) * 4 * weight_bytes(shape, form) < 4 * (60 << 20) <= wanted * 4 * weight_bytes(shape, form)
    assert layers_needed(shape, form, 4096, 60 << 20) == 2


def test_work_is_random_and_counted() -> None:
    generator = torch.Generator().manual_seed(0)
    bank = Bank(SMALL.shape, WeightForm("bf16"), 3, 0, generator)
    assert len({layer.pool.data_ptr() for layer in bank.layers}) == 3
    work = make_work(bank, 5, MACHINE, generator)
    assert len(work.batches) == 48 and len({str(batch.top_k_index.tolist()) for batch in work.batches}) > 40
    assert all(len(set(row)) == 2 for batch in work.batches for row in batch.top_k_index.tolist())
    assert 3 < work.experts <= 6 and work.num_bytes == pytest.approx(work.experts * 6 * 64 * 40)
    assert work.flops == 5 * 2 * 6 * 64 * 40


def test_candidates_are_the_backends_and_variants() -> None:
    names = [candidate.name for candidate in candidates()]
    assert set(names) >= set(BACKENDS) and len(set(names)) == len(names)
    assert [candidate.name for candidate in choose_candidates(None)] == [name for name in names if name in DEFAULT]
    assert [candidate.name for candidate in choose_candidates(["interleaved", "loop"])] == ["loop", "interleaved"]
    with pytest.raises(InputError, match="a candidate of fused"):
        choose_candidates(["marlin"])


@pytest.mark.parametrize("form", [WeightForm("int4", 32), WeightForm("int8", -1)], ids=["int4", "int8"])
def test_interleaved_tiles_lie_where_the_kernel_looks(form: WeightForm) -> None:
    layout, group = SlotLayout(SMALL.shape, form), 4
    pool = torch.randint(0, 256, (6, layout.slot_bytes), dtype=torch.uint8)
    made = interleave(layout, pool, group)
    assert len(made) == 8
    parts = ((layout.gate_up, layout.gate_up_grid.tiles), (layout.down, layout.down_grid.tiles))
    for part, tiles in parts:
        size = part.size_bytes // tiles
        for slot in range(6):
            for tile in range(tiles):  # tile_offset of layout.cuh
                begin = slot // group * group * layout.slot_bytes + part.offset_bytes * group
                begin += (tile * group + slot % group) * size
                place = part.offset_bytes + tile * size
                assert torch.equal(made.view(-1)[begin : begin + size], pool[slot, place : place + size])
    with pytest.raises(ShapeError, match="without biases"):
        interleave(SlotLayout(SMALL.shape, WeightForm("bf16")), pool, group)


def test_forms_by_name() -> None:
    assert parse_forms(None, 64) == [WeightForm("int4", 64), WeightForm("bf16")]
    assert parse_forms(["int8", "int8"], 64) == [WeightForm("int8", -1)]


def test_times_have_their_spread() -> None:
    found = Times.of([float(n) for n in range(1, 26)], 48)
    assert (found.median_us, found.low_us, found.high_us) == (13.0, pytest.approx(3.4), pytest.approx(22.6))
    assert len(found.deciles_us) == 11 and (found.deciles_us[0], found.deciles_us[10]) == (1.0, 25.0)
    assert list(found.deciles_us) == sorted(found.deciles_us)


@no_gpu
@pytest.mark.parametrize("more", [(), ("--json", "x.json"), ("--tune", "mine.yaml"), ("--seed-table",)])
def test_without_a_gpu_it_says_so_and_writes_nothing(
    moespeq: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    done = moespeq("bench", "kernels", *more)
    assert (done.status, done.stdout) == (1, "")
    assert "error: expected an NVIDIA GPU of compute capability 8.0 or newer; found none" in done.stderr
    assert "hint: " in done.stderr and "Traceback" not in done.stderr and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--geometry", "gpt5"), "a geometry of qwen1.5-moe"),
        (("--form", "int3"), "a form of int4"),
        (("--candidate", "marlin"), "a candidate of"),
        (("--tokens", "a,b"), "expected --tokens as whole numbers, comma-separated; found 'a,b'"),
        (("--tokens", "1,,2"), "expected --tokens as whole numbers, comma-separated; found '1,,2'"),
        (("--tokens", ""), "--tokens"),
        (("--tokens", "0,1"), "--tokens"),
        (("--group-size", "48"), "group_size"),
        (("--tune", "pyproject.toml"), "pyproject.toml"),
        (("--json", "."), "a file for --json"),
        (("--json", "/proc/none/x.json"), "to write the figures in /proc/none"),
        (("--json", "/dev/null/x.json"), "to write the figures in /dev/null"),
        (("--tune", "."), "a file for --tune"),
        (("--tune", "flow.yaml"), "one setting a line in flow.yaml"),
    ],
)
def test_wrong_options_are_refused_before_any_work(
    moespeq: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], words: str
) -> None:
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    (tmp_path / "flow.yaml").write_text("{fused_kernel: {team: 8}}\n")
    monkeypatch.chdir(tmp_path)
    done = moespeq("bench", "kernels", *options)
    assert (done.status, done.stdout) == (1, "") and words in done.stderr, done
    assert re.search(r"^hint: .+", done.stderr, re.MULTILINE)


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> type[KernelSession]:
    """Sessions on a machine whose GPU is pretended; its times are those of `fake`."""
    monkeypatch.setattr(kernel_session, "current_gpu", lambda: None)
    monkeypatch.setattr(read_bytes, "ReadBytes", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(kernel_session, "measure_machine", lambda: MACHINE)
    facts = dict.fromkeys(("gpu", "num_sms", "driver", "cuda", "cupy"), "pretended")
    monkeypatch.setattr(kernel_session, "gpu_environment", lambda: facts)
    monkeypatch.setattr(kernels, "measure", lambda *_: [run()[0] | {"geometry": "6:2:64x40"}])
    monkeypatch.setattr(KernelSession, "_best_shape", lambda *_: (FusedConfig(), []))
    return KernelSession


def small_plan(form: str = "int4") -> Plan:
    return Plan([SMALL], parse_forms([form], 32), (1, 16, 64))


@pytest.mark.parametrize("place", ["/proc/none/mine.yaml", "/dev/null/mine.yaml"])
def test_profile_that_cannot_be_written_is_refused_before_any_work(session: type[KernelSession], place: str) -> None:
    with pytest.raises(StorageError, match=f"to write the profile in {Path(place).parent}"):
        session.open(small_plan(), None, Path(place))


def test_asking_for_a_profile_leaves_no_file(session: type[KernelSession], tmp_path: Path) -> None:
    session.open(small_plan(), None, tmp_path / "new" / "mine.yaml")
    assert list(tmp_path.rglob("*")) == [tmp_path / "new"]


@pytest.mark.parametrize(
    ("names", "form"), [(["loop"], "int4"), (["interleaved", "grouped"], "int4"), (["interleaved", "loop"], "bf16")]
)
def test_profile_needs_a_candidate_for_few_tokens(
    session: type[KernelSession], tmp_path: Path, names: list[str], form: str
) -> None:
    with pytest.raises(InputError, match=f"a candidate for --tune that computes 16 tokens of small in {form}"):
        session.open(small_plan(form), names, tmp_path / "mine.yaml")
    assert not list(tmp_path.iterdir())
    session.open(small_plan(form), [*names, "fused"], tmp_path / "mine.yaml")
    session.open(small_plan(form), names, None)


@pytest.mark.parametrize("is_full", [False, True])
def test_figures_are_kept_where_the_profile_fails(
    session: type[KernelSession],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_full: bool,
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if is_full:
        monkeypatch.setattr(kernel_session, "write_profile", full)
    figures, profile = tmp_path / "x.json", tmp_path / "mine.yaml"
    monkeypatch.setattr(KernelSession, "announcement", lambda _: "")
    monkeypatch.setattr(kernel_session, "choose_candidates", lambda _: [Simulated(Fault(), most=128)])
    with pytest.raises(StorageError, match="a full disk") if is_full else contextlib.nullcontext():
        measure_kernels(["6:2:64x40"], ["int4"], "1,16,64", 32, None, True, False, profile, figures)
    printed, kept = capsys.readouterr().out, json.loads(figures.read_text())
    assert "| tokens | experts hit |" in printed and [row["tokens"] for row in kept["cases"][0]["rows"]][:2] == [1, 16]
    assert (kept["tuned"] is None) == is_full == (not profile.exists()) == ("is in" not in printed)


def test_plan_has_every_geometry_in_every_form() -> None:
    plan = Plan([SMALL, SMALL], parse_forms(None, 128), (1,))
    assert len(plan.cases) == 4
    assert kernels.OURS == ("fused", "gemm")
