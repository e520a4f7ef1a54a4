"""Pinned memory comes from the NUMA node of the GPU."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from moespeq_cli.bench.environment import gpu_environment
from runtime.gpu import host_tier, lane
from runtime.gpu.host_tier import Arena, HostCache, PinnedPool
from runtime.kernels import device
from runtime.memory import numa
from runtime.memory.location import PAGE_BYTES

from ..decode.conftest import PackOf
from ..runtime.memory.records import MemoryStore
from .engines import settings_of
from .stand_in import open_gpu

KEYS = [(layer, expert) for layer in range(2) for expert in range(3)]
NODE = 1


def touched(address: int, num_bytes: int) -> int:
    """Pages of a mapping that are there; the top bit of an entry says so, to everyone."""
    count = num_bytes // mmap.PAGESIZE
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        pagemap.seek(address // mmap.PAGESIZE * 8)
        entries = (ctypes.c_uint64 * count).from_buffer_copy(pagemap.read(8 * count))
    return sum(entry >> 63 for entry in entries)


class Gpu:
    """A GPU at NODE of a machine with two, and its driver, which touches what it registers.

    Attributes:
        events: what was asked of kernel and driver, with the pages that were there by then.
    """

    def __init__(self, refuses: bool) -> None:
        self.events: list[tuple[str, int, int, int]] = []
        self.policy = "default"
        self._refuses = refuses

    def system_call(self, name: str, *arguments: int) -> int:
        if name == "get_mempolicy":
            ctypes.c_int.from_address(arguments[0]).value = 0
        if name == "mbind":
            address, num_bytes, mode, mask = arguments[:4]
            assert mode == 1 and ctypes.c_ulong.from_address(mask).value == 1 << NODE
            self.events.append((name, address, num_bytes, touched(address, num_bytes)))
        if name == "set_mempolicy":
            self.policy = "preferred" if arguments[0] == 1 else "default"
        if name == "move_pages":
            ctypes.memset(arguments[4], 0, 4 * arguments[1])
            (ctypes.c_int * arguments[1]).from_address(arguments[4])[0] = NODE
        return 0

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self.events.append(("register", address, num_bytes, touched(address, num_bytes)))
        if self._refuses:
            return 2
        ctypes.memset(address, 0, num_bytes)
        return 0

    def cudaHostUnregister(self, address: int) -> None:
        pass


@pytest.fixture(params=[False, True], ids=["pinned", "refused"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    if not Path("/proc/self/pagemap").exists():
        pytest.skip("the kernel does not say which pages are there")
    gpu = Gpu(request.param)
    monkeypatch.setattr(numa, "_nodes_with_memory", lambda sysfs: {0, NODE})
    monkeypatch.setattr(numa, "system_call", gpu.system_call)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(host_tier, "_runtime", lambda: gpu)
    for module in (host_tier, lane):
        monkeypatch.setattr(module, "numa_node", lambda: NODE)
    return gpu


def preferred_first(gpu: Gpu, pool: PinnedPool) -> None:
    """The whole of it was preferred, then registered, and no page was there at either."""
    place = pool.tensor(0).data_ptr(), pool.total_bytes
    assert gpu.events == [("mbind", *place, 0), ("register", *place, 0)]


def test_an_arena_prefers_the_node_before_a_page_is_touched(gpu: Gpu) -> None:
    arena = Arena.load(MemoryStore(), KEYS, 2, lambda num_bytes: None)
    preferred_first(gpu, arena._pool)
    assert touched(arena.record(KEYS[0]).data_ptr(), PAGE_BYTES) > 0
    arena.close()


def test_so_does_a_host_cache(gpu: Gpu) -> None:
    cache = HostCache(MemoryStore(), 3)
    preferred_first(gpu, cache._pool)
    cache.close()


def test_staging_memory_is_taken_while_the_node_is_preferred(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []

    def empty(num_bytes: int, dtype: torch.dtype, pin_memory: bool) -> Tensor:
        assert pin_memory
        taken.append(gpu.policy)
        return torch.zeros(num_bytes, dtype=dtype)

    monkeypatch.setattr(lane, "torch", SimpleNamespace(empty=empty, uint8=torch.uint8, cuda=_Streams()))
    source, to = torch.arange(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    way = lane.Lane(torch.device("cpu"))
    way.copy(to, source, pinned=False)
    assert torch.equal(to, source)
    way.copy_back(source.zero_(), to, pinned=False)
    assert torch.equal(to, source)
    assert taken == ["preferred"] and gpu.policy == "default"


class _Streams:
    """Stands in for torch.cuda where everything is done at once."""

    def Stream(self, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace()

    def Event(self, blocking: bool) -> SimpleNamespace:
        return SimpleNamespace(record=lambda stream: None, synchronize=lambda: None)

    def stream(self, stream: object) -> torch.no_grad:
        return torch.no_grad()


def test_the_report_says_where_the_memory_lies(gpu: Gpu) -> None:
    arena = Arena.load(MemoryStore(), KEYS, 1, lambda num_bytes: None)
    assert arena.nearness() == numa.Nearness(NODE, 1 / (arena._pool.total_bytes // mmap.PAGESIZE))
    arena.close()
    cache = HostCache(MemoryStore(), 2)
    assert cache.nearness() == numa.Nearness(NODE, 1 / (cache._pool.total_bytes // mmap.PAGESIZE))
    cache.close()


@pytest.mark.parametrize("host_cache", [None, "50%"])
def test_a_run_reports_it(pack_of: PackOf, monkeypatch: pytest.MonkeyPatch, host_cache: str | None) -> None:
    monkeypatch.setattr(PinnedPool, "nearness", lambda pool: numa.Nearness(NODE, 0.25))
    pack = pack_of("qwen2_moe", torch.bfloat16)
    with open_gpu(pack, settings_of(pack, slots=4, host_cache_size=host_cache)) as engine:
        assert engine.report()["host_memory_numa"] == {"gpu_node": NODE, "share_at_it": 0.25}


def test_figures_name_the_gpus_node(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = dict.fromkeys(("major", "minor", "multi_processor_count", "total_memory", "L2_cache_size"), 1)
    facts = SimpleNamespace(name="a GPU", **sizes)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: facts)
    monkeypatch.setattr(device, "numa_node", lambda: NODE)
    assert gpu_environment()["numa_node"] == NODE


class Driver:
    """Knows one GPU's address, written as the driver writes it."""

    def __init__(self, result: int = 0) -> None:
        self._result = result

    def cuDeviceGetPCIBusId(self, address: ctypes.Array[ctypes.c_char], num_bytes: int, index: int) -> int:
        assert index == 3 and num_bytes == len(address) >= 13
        address.value = b"0000:1B:00.0"
        return self._result


@pytest.mark.parametrize(("available", "result", "node"), [(True, 0, 1), (True, 101, None), (False, 0, None)])
def test_the_node_of_the_current_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, available: bool, result: int, node: int | None
) -> None:
    place = tmp_path / "bus/pci/devices/0000:1b:00.0"
    place.mkdir(parents=True)
    (place / "numa_node").write_text("1\n")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(device, "driver", lambda: Driver(result))
    assert device.numa_node(tmp_path) == node
