"""From measured times to a profile: which backend up to how many tokens, and the file that `run --config` reads."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from runtime.config import load_profile
from runtime.errors import InputError
from runtime.kernels.fused_config import FusedConfig
from runtime.kernels.tuning import INVARIANT_TOKENS, DispatchTable, TokenRange

SAME = 1.01  # times closer than this are equal: the backend of fewer tokens goes on
OURS = ("fused_kernel", "kernel_dispatch")
MARK, INDENT = "# Measured by moespeq bench kernels", "#   "

Times = Mapping[int, Mapping[str, float]]


def choose_ranges(times: Times, row_invariant: Collection[str]) -> tuple[TokenRange, ...]:
    """The fastest backend for every number of tokens.

    Up to `INVARIANT_TOKENS` one backend computes everything, and one whose rows do not depend on the batch. Between
    two measured numbers of tokens with different winners the border lies where lines through their times cross,
    rounded down to a multiple of 16: the fused kernel takes 16 tokens a launch, so its time rises in steps.

    Args:
        times: microseconds by number of tokens and backend; a backend that cannot compute so many is left out.
        row_invariant: backends that may compute few tokens.

    Raises:
        InputError: nothing that may compute few tokens was measured.
    """
    points = sorted(times)
    few = [point for point in points if point <= INVARIANT_TOKENS] or points[:1]
    allowed = [name for name in times[few[0]] if name in row_invariant and all(name in times[point] for point in few)]
    if not allowed:
        raise InputError(
            expected=f"a measured backend that computes up to {INVARIANT_TOKENS} tokens row by row alike",
            found=f"{', '.join(times[few[0]]) or 'none'} at {few[0]} tokens",
            mend="measure again with the fused kernel among the candidates",
        )
    now = min(allowed, key=lambda name: sum(math.log(times[point][name]) for point in few))
    ranges: list[TokenRange] = []
    for before, point in itertools.pairwise(points):
        if point <= INVARIANT_TOKENS:
            continue
        best = min(times[point], key=times[point].__getitem__)
        if now in times[point] and times[point][now] <= SAME * times[point][best]:
            continue
        border = max(INVARIANT_TOKENS, _crossing(times, before, point, now, best))
        if ranges and border <= (ranges[-1].up_to_tokens or 0):
            ranges.pop()
            border = max(INVARIANT_TOKENS, before)
        ranges.append(TokenRange(border, now))
        now = best
    return (*ranges, TokenRange(None, now))


def _crossing(times: Times, low: int, high: int, old: str, new: str) -> int:
    """The most tokens at which `old` is no slower, on straight lines in log-log between two measured points."""
    if old not in times[high] or new not in times[low]:
        return low
    gain_low = math.log(times[low][new] / times[low][old])  # above 0 where old is faster
    gain_high = math.log(times[high][new] / times[high][old])
    if gain_low <= 0 or gain_high >= 0:
        return low
    share = gain_low / (gain_low - gain_high)
    crossing = min(high - 1, int(low * (high / low) ** share))
    return max(low, crossing - crossing % INVARIANT_TOKENS)


def check_profile(path: Path) -> None:
    """Refuse a file to which `write_profile` could not add.

    Raises:
        InputError: it is no profile, or one whose settings stand on one line in braces.
    """
    if not path.is_file():
        raise InputError(expected="a file for --tune", found=f"{path}, which is none", mend="name a file")
    load_profile(str(path))
    _without(path.read_text(encoding="utf-8"), OURS, path)


def write_profile(path: Path, table: DispatchTable, fused: FusedConfig, notes: Sequence[str]) -> None:
    """Put what was measured into a profile, new or there already; its other settings and comments stay as they are.

    Args:
        path: a YAML file.
        table: merged with the one in the file; newer entries win.
        fused: replaces the file's `fused_kernel`.
        notes: lines of a comment that says how the values were found.

    Raises:
        InputError: the file is there and is no profile, or is one whose settings stand on one line in braces.
    """
    kept: dict[str, Any] = {}
    text = ""
    if path.exists():
        kept = load_profile(str(path))
        table = kept.get("kernel_dispatch", DispatchTable()).merged(table)
        text = _without(path.read_text(encoding="utf-8"), OURS, path).rstrip()
    shape = ", ".join(f"{name}: {value}" for name, value in dataclasses.asdict(fused).items())
    comment = "\n".join((f"{MARK}.", *(f"{INDENT}{note}" for note in notes)))
    text = "\n\n".join(filter(None, (text, f"{comment}\nfused_kernel: {{{shape}}}\n{_table_text(table)}")))
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    try:
        if load_profile(str(part)) != kept | {"fused_kernel": fused, "kernel_dispatch": table}:
            raise RuntimeError(f"the profile would not hold what was measured:\n{text}")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _without(text: str, names: Collection[str], path: Path) -> str:
    """YAML text without some top-level settings and the comment that an earlier measurement wrote above them."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if not isinstance(root, yaml.MappingNode) or root.flow_style:
        raise InputError(
            expected=f"one setting a line in {path}",
            found="settings in braces",
            mend="write `name: value` lines",
        )
    lines = text.splitlines(keepends=True)
    drop: set[int] = set()
    for key, value in root.value:
        if key.value in names:
            # A block ends where the next token begins; comments in between belong to what follows.
            end = value.end_mark.line + (1 if value.end_mark.column else 0)
            while end - 1 > key.start_mark.line and not lines[end - 1].split("#")[0].strip():
                end -= 1
            drop |= set(range(key.start_mark.line, end))
    ours = False
    for number, line in enumerate(lines):
        ours = line.startswith(MARK) or (ours and line.startswith(INDENT))
        if ours:
            drop.add(number)
    return "".join(line for number, line in enumerate(lines) if number not in drop)


def _table_text(table: DispatchTable) -> str:
    lines = ["kernel_dispatch:"]
    for entry in table.to_list():
        ranges = entry.pop("ranges")
        head = ", ".join(f"{name}: {value}" for name, value in entry.items())
        lines.append(f"- {head.replace(', ', chr(10) + '  ')}\n  ranges:")
        for part in ranges:
            end = "null" if part["up_to_tokens"] is None else part["up_to_tokens"]
            lines.append(f"  - {{up_to_tokens: {end}, backend: {part['backend']}}}")
    return "\n".join(lines) + "\n"
