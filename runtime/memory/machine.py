"""How much memory this process may still take."""

from __future__ import annotations

import os
from pathlib import Path


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Bytes that can be allocated without swapping: what the machine has left, or a control group's limit if lower.

    Args:
        root: where proc/ and sys/ are.
    """
    figures = [_machine_bytes(root), *_group_bytes(root)]
    return max(0, min(figure for figure in figures if figure is not None))


def _machine_bytes(root: Path) -> int:
    for line in _text(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")


def _group_bytes(root: Path) -> list[int | None]:
    """What each control group over this process has left; version 2 first, then version 1."""
    found: list[int | None] = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers not in ("", "memory") and "memory" not in controllers.split(","):
            continue
        mount = root / ("sys/fs/cgroup" if controllers == "" else "sys/fs/cgroup/memory")
        folder = mount / group.strip().lstrip("/")
        # A container may show only its own group, as the mount itself; limits of outer groups bind as well.
        for level in [folder, *folder.parents]:
            if level != mount and mount not in level.parents:
                break
            found.append(_left(level, "memory.max", "memory.current", "inactive_file"))
            found.append(_left(level, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"))
    return found


def _left(folder: Path, limit_name: str, usage_name: str, cached_name: str) -> int | None:
    """limit - usage of one group, file pages that can be dropped not counted as usage; None without a limit."""
    limit, usage = _text(folder / limit_name).strip(), _text(folder / usage_name).strip()
    if not limit.isdigit() or not usage.isdigit():
        return None
    cached = 0
    for line in _text(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == cached_name:
            cached = int(value)
    return int(limit) - max(0, int(usage) - cached)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # another kernel, another version of control groups: the other figures hold
        return ""
