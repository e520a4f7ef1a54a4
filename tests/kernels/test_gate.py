"""Gates: what they tell, find and list; and on a GPU that they wait for the host and for nothing else."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from runtime.gpu.accelerator import Cuda
from runtime.gpu.board import SlotBoard
from runtime.kernels.gate import FRESH, FreshList, GateKernels, GateOps
from tests.kernels.emulated_rows import gate_kernels

SIZES = [(1, 1, 1), (8, 4, 60), (8, 32, 1024), (3, 3, 5)]  # rows, top_k, experts


@pytest.fixture(scope="module")
def emulated(folder: Path) -> Iterator[GateKernels]:
    with pytest.MonkeyPatch.context() as patch:
        yield gate_kernels(folder, patch)


def check(gates: GateOps, rows: int, top_k: int, experts: int, device: str, listed: bool) -> None:
    """All that are there: absent ones, admitted ones and others, with and without a list."""
    chance, host = random.Random(rows * top_k), {"dtype": torch.int32, "pin_memory": device == "cuda"}
    index = torch.tensor([chance.sample(range(experts), top_k) for _ in range(rows)], dtype=torch.int32, device=device)
    kinds = [chance.choice("afm") if listed else chance.choice("am") for _ in range(experts)]
    entries = [{"a": n + 3, "f": n + 3 | FRESH, "m": -1}[kind] for n, kind in enumerate(kinds)]
    board_host, told_host = torch.tensor(entries, **host), torch.full((rows, top_k), -1, **host)
    stop_host = torch.ones(1, **host)
    board, told, stop = (seen(tensor, device) for tensor in (board_host, told_host, stop_host))
    here, late = (torch.full((experts,), 7, dtype=torch.int32, device=device) for _ in range(2))
    fresh = None
    if listed:
        sizes = torch.arange(experts, dtype=torch.int64, device=device) * 10**10 + 5
        lists = [torch.full((min(rows * top_k, experts),), 9, dtype=torch.int32, device=device) for _ in range(3)]
        fresh = FreshList(sizes, lists[0], lists[1], torch.zeros_like(lists[0], dtype=torch.int64), lists[2])
    gates.open(index, told, board, here)
    gates.wait(index, board, stop, here, late, fresh)
    if device == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(told_host, index.cpu())
    wanted = set(index.flatten().tolist())
    assert here.tolist() == [n + 3 if n in wanted and kinds[n] == "a" else -1 for n in range(experts)]
    assert late.tolist() == [n + 3 if n in wanted and kinds[n] == "f" else -1 for n in range(experts)]
    if fresh is not None:
        found = {n for n in wanted if kinds[n] == "f"}
        count = len(found)
        assert set(fresh.experts[:count].tolist()) == found
        assert fresh.slots.tolist() == [n + 3 for n in fresh.experts[:count].tolist()] + [-1] * (
            len(fresh.slots) - count
        )
        assert fresh.bytes[:count].tolist() == [n * 10**10 + 5 for n in fresh.experts[:count].tolist()]
        assert not fresh.faults.any()


def seen(host: Tensor, device: str) -> Tensor:
    return Cuda().seen(host) if device == "cuda" else host


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize(("rows", "top_k", "experts"), SIZES)
def test_without_a_gpu(emulated: GateKernels, rows: int, top_k: int, experts: int, listed: bool) -> None:
    check(emulated, rows, top_k, experts, "cpu", listed)


@pytest.mark.gpu
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize(("rows", "top_k", "experts"), SIZES)
def test_on_a_gpu(gpu: object, rows: int, top_k: int, experts: int, listed: bool) -> None:
    check(GateKernels(), rows, top_k, experts, "cuda", listed)


@pytest.mark.gpu
@pytest.mark.timeout(60)
def test_a_recorded_pass_waits_for_copies_that_the_host_starts_meanwhile(gpu: object) -> None:
    """Twenty layers; behind each gate a kernel adds up what lies in the slots that it names."""
    layers, experts, size, rows, top_k = 20, 16, 1 << 20, 8, 4
    cuda, gates = Cuda(), GateKernels()
    board = SlotBoard(cuda, tuple(range(layers)), experts, rows, top_k, lambda *_: False)
    slots = torch.zeros(layers * experts, size, dtype=torch.int32, device="cuda")
    exact = torch.arange(layers * experts, dtype=torch.int32).repeat_interleave(1024).view(layers * experts, 1024)
    source = torch.zeros(layers * experts, size, dtype=torch.int32, pin_memory=True)
    source[:, -1024:] = exact
    index = torch.zeros(layers, rows, top_k, dtype=torch.int32, device="cuda")
    tables = torch.full((2, layers, experts), -1, dtype=torch.int32, device="cuda")
    sums = torch.zeros(layers, experts, dtype=torch.int64, device="cuda")

    def queue(_: object) -> None:
        for place in range(layers):
            here, late = tables[:, place]
            gates.open(index[place], board.told_seen[place], board.seen[place], here)
            gates.wait(index[place], board.seen[place], board.stop_seen, here, late, None)
            both = torch.where(late >= 0, late, here)
            ends = slots[both.clamp(min=0).long(), -1024:].sum(1)
            sums[place].copy_(torch.where(both >= 0, ends, -1))

    board.begin()
    board.stop()
    cuda.catch_up()
    with cuda.active():
        queue(None)  # loads what it needs
        cuda.mark().wait()
    run = cuda.record(queue, cut=False, gated=True)
    for seed in range(3):
        made = torch.Generator().manual_seed(seed)
        chosen = torch.stack([torch.randperm(experts, generator=made)[:top_k] for _ in range(layers * rows)])
        index.copy_(chosen.view(layers, rows, top_k).int())
        for place in range(layers):
            for expert in range(experts):
                board.withdraw((place, expert))
        slots.zero_()
        torch.cuda.synchronize()
        board.begin()
        with cuda.active():
            run(None)
        end = cuda.mark()
        for place in range(layers):
            started = time.perf_counter()
            while not board.has_told(place):
                assert time.perf_counter() - started < 10
            for expert in set(board.told(place)):
                slot = place * experts + expert
                landing = cuda.start_copy(slots[slot].view(torch.uint8), source[slot].view(torch.uint8))
                landing.wait()
                board.put((place, expert), slot)
            board.meet(place)
        end.wait()
        board.end()
        for place in range(layers):
            wanted = set(index[place].flatten().tolist())
            right = [(place * experts + e) * 1024 if e in wanted else -1 for e in range(experts)]
            assert sums[place].tolist() == right
