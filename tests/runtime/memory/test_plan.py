from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import InputError, PlanError
from runtime.memory.machine import available_memory_bytes
from runtime.memory.plan import MemoryPlan, format_size, make_plan, parse_size

SLOT = 196_608


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("12GB", 12 * 10**9),
        ("512MiB", 512 * 2**20),
        ("1.5 GiB", 3 * 2**29),
        ("196608", 196608),
        (4096, 4096),
        ("0", 0),
        ("2kb", 2000),
        ("2KiB", 2048),
        (" 1 TB ", 10**12),
        ("25%", 25),
        ("0.1%", 0),
        ("100 %", 100),
    ],
)
def test_parses_sizes(text: str | int, num_bytes: int) -> None:
    assert parse_size(text, 100) == num_bytes


@pytest.mark.parametrize("text", ["", "GB", "-1", "1e9", "12 apples", "1.2.3MB", "101%", "nan", "12G", True, None, -5])
def test_refuses_what_is_no_size(text: Any) -> None:
    with pytest.raises(InputError, match="size"):
        parse_size(text, 100)


def test_a_share_needs_a_whole() -> None:
    with pytest.raises(InputError, match="25%"):
        parse_size("25%")


@given(st.integers(0, 10**15), st.integers(1, 100))
def test_shares_are_exact(whole: int, percent: int) -> None:
    assert parse_size(f"{percent}%", whole) == whole * percent // 100


def test_formats_sizes() -> None:
    sizes = [0, 999, 196608, 12 * 10**9, 2 * 10**12]
    assert [format_size(size) for size in sizes] == ["0 B", "999 B", "196.6 kB", "12.0 GB", "2.0 TB"]


def plan(**changes: Any) -> MemoryPlan:
    values: dict[str, Any] = {
        "dense_bytes": 1_000_000,
        "draft_bytes": 500_000,
        "kv_bytes_per_token": 1000,
        "context_tokens": 100,
        "slot_bytes": SLOT,
        "num_experts_total": 96,
        "top_k": 4,
        "num_moe_layers": 6,
        "available_bytes": 10**9,
    }
    return make_plan(**(values | changes))


def test_plans_sizes_and_shares() -> None:
    quarter = plan(cache_size="25%")
    assert quarter.num_slots == 24 and quarter.cache_bytes == 24 * SLOT
    assert quarter.minimum_cache_bytes == SLOT and quarter.recommended_cache_bytes == 28 * SLOT
    assert quarter.total_bytes == 1_600_000 + 24 * SLOT
    assert plan(cache_size="1MB").num_slots == 5
    assert plan(cache_size=SLOT).num_slots == 1
    assert plan(cache_size="900MB").num_slots == 96
    assert plan(cache_size="100%").cache_bytes == quarter.total_expert_bytes
    assert plan(top_k=16, max_parallel_transfers=8).recommended_cache_bytes == 96 * SLOT
    assert dict(quarter.lines())["expert cache"] == "4.7 MB: 24 of 96 experts, 25%"


def test_default_cache_takes_all_or_a_part_of_what_is_left() -> None:
    assert plan().num_slots == 96
    assert plan(available_bytes=1_600_000 + 10 * SLOT).num_slots == 6
    assert plan(available_bytes=1_600_000 + SLOT).num_slots == 1


def test_names_the_minimum_when_the_cache_holds_no_expert() -> None:
    for size in ("0", "100kB", "1%"):
        with pytest.raises(PlanError) as caught:
            plan(cache_size=size)
        assert str(SLOT) in caught.value.mend and size in caught.value.found


def test_names_the_largest_cache_that_fits() -> None:
    with pytest.raises(PlanError) as caught:
        plan(cache_size="50%", available_bytes=1_600_000 + 10 * SLOT + 5)
    assert f"--expert-cache {10 * SLOT} or less" in caught.value.mend
    assert plan(cache_size=10 * SLOT, available_bytes=1_600_000 + 10 * SLOT + 5).num_slots == 10


def test_names_the_longest_context_that_fits() -> None:
    with pytest.raises(PlanError) as caught:
        plan(available_bytes=1_500_000 + SLOT + 40_500)
    assert "at most 40 tokens" in caught.value.mend
    assert plan(available_bytes=1_500_000 + SLOT + 40_500, context_tokens=40).num_slots == 1
    with pytest.raises(PlanError) as caught:
        plan(available_bytes=1_000_000)
    assert "tokens" not in caught.value.mend and "1.8 MB" in caught.value.mend


@given(st.integers(0, 10**8), st.integers(1, 200), st.one_of(st.none(), st.integers(0, 10**8)))
def test_a_plan_fits_or_is_refused(available: int, experts: int, size: int | None) -> None:
    try:
        made = plan(available_bytes=available, num_experts_total=experts, cache_size=size)
    except PlanError:
        return
    assert made.total_bytes <= available and 1 <= made.num_slots <= experts


def machine(root: Path, files: dict[str, str]) -> int:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return available_memory_bytes(root)


MEMINFO = {"proc/meminfo": "MemTotal:  2000 kB\nMemAvailable:   1000 kB\n"}


def test_available_memory_is_the_lowest_of_machine_and_groups(tmp_path: Path) -> None:
    roots = (tmp_path / str(index) for index in itertools.count())
    assert machine(next(roots), MEMINFO) == 1_024_000
    v2 = MEMINFO | {"proc/self/cgroup": "0::/user/run\n"}
    group = "sys/fs/cgroup/user/"
    own = {group + "run/memory.max": "max\n", group + "run/memory.current": "5\n"}
    outer = {group + "memory.max": "9000\n", group + "memory.current": "8000\n"}
    assert machine(next(roots), v2 | own) == 1_024_000
    assert machine(next(roots), v2 | own | outer) == 1000
    assert machine(next(roots), v2 | own | outer | {group + "memory.stat": "anon 5\ninactive_file 700\n"}) == 1700
    v1 = MEMINFO | {"proc/self/cgroup": "9:name=systemd:/\n4:memory:/a/b\n1:cpu:/\n"}
    mount = "sys/fs/cgroup/memory/"
    container = {mount + "memory.limit_in_bytes": "5000\n", mount + "memory.usage_in_bytes": "6000\n"}
    assert machine(next(roots), v1 | container) == 0
    assert available_memory_bytes() > 0


def test_available_memory_without_proc(tmp_path: Path) -> None:
    assert available_memory_bytes(tmp_path) > 0
