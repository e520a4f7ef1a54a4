"""Memory at a node: which node, what the kernel is told, and where pages lie."""

from __future__ import annotations

import ctypes
import errno
import mmap
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from runtime.memory import numa
from runtime.memory.numa import Nearness

ADDRESS = 0x7F0000000000
DEFAULT, PREFERRED, INTERLEAVE = 0, 1, 3


class Kernel:
    """Notes what it is asked, with the nodes of each mask read as the kernel reads them.

    Attributes:
        mode: of the process's own policy.
        refused: errno that calls answer with, by name.
        places: of pages, by their number counted from ADDRESS.
        asked: what was asked, but for the process's own policy.
    """

    def __init__(self) -> None:
        self.mode = DEFAULT
        self.refused: dict[str, int] = {}
        self.places: Callable[[int], int] = lambda page: 0
        self.asked: list[tuple[object, ...]] = []

    def call(self, name: str, *arguments: int) -> int:
        if name in self.refused:
            return -self.refused[name]
        return int(getattr(self, name)(*arguments))

    def get_mempolicy(self, mode: int, mask: int, length: int, address: int, flags: int) -> int:
        assert (mask, length, address, flags) == (0, 0, 0, 0)
        ctypes.c_int.from_address(mode).value = self.mode
        return 0

    def mbind(self, address: int, num_bytes: int, mode: int, mask: int, length: int, flags: int) -> int:
        assert flags == 0
        self.asked.append(("mbind", address, num_bytes, mode, _nodes(mask, length)))
        return 0

    def set_mempolicy(self, mode: int, mask: int, length: int) -> int:
        self.asked.append(("set_mempolicy", mode, _nodes(mask, length)))
        return 0

    def move_pages(self, pid: int, count: int, pages: int, nodes: int, status: int, flags: int) -> int:
        assert (pid, nodes, flags) == (0, 0, 0)
        offsets = [page - ADDRESS for page in (ctypes.c_size_t * count).from_address(pages)]
        assert all(offset % mmap.PAGESIZE == 0 for offset in offsets)
        numbers = [offset // mmap.PAGESIZE for offset in offsets]
        self.asked.append(("move_pages", numbers))
        (ctypes.c_int * count).from_address(status)[:] = list(map(self.places, numbers))
        return 0


def _nodes(mask: int, length: int) -> list[int]:
    """Of a mask in memory; of `length` bits the last one is not looked at, and words are read whole."""
    if not mask:
        return []
    words = -(-(length - 1) // 64)
    bits = int.from_bytes(ctypes.string_at(mask, 8 * words), "little") & ((1 << length - 1) - 1)
    return [node for node in range(length) if bits >> node & 1]


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    kernel = Kernel()
    monkeypatch.setattr(numa, "system_call", kernel.call)
    return kernel


def machine(folder: Path, nodes: str | None = "0-1", **devices: str) -> Path:
    """A sysfs of a machine with memory at these nodes, and devices at theirs by names such as d0000_1b_00_0."""
    if nodes is not None:
        (folder / "devices/system/node").mkdir(parents=True)
        (folder / "devices/system/node/has_memory").write_text(f"{nodes}\n")
    for name, node in devices.items():
        domain, bus, device, function = name[1:].split("_")
        place = folder / "bus/pci/devices" / f"{domain}:{bus}:{device}.{function}"
        place.mkdir(parents=True)
        (place / "numa_node").write_text(f"{node}\n")
    return folder


def test_the_node_of_a_device_is_what_sysfs_says(tmp_path: Path) -> None:
    sysfs = machine(tmp_path, d0000_1b_00_0="0", d0000_c4_00_0="1", d10000_01_00_0="70")
    assert numa.node_of_device("0000:1B:00.0", sysfs) == 0
    assert numa.node_of_device("0000:c4:00.0", sysfs) == 1
    assert numa.node_of_device("10000:01:00.0", sysfs) == 70


@pytest.mark.parametrize("text", ["-1", "", "none"])
def test_a_device_without_a_node_is_nowhere(tmp_path: Path, text: str) -> None:
    sysfs = machine(tmp_path, d0000_1b_00_0=text)
    assert numa.node_of_device("0000:1b:00.0", sysfs) is None
    assert numa.node_of_device("0000:1c:00.0", sysfs) is None


@pytest.mark.parametrize("node", [0, 1, 62, 63, 64, 127, 128, 1023])
def test_the_mask_names_this_node_and_no_other(tmp_path: Path, kernel: Kernel, node: int) -> None:
    sysfs = machine(tmp_path, "0-1023")
    assert numa.prefer(ADDRESS, 5 * mmap.PAGESIZE, node, sysfs)
    with numa.preferred(node, sysfs):
        pass
    assert kernel.asked == [
        ("mbind", ADDRESS, 5 * mmap.PAGESIZE, PREFERRED, [node]),
        ("set_mempolicy", PREFERRED, [node]),
        ("set_mempolicy", DEFAULT, []),
    ]


@pytest.mark.parametrize(
    ("nodes", "node"),
    [("0", 0), ("1", 1), (None, 0), ("", 0), ("unknown", 0), ("0-1", 2), ("0,2-3", 1), ("0-1", None)],
    ids=["one node", "one node, not 0", "no list", "empty", "no numbers", "no such node", "a gap", "unknown"],
)
def test_without_a_choice_nothing_is_asked(tmp_path: Path, kernel: Kernel, nodes: str | None, node: int | None) -> None:
    sysfs = machine(tmp_path, nodes)
    assert not numa.prefer(ADDRESS, mmap.PAGESIZE, node, sysfs)
    with numa.preferred(node, sysfs):
        pass
    assert kernel.asked == []


@pytest.mark.parametrize("node", [0, 2, 3])
def test_nodes_are_read_from_a_list_with_gaps(tmp_path: Path, kernel: Kernel, node: int) -> None:
    assert numa.prefer(ADDRESS, mmap.PAGESIZE, node, machine(tmp_path, "0,2-3"))


def test_a_policy_that_the_process_was_given_stays(tmp_path: Path, kernel: Kernel) -> None:
    kernel.mode = INTERLEAVE
    sysfs = machine(tmp_path)
    assert not numa.prefer(ADDRESS, mmap.PAGESIZE, 1, sysfs)
    with numa.preferred(1, sysfs):
        pass
    assert kernel.asked == []


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS, errno.EINVAL])
@pytest.mark.parametrize("names", [["get_mempolicy"], ["mbind", "set_mempolicy"]])
def test_a_refusal_changes_nothing(tmp_path: Path, kernel: Kernel, code: int, names: list[str]) -> None:
    kernel.refused = dict.fromkeys(names, code)
    sysfs, ran = machine(tmp_path), False
    assert not numa.prefer(ADDRESS, mmap.PAGESIZE, 1, sysfs)
    with numa.preferred(1, sysfs):
        ran = True
    assert ran and kernel.asked == []


def test_an_error_inside_ends_the_preference(tmp_path: Path, kernel: Kernel) -> None:
    with pytest.raises(MemoryError), numa.preferred(1, machine(tmp_path)):
        raise MemoryError
    assert kernel.asked[-1] == ("set_mempolicy", DEFAULT, [])


def test_the_share_is_of_pages_that_are_there(kernel: Kernel) -> None:
    kernel.places = lambda page: (1, 1, 0, -errno.ENOENT)[page % 4]
    assert numa.nearness(ADDRESS, 8 * mmap.PAGESIZE, 1) == Nearness(1, 2 / 3)
    assert numa.nearness(ADDRESS, 8 * mmap.PAGESIZE, 0) == Nearness(0, 1 / 3)
    kernel.places = lambda page: -errno.ENOENT
    assert numa.nearness(ADDRESS, 8 * mmap.PAGESIZE, 1) == Nearness(1, None)


@pytest.mark.parametrize("num_pages", [1, 3, numa.SAMPLE_PAGES, 10 * numa.SAMPLE_PAGES + 7])
def test_the_sample_is_spread_over_all_of_it(kernel: Kernel, num_pages: int) -> None:
    numa.nearness(ADDRESS, num_pages * mmap.PAGESIZE - 1, 0)
    ((_, numbers),) = kernel.asked
    assert isinstance(numbers, list)
    assert len(set(numbers)) == len(numbers) == min(num_pages, numa.SAMPLE_PAGES)
    steps = {after - before for before, after in zip(numbers, [*numbers[1:], num_pages], strict=True)}
    assert numbers[0] == 0 and max(steps) - min(steps) <= 1


def test_where_the_node_or_the_pages_are_unknown_so_is_the_share(kernel: Kernel) -> None:
    assert numa.nearness(ADDRESS, mmap.PAGESIZE, None) == Nearness(None, None)
    assert kernel.asked == []
    kernel.refused = {"move_pages": errno.EPERM}
    assert numa.nearness(ADDRESS, mmap.PAGESIZE, 1) == Nearness(1, None)


@pytest.mark.parametrize(("system", "processor"), [("linux", "riscv64"), ("darwin", "x86_64")])
def test_other_machines_are_not_called(monkeypatch: pytest.MonkeyPatch, system: str, processor: str) -> None:
    monkeypatch.setattr(numa, "_libc", lambda: pytest.fail("called"))
    monkeypatch.setattr(numa.sys, "platform", system)
    monkeypatch.setattr(numa.platform, "machine", lambda: processor)
    assert numa.system_call("mbind", 0, 0, 0, 0, 0, 0) == -errno.ENOSYS


@contextmanager
def mapping(num_pages: int) -> Iterator[tuple[mmap.mmap, int]]:
    """A mapping whose pages nobody touched, and its address."""
    block = mmap.mmap(-1, num_pages * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    first = ctypes.c_char.from_buffer(block)
    try:
        yield block, ctypes.addressof(first)
    finally:
        del first
        block.close()


def policy(address: int = 0) -> int:
    """Mode of this thread's policy, or of the mapping's at an address."""
    mode = ctypes.c_int(-1)
    answer = numa.system_call("get_mempolicy", ctypes.addressof(mode), 0, 0, address, 2 if address else 0)
    if answer < 0:
        pytest.skip(f"the kernel refuses get_mempolicy: {errno.errorcode[-answer]}")
    return mode.value


@pytest.fixture
def here() -> int:
    """A node of this machine that has memory, and a machine whose kernel takes policies."""
    if platform.machine() not in numa._NUMBERS:
        pytest.skip("no numbers of the calls for this machine")
    nodes = numa._nodes_with_memory(numa.SYSFS)
    if not nodes:
        pytest.skip("the machine does not list its nodes")
    if policy() != DEFAULT:
        pytest.skip("this process was started with a policy of its own")
    return min(nodes)


def test_this_machines_kernel_takes_it(tmp_path: Path, here: int) -> None:
    """As if there were another node; a mapping has the policy before its first page, and its pages come from there."""
    sysfs = machine(tmp_path, f"{here},{here + 1}")
    with mapping(4) as (block, address):
        assert policy(address) == DEFAULT
        assert numa.prefer(address, 4 * mmap.PAGESIZE, here, sysfs)
        assert policy(address) == PREFERRED and policy() == DEFAULT
        assert numa.nearness(address, 4 * mmap.PAGESIZE, here) == Nearness(here, None)
        for page in range(3):
            block[page * mmap.PAGESIZE] = 1
        assert numa.nearness(address, 4 * mmap.PAGESIZE, here) == Nearness(here, 1.0)


def test_this_machines_kernel_takes_it_for_a_thread(tmp_path: Path, here: int) -> None:
    with numa.preferred(here, machine(tmp_path, f"{here},{here + 1}")):
        assert policy() == PREFERRED
    assert policy() == DEFAULT


def test_this_machines_kernel_refuses_a_node_that_is_not_there(tmp_path: Path, here: int) -> None:
    far = 1000
    if far in numa._nodes_with_memory(numa.SYSFS):
        pytest.skip("this machine has that many nodes")
    with mapping(1) as (block, address):
        assert not numa.prefer(address, mmap.PAGESIZE, far, machine(tmp_path, f"{here},{far}"))
        assert policy(address) == DEFAULT
        block[0] = 1
