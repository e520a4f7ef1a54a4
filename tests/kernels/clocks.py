"""Copies of the kernels for few tokens with clocks at named places: where the time of a call goes.

A clock is one store of a warp's first lane, `stamps[block][number]`, which a graph's last call leaves behind: the GPU's
time in nanoseconds, one for all its processors. It costs a call 1 to 4 %. When the call ahead is over, its last
times are kept beside, so that times count from there. Places are pieces of the sources;
`tests/kernels/test_clocks.py` looks that each is there once.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

BLOCKS, NUMBERS = 256, 32  # room of `stamps`
AHEAD = NUMBERS - 1  # number of the last clock of the call ahead
_DEFINED = f"""extern "C" __device__ u32 stamps[{BLOCKS * NUMBERS}];
__device__ __forceinline__ void CLOCK(int number) {{
  u64 now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  if (threadIdx.x % 32 == 0) stamps[blockIdx.x * {NUMBERS} + number] = (u32)now;
}}
__device__ __forceinline__ void KEEP_LAST_CLOCK(int number) {{
  if (threadIdx.x % 32 == 0) stamps[blockIdx.x * {NUMBERS} + {AHEAD}] = stamps[blockIdx.x * {NUMBERS} + number];
}}
DYNAMIC_SHARED(smem);"""


@dataclass(frozen=True, slots=True)
class Clock:
    """Where a clock is read.

    Attributes:
        name: for tables; clocks of one name have one number.
        file: that has the place; kernels that share it share the clock.
        text: where in it, once.
        warp: of the block that reads it, an expression of the source; every warp that comes by where it is empty.
        before: whether it is read before the text.
    """

    name: str
    file: str
    text: str
    warp: str = ""
    before: bool = False


_AHEAD = "  wait_for_previous_kernel();\n"
_LIST = "few_tokens.cuh"
_FIRST_TEAM = "team == 0 && member == 0"
_ROWS = "  finish_rows<COMPUTE * 32>(args, rt);\n"


def _begin(file: str, warp: str) -> tuple[Clock, Clock]:
    return Clock("begins", file, _AHEAD, warp, True), Clock("kernel ahead over", file, _AHEAD, warp)


_LISTED = Clock("compute ready", "roles.cuh", "  barrier_of<COMPUTE * 32>(1);\n}\n", "threadIdx.x < 32", True)
_ASKED = Clock("all asked for", "roles.cuh", "  if (lane == 0 && atomic_add(", "threadIdx.x / 32 == PRODUCER", True)
_DOWN = (
    Clock("down done", "roles.cuh", _ROWS, "threadIdx.x < 32", True),
    Clock("y", "roles.cuh", _ROWS, "threadIdx.x < 32"),
)
_TEAMS = (
    *_begin("teams.cuh", "me.warp == COMPUTE"),
    Clock("producer begins", "teams.cuh", "    notes = (int2*)(smem + OFF_NOTE) + team * STAGES;\n", "team == 0"),
    _LISTED,
    Clock("first tile done", "teams.cuh", "    const int buffer = reserve();\n", f"{_FIRST_TEAM} && done == 0", True),
    Clock("claims over", "teams.cuh", "    if (blockIdx.x >= TILES2 || team >= num_active) stage(", "team == 0", True),
    _ASKED,
    Clock(
        "gate and up done",
        "teams.cuh",
        "  __device__ __forceinline__ void end() {   // the finishers of this team end\n",
        _FIRST_TEAM,
    ),
    *_DOWN,
)
_SMALL, _RESIDUAL = "moe_small.cu", "moe_residual.cu"
CLOCKS: dict[str, tuple[Clock, ...]] = {
    _SMALL: (
        *_begin(_SMALL, "me.warp == 0"),
        Clock("list seen", _SMALL, "  me.num_active = count_active();\n", "me.warp == 0", True),
        Clock("ring asked for", _SMALL, "    if (i == 0) begins_with_tile = copied.phase == 1;\n  }\n", "me.warp == 0"),
        Clock("last of gate and up done", _SMALL, "  int row_tile = blockIdx.x;\n", "me.warp == 0", True),
        Clock("last of down done", _SMALL, "  rows_until(TILES2);\n", "me.warp == 0", True),
        Clock("y", _SMALL, "  rows_until(TILES2);\n", "me.warp == 0"),
    ),
    "moe_bf16.cu": _TEAMS,
    "moe_codes.cu": _TEAMS,
    _RESIDUAL: (
        *_begin(_RESIDUAL, "me.warp == COMPUTE"),
        Clock(
            "producer begins",
            _RESIDUAL,
            "  const int number = me.warp - PRODUCER;\n",
            "me.warp == PRODUCER",
            True,
        ),
        _LISTED,
        Clock("first jobs pushed", _RESIDUAL, "  bool over = false;              // phase 1\n", "number == 0"),
        Clock("copies of gate and up over", _RESIDUAL, "      over = true;\n", "number == 0"),
        _ASKED,
        Clock(
            "gate and up done",
            _RESIDUAL,
            "  // ---- phase 2: the first stage is there already\n",
            "me.warp == 0",
            True,
        ),
        *_DOWN,
    ),
}
"""By kernel, in the order of time; `y` is a block's end."""
_PLACES = list(dict.fromkeys(clock for clocks in CLOCKS.values() for clock in clocks))
_NUMBER = {name: number for number, name in enumerate(dict.fromkeys(clock.name for clock in _PLACES))}


def with_clocks(folder: Path, to: Path) -> None:
    """Copy a folder of kernels and put the clocks in.

    Raises:
        ValueError: a place is not there once.
    """
    to.mkdir(parents=True, exist_ok=True)
    for path in (*folder.glob("*.cu"), *folder.glob("*.cuh")):
        shutil.copy(path, to)
    _edit(to / _LIST, "DYNAMIC_SHARED(smem);", _DEFINED)
    for clock in _PLACES:
        line = f"{f'if ({clock.warp}) ' if clock.warp else ''}CLOCK({_NUMBER[clock.name]});\n"
        _edit(to / clock.file, clock.text, line + clock.text if clock.before else clock.text + line)
    keep = f"if (me.warp == THREADS / 32 - 1) KEEP_LAST_CLOCK({_NUMBER['y']});\n"
    for file in {clock.file for clock in _PLACES if clock.text == _AHEAD}:
        _edit(to / file, _AHEAD, _AHEAD + keep)


def _edit(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    if text.count(old) != 1:
        raise ValueError(f"{path.name} has {text.count(old)} times {old!r}")
    path.write_text(text.replace(old, new), encoding="utf-8")


def table(kernel: str, stamps: npt.NDArray[np.uint32], blocks: int) -> Sequence[tuple[str, int, int, int]]:
    """Nanoseconds since the last block of the call ahead ended: the median, least and most over the blocks, by name.

    Args:
        kernel: a key of CLOCKS.
        stamps: [BLOCKS, NUMBERS], as the kernel left them.
        blocks: of the grid.
    """
    times, wrap = stamps[:blocks].astype(np.int64), 1 << 32
    ends = times[times[:, AHEAD] > 0, AHEAD]  # a block without rows has none
    since = (times - ends[0] + wrap // 2) % wrap
    since -= ((ends - ends[0] + wrap // 2) % wrap).max()
    numbers = {clock.name: _NUMBER[clock.name] for clock in CLOCKS[kernel]}
    columns = [(name, since[times[:, number] > 0, number]) for name, number in numbers.items()]
    return [(name, int(np.median(seen)), int(seen.min()), int(seen.max())) for name, seen in columns if len(seen)]
