"""Copies to a GPU that nobody waits for."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import torch

from runtime.gpu.accelerator import Cuda

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

FAILS = """
import cupy, torch, sys, time
from runtime.gpu.accelerator import Cuda
cuda = Cuda()
to, source = torch.zeros(64, dtype=torch.uint8, device="cuda"), torch.ones(64, dtype=torch.uint8, pin_memory=True)
code = 'extern "C" __global__ void fail() { for (int i = 0; i < 2000; i++) __nanosleep(100000); asm("trap;"); }'
fail = cupy.RawKernel(code, "fail")
with cupy.cuda.ExternalStream(cuda._copy_stream.cuda_stream):
    fail((1,), (1,), ())
landing, started = cuda.start_copy(to, source), time.perf_counter()
try:
    while not landing.done():
        assert time.perf_counter() - started < 30
except RuntimeError as error:
    print("failed", type(error).__name__)
"""


def test_what_is_done_is_there() -> None:
    cuda, made = Cuda(), torch.Generator().manual_seed(1)
    source = torch.randint(0, 256, (64 << 20,), dtype=torch.uint8, generator=made).pin_memory()
    place = torch.zeros(16 << 20, dtype=torch.uint8, device="cuda")
    seen, look = torch.cuda.Stream(), torch.empty(16 << 20, dtype=torch.uint8, pin_memory=True)
    cuda.catch_up()  # the place is filled on another stream
    for _ in range(200):
        size = int(torch.randint(1, 1 << int(torch.randint(1, 25, (1,), generator=made)), (1,), generator=made))
        first = int(torch.randint(0, len(source) - size, (1,), generator=made))
        landing = cuda.start_copy(place[:size], source[first : first + size])
        while not landing.done():
            pass
        with torch.cuda.stream(seen):
            look[:size].copy_(place[:size], non_blocking=True)
        seen.synchronize()
        assert landing.num_bytes == size and torch.equal(look[:size], source[first : first + size])


def test_copies_arrive_in_the_order_of_their_start() -> None:
    cuda = Cuda()
    source = torch.zeros(8 << 20, dtype=torch.uint8, pin_memory=True)
    place = torch.empty(len(source), dtype=torch.uint8, device="cuda")
    landings = [cuda.start_copy(place, source) for _ in range(20)]
    assert not landings[-1].done()
    for n, landing in enumerate(landings):
        while not landing.done():
            assert not any(later.done() for later in reversed(landings[n + 1 :]))
    landings = [cuda.start_copy(place, source) for _ in range(3)]
    landings[1].wait()
    assert landings[0].done() and landings[1].done()


def test_a_gpu_that_fails_is_not_waited_for() -> None:
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", FAILS], capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("failed"), done.stderr
    assert time.perf_counter() - started < 60
