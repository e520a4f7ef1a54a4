"""Host memory at the NUMA node of a GPU, and where it lies.

A machine with several processors has memory at each of them (nodes). A GPU is attached to one node, and copies from
another's memory pass the link between the processors first. Linux takes a page, when it is first touched, from the node
of the thread that touches it, so which one a GPU's copies come from was chance.

Everything here prefers a node and never binds to it: where it is full, pages come from another. Nothing is done and
nothing is said where the node is unknown, where the machine has memory at one node only, where the process was started
with a policy of its own (numactl), and where the kernel refuses, as in containers without CAP_SYS_NICE.

Sources: the manual pages mbind(2), set_mempolicy(2), get_mempolicy(2) and move_pages(2); the kernel's
admin-guide/mm/numa_memory_policy and ABI/testing/sysfs-bus-pci (`numa_node`).
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SYSFS = Path("/sys")
SAMPLE_PAGES = 1024
"""Pages that are looked at to see where memory lies."""

_NUMBERS = {
    "x86_64": {"mbind": 237, "set_mempolicy": 238, "get_mempolicy": 239, "move_pages": 279},
    "aarch64": {"mbind": 235, "get_mempolicy": 236, "set_mempolicy": 237, "move_pages": 239},
}
_DEFAULT, _PREFERRED = 0, 1  # MPOL_*
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


@dataclass(frozen=True, slots=True)
class Nearness:
    """Where host memory lies.

    Attributes:
        gpu_node: NUMA node of the GPU; None where it is unknown.
        share_at_it: of a sample of the pages that are there; None where the kernel does not say, or none is.
    """

    gpu_node: int | None
    share_at_it: float | None


def node_of_device(address: str, sysfs: Path = SYSFS) -> int | None:
    """The node that a PCI device is attached to; None where the machine does not say.

    Args:
        address: domain:bus:device.function in hexadecimal, such as 0000:1B:00.0.
        sysfs: where bus/ is.
    """
    try:
        node = int((sysfs / "bus/pci/devices" / address.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return None if node < 0 else node


def prefer(address: int, num_bytes: int, node: int | None, sysfs: Path = SYSFS) -> bool:
    """Have the pages of a mapping come from a node; those that were touched before stay where they are.

    Args:
        address: the mapping's begin.
        num_bytes: of it, counted in whole pages.
        node: to come from; None does nothing.
        sysfs: where devices/ is.

    Returns:
        Whether the kernel took it.
    """
    if node is None or not _is_open(node, sysfs):
        return False
    mask = _mask(node)
    return system_call("mbind", address, num_bytes, _PREFERRED, ctypes.addressof(mask), _length(mask), 0) == 0


@contextmanager
def preferred(node: int | None, sysfs: Path = SYSFS) -> Iterator[None]:
    """Have the pages that this thread touches or a driver takes for it come from a node, as long as the context.

    For memory that a driver maps itself, which no mbind reaches. Arguments as for `prefer`.
    """
    if node is None or not _is_open(node, sysfs):
        yield
        return
    mask = _mask(node)
    system_call("set_mempolicy", _PREFERRED, ctypes.addressof(mask), _length(mask))
    try:
        yield
    finally:
        system_call("set_mempolicy", _DEFAULT, 0, 0)  # as it was: under any other it is not open


def nearness(address: int, num_bytes: int, node: int | None) -> Nearness:
    """How much of a mapping lies at a node, by up to SAMPLE_PAGES of its pages, evenly spread.

    Args:
        address: the mapping's begin, a multiple of the page size.
        num_bytes: of it.
        node: the GPU's.
    """
    num_pages = -(-num_bytes // mmap.PAGESIZE)
    count = min(SAMPLE_PAGES, num_pages)
    if node is None or count < 1:
        return Nearness(node, None)
    pages = (ctypes.c_void_p * count)(*(address + mmap.PAGESIZE * (i * num_pages // count) for i in range(count)))
    nodes = (ctypes.c_int * count)(*[-errno.ENOENT] * count)
    # Without nodes to move to, the call says where pages are: a node, or the negative errno of one that is nowhere.
    if system_call("move_pages", 0, count, ctypes.addressof(pages), 0, ctypes.addressof(nodes), 0) < 0:
        return Nearness(node, None)
    present = [found for found in nodes if found >= 0]
    return Nearness(node, present.count(node) / len(present) if present else None)


def system_call(name: str, *arguments: int) -> int:
    """What the kernel answers, or the negative errno; -ENOSYS on machines whose numbers are not known here."""
    number = _NUMBERS.get(platform.machine(), {}).get(name)
    if number is None or sys.platform != "linux":
        return -errno.ENOSYS
    result = int(_libc().syscall(*map(ctypes.c_long, (number, *arguments))))
    return -ctypes.get_errno() if result == -1 else result


@functools.cache
def _libc() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    library.syscall.restype = ctypes.c_long
    return library


def _is_open(node: int, sysfs: Path) -> bool:
    """Whether there is memory at this node and at another, and nobody has chosen for this process."""
    nodes = _nodes_with_memory(sysfs)
    if node not in nodes or len(nodes) < 2:
        return False
    mode = ctypes.c_int(-1)
    return system_call("get_mempolicy", ctypes.addressof(mode), 0, 0, 0, 0) == 0 and mode.value == _DEFAULT


def _nodes_with_memory(sysfs: Path) -> set[int]:
    """From a list such as 0-1,4; empty where there is none."""
    nodes: set[int] = set()
    try:
        for part in (sysfs / "devices/system/node/has_memory").read_text().split(","):
            first, _, last = part.partition("-")
            nodes.update(range(int(first), int(last or first) + 1))
    except (OSError, ValueError):
        return set()
    return nodes


def _mask(node: int) -> Any:
    """A bit for each node, in as many words as this one needs."""
    words = (ctypes.c_ulong * (node // _WORD_BITS + 1))()
    words[node // _WORD_BITS] = 1 << node % _WORD_BITS
    return words


def _length(mask: Any) -> int:
    """Of a mask, as the calls want it: the kernel looks at one bit less than it is told."""
    return _WORD_BITS * len(mask) + 1
