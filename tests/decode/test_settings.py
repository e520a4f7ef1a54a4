"""Settings: the command line over a YAML profile over the defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runtime.config import RunSettings, load_profile, make_settings
from runtime.errors import InputError
from runtime.kernels.fused_config import FusedConfig
from runtime.memory.window import rows_with_slots


@pytest.fixture
def profile(tmp_path: Path) -> Any:
    def write(text: str) -> str:
        (tmp_path / "mine.yaml").write_text(text, encoding="utf-8")
        return str(tmp_path / "mine.yaml")

    return write


def test_said_beats_profile_beats_default(profile: Any) -> None:
    name = profile("prefetch_window: 5\nverify_window: 3\ngovernor: fixed\n")
    settings = make_settings(name, {"verify_window": 1, "prefetch_window": None, "eviction": "lru"})
    assert (settings.verify_window, settings.prefetch_window) == (1, 5)
    assert (settings.governor, settings.eviction) == ("fixed", "lru")
    assert settings.max_parallel_transfers == RunSettings().max_parallel_transfers
    assert make_settings(None, {}) == RunSettings()
    assert make_settings(name, {"prefetch_window": 0}).prefetch_window == 0, "0 is said, None is not"


def test_profiles_that_come_along_are_found_by_name() -> None:
    assert make_settings("example", {}) == make_settings("example.yaml", {}) == make_settings("profiles/example", {})
    example = make_settings("example", {})
    assert (example.prefetch_window, example.max_parallel_transfers) == (5, 4)
    assert example.expert_cache_size == "12GB" and example.fused_kernel == FusedConfig(256, 8)
    assert make_settings("cpu", {}).prefetch == "draft"


@pytest.mark.parametrize("name", sorted(path.stem for path in (Path(__file__).parents[2] / "profiles").glob("*.yaml")))
def test_every_profile_loads(name: str) -> None:
    make_settings(name, {})


def test_unknown_profile_names_those_that_exist() -> None:
    with pytest.raises(InputError, match="a profile nowhere; found no such file") as refusal:
        load_profile("nowhere")
    assert "cpu" in refusal.value.mend and "example" in refusal.value.mend


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prefetch_windw: 5", "prefetch_windw"),
        ("prefetch_window: five", "prefetch_window as int"),
        ("prefetch_window: 5.5", "prefetch_window as int"),
        ("prefetch_window: true", "prefetch_window as int"),
        ("prefetch_window: null", "prefetch_window as int"),
        ("speculate: 1", "speculate as bool"),
        ("governor: 3", "governor as str"),
        ("alpha: high", "alpha as float"),
        ("fused_kernel: 256", "fused_kernel to hold settings"),
        ("fused_kernel: {block: 256}", "block_dim"),
        ("fused_kernel: {block_dim: wide}", "block_dim as int"),
        ("fused_kernel: {block_dim: 100}", "a power of two from 64 to 1024 in fused_kernel"),
        ("fused_kernel: {block_dim: 32}", "block_dim"),
        ("fused_kernel: {block_dim: 2048}", "block_dim"),
        ("fused_kernel: {experts_per_block: -1}", "experts_per_block"),
        ("fused_kernel: {stages: 1}", "stages of 0"),
        ("fused_kernel: {stages: 33}", "stages of 0"),
        ("fused_kernel: {k_split: -2}", "k_split"),
        ("fused_kernel: {k_split: 3}", "k_split"),
        ("fused_kernel: {team: 64}", "team"),
        ("kernel_dispatch: {}", "a list as kernel_dispatch"),
        ("- 1\n- 2", "settings"),
        ("", "settings"),
        ("a: [", "YAML"),
        ("5: 6", "found 5"),
        ("prefetch_window: 513", "0 to 512"),
        ("prefetch_window: -1", "0 to 512"),
        ("max_parallel_transfers: 0", "1 to 64"),
        ("verify_window: -1", "verify-window"),
        ("governor: best", "a governor of"),
        ("eviction: fifo", "fifo"),
        ("prefetch: oracle", "oracle"),
        ("dtype: int8", "int8"),
        ("fetch_rows: -1", "fetch_rows"),
        ("context: 0", "context"),
        ("threads: -2", "threads"),
    ],
)
def test_wrong_profiles_are_refused_naming_what_is_wrong(profile: Any, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_settings(profile(text), {})


def test_profile_of_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_bytes(b"\xff\xfe\x00a: 1")
    with pytest.raises(InputError, match="YAML in"):
        load_profile(str(tmp_path / "bad.yaml"))


def test_numbers_are_taken_where_they_are_meant(profile: Any) -> None:
    settings = make_settings(profile("alpha: 1\nexpert_cache_size: 500000000\nfetch_rows: null\n"), {})
    assert (settings.alpha, settings.expert_cache_size, settings.fetch_rows) == (1.0, "500000000", None)


def test_rows_whose_experts_have_slots_count_shared_ones_once() -> None:
    """Of 60 experts, 4 a row, two rows use 7.7 different ones, four 14.5 and five 17.5 if use is even."""
    found = {slots: rows_with_slots(slots, 60, 4) for slots in (0, 3, 4, 7, 8, 15.1, 17.4, 17.6, 59, 60, 70)}
    assert found == {0: 0, 3: 0, 4: 1, 7: 1, 8: 2, 15.1: 4, 17.4: 4, 17.6: 5, 59: 59, 60: None, 70: None}
    assert rows_with_slots(1.5, 2, 2) == 0
