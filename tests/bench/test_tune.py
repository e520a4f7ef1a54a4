"""From measured times to the table of backends, and into a profile that `run --config` reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from moespeq_cli.bench.tune import SAME, choose_ranges, write_profile
from runtime.config import make_settings
from runtime.errors import InputError
from runtime.kernels.fused_config import FusedConfig
from runtime.kernels.shape import ExpertShape, WeightForm
from runtime.kernels.tuning import INVARIANT_TOKENS, DispatchEntry, DispatchTable, TokenRange

INVARIANT = ("fused", "gemm")
QWEN = ExpertShape(60, 4, 2048, 1408)


def table(form: str = "int4", first: int = 128) -> DispatchTable:
    ranges = (TokenRange(first, "fused"), TokenRange(None, "grouped"))
    return DispatchTable((DispatchEntry(2048, 1408, 60, 4, form, ranges),))


def test_border_lies_where_the_times_cross() -> None:
    times = {
        1: {"fused": 9.0, "grouped": 90.0},
        16: {"fused": 60.0, "grouped": 100.0},
        64: {"fused": 100.0, "grouped": 200.0},
        256: {"fused": 400.0, "grouped": 200.0},
    }
    assert choose_ranges(times, INVARIANT) == (TokenRange(128, "fused"), TokenRange(None, "grouped"))


def test_few_tokens_have_one_backend_whose_rows_do_not_depend_on_the_batch() -> None:
    times = {
        1: {"fused": 9.0, "gemm": 20.0, "loop": 5.0},
        16: {"fused": 90.0, "gemm": 60.0, "loop": 5.0},
        17: {"fused": 95.0, "gemm": 60.0, "loop": 50.0},
        4096: {"gemm": 900.0, "loop": 1500.0},
    }
    ranges = choose_ranges(times, INVARIANT)
    assert ranges[0] == TokenRange(16, "fused"), "the loop is faster, but its bits depend on the batch"
    assert ranges[-1] == TokenRange(None, "gemm")
    with pytest.raises(InputError, match="row by row alike"):
        choose_ranges({1: {"loop": 5.0}}, INVARIANT)


def test_equal_times_change_nothing() -> None:
    times = {8: {"fused": 10.0, "gemm": 11.0}, 64: {"fused": 50.2, "gemm": 50.0}, 128: {"fused": 90.0, "gemm": 91.0}}
    assert choose_ranges(times, INVARIANT) == (TokenRange(None, "fused"),)


def test_a_backend_that_ends_is_followed_by_the_best_of_the_rest() -> None:
    times = {16: {"fused": 10.0, "gemm": 30.0}, 64: {"gemm": 40.0, "loop": 60.0}, 512: {"gemm": 99.0, "loop": 60.0}}
    ranges = choose_ranges(times, INVARIANT)
    assert [part.backend for part in ranges] == ["fused", "gemm", "loop"]
    assert ranges[0].up_to_tokens == 16


@given(
    st.lists(st.tuples(*[st.floats(1, 1000)] * 3), min_size=8, max_size=8),
)
def test_what_is_chosen_is_never_clearly_slower_at_a_measured_size(rows: list[tuple[float, float, float]]) -> None:
    sizes = (1, 16, 32, 64, 128, 256, 1024, 4096)
    times = {
        size: dict(zip(("fused", "gemm", "loop"), row, strict=True)) for size, row in zip(sizes, rows, strict=True)
    }
    entry = DispatchEntry(2048, 1408, 60, 4, "int4", choose_ranges(times, INVARIANT))
    for size in sizes:
        if size > INVARIANT_TOKENS:
            assert times[size][entry.backend(size)] <= SAME * min(times[size].values())
    assert entry.backend(1) == entry.backend(16) in INVARIANT


def test_profile_round_trip_and_merge(tmp_path: Path) -> None:
    path = tmp_path / "machine.yaml"
    shape = FusedConfig(block_dim=512, stages=6)
    write_profile(path, table(), shape, ["NVIDIA H200, 2026-11-29", "torch 2.11"])
    assert "#   NVIDIA H200, 2026-11-29\n" in path.read_text()
    settings = make_settings(str(path), {})
    assert settings.fused_kernel == shape and settings.kernel_dispatch == table()
    entry = settings.kernel_dispatch.find(QWEN, WeightForm("int4", 64))
    assert entry is not None and [entry.backend(n) for n in (1, 128, 129, 9999)] == ["fused"] * 2 + ["grouped"] * 2
    assert settings.kernel_dispatch.find(QWEN, WeightForm("bf16")) is None
    write_profile(path, table("bf16", 32), shape, ["again"])
    write_profile(path, table("int4", 64), shape, ["and again"])
    merged = make_settings(str(path), {}).kernel_dispatch
    assert {entry.form: entry.ranges[0].up_to_tokens for entry in merged.entries} == {"int4": 64, "bf16": 32}
    text = path.read_text()
    assert text.count("Measured by") == 1 and "again" in text and "H200" not in text
    assert not list(tmp_path.glob("*.part"))


def test_other_settings_and_comments_survive(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "# My machine.\nprefetch_window: 5  # tried 3 to 9\n\nfused_kernel:   # old\n  block_dim: 256\n"
        "  # inside\n  stages: 3\n# about the cache\nexpert_cache_size: 12GB\nkernel_dispatch: []\ngovernor: fixed\n"
    )
    write_profile(path, table(), FusedConfig(), ["now"])
    text = path.read_text()
    for line in (
        "# My machine.\n",
        "prefetch_window: 5  # tried 3 to 9\n",
        "# about the cache\nexpert_cache_size: 12GB\n",
    ):
        assert line in text
    assert "# old" not in text and "# inside" not in text
    assert yaml.safe_load(text)["governor"] == "fixed"
    settings = make_settings(str(path), {})
    assert (settings.prefetch_window, settings.expert_cache_size) == (5, "12GB")
    assert settings.fused_kernel == FusedConfig() and settings.kernel_dispatch == table()


@pytest.mark.parametrize("text", ["{prefetch_window: 5}", "nonsense: 1\n", "- 1\n", "a: ["])
def test_what_is_no_profile_is_left_as_it_is(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(InputError):
        write_profile(path, table(), FusedConfig(), [])
    assert path.read_text() == text and list(tmp_path.iterdir()) == [path]
