"""Launches hand over what they were given, in the order of torch's stream, alone and in a CUDA graph."""

from __future__ import annotations

import importlib
import pkgutil
import struct
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import runtime.kernels
from runtime.errors import KernelError, ShapeError
from runtime.kernels import launch
from runtime.kernels.compile import Source, load
from runtime.kernels.cubin import Resources
from runtime.kernels.device import Gpu, current_gpu
from runtime.kernels.launch import Kernel
from runtime.kernels.tensor_map import tensor_map_2d, tensor_map_3d

ROOT = Path(__file__).parent.parent.parent
PROBES = Path(__file__).parent / "probes"
SOURCE = Source("launch_probe.cu")


def steps(x: torch.Tensor, count: int) -> torch.Tensor:
    """What so many launches of `step` make of x."""
    numbers = torch.arange(len(x), device=x.device, dtype=torch.int32)
    for _ in range(count):
        x = (3 * x + numbers) % 1021
    return x


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_message_says_so() -> None:
    with pytest.raises(KernelError, match=r"expected an NVIDIA GPU of compute capability 8\.0 or newer; found none"):
        current_gpu()
    with pytest.raises(KernelError, match="expected an NVIDIA GPU"):
        load(SOURCE)


def test_a_function_keeps_the_most_shared_memory_that_any_of_its_kernels_asks_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    function = SimpleNamespace(max_dynamic_shared_size_bytes=0, kernel=SimpleNamespace(ptr=0))
    needs = Resources(registers=32, spill_bytes=0, stack_bytes=0, static_smem_bytes=100, parameter_bytes=(8,))
    module = SimpleNamespace(resources={"one": needs}, raw=SimpleNamespace(get_function=lambda name: function))
    monkeypatch.setattr(launch, "current_gpu", lambda: Gpu(0, "a GPU", (9, 0), 132, 232448))
    monkeypatch.setattr(launch, "driver", lambda: SimpleNamespace(cuLaunchKernelEx=None))
    for size in (80_000, 60_000, 90_000, 0):
        Kernel(module, "one", 128, size)  # type: ignore[arg-type]
    assert function.max_dynamic_shared_size_bytes == 90_000


def test_every_module_imports_without_cupy() -> None:
    """CuPy is an extra: a machine without it imports everything, and asks for it where it is needed."""
    names = [module.name for module in pkgutil.iter_modules(runtime.kernels.__path__, "runtime.kernels.")]
    assert {"runtime.kernels.compile", "runtime.kernels.launch"} <= set(names)
    for name in names:
        importlib.import_module(name)
    code = (
        "import sys; sys.modules['cupy'] = None\n"
        f"import importlib; [importlib.import_module(name) for name in {names}]\n"
        "from runtime.errors import KernelError\n"
        "from pathlib import Path\n"
        "from runtime.kernels import compile\n"
        f"compile.kernel_folder = lambda: Path({str(PROBES)!r})\n"
        "try: compile.compile_cubin(compile.Source('launch_probe.cu'), 'sm_80')\n"
        "except KernelError as error: print(error, '|', error.mend)\n"
    )
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert shown.startswith("expected CuPy, for CUDA kernels; found ")
    assert "pip install 'moespeq[cuda]'" in shown


@pytest.mark.gpu
@pytest.mark.usefixtures("probes")
class TestLaunch:
    @pytest.mark.parametrize("n", [1, 1000, 12345])
    def test_adds_vectors_on_the_current_stream(self, n: int) -> None:
        kernel = Kernel(load(SOURCE), "add", 256)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            a, b = torch.randn(n, device="cuda"), torch.randn(n, device="cuda")
            out = torch.zeros(n + 1, device="cuda")
            torch.cuda._sleep(10_000_000)  # only the order of the stream makes what follows see it
            a.mul_(2)
            kernel.launch(-(-n // 256), (a, b, out, n))
            assert torch.equal(out[:n], a + b)
            assert out[n] == 0

    def test_passes_every_type_by_its_size(self) -> None:
        kernel = Kernel(load(SOURCE), "types", 32)
        pack = struct.pack("<dif", 0.1, -7, 2.5)
        out = torch.zeros(11, dtype=torch.float64, device="cuda")
        args = (-3, -300, -70000, -(1 << 40), np.uint32(4000000000), 0.75, 1 / 3, pack, None)
        expected = [-3, -300, -70000, -(1 << 40), 4e9, 0.75, 1 / 3, 0.1, -7, 2.5, 1]
        kernel.launch(1, (out, *args))
        assert out.tolist() == expected
        numbers = (np.int8(5), np.int16(6), np.int32(7), np.int64(8), np.uint32(9), np.float32(0.5), np.float64(0.25))
        kernel.launch((1, 1), (out, *numbers, pack, out))
        assert out.tolist() == [5, 6, 7, 8, 9, 0.5, 0.25, 0.1, -7, 2.5, 0]

    @pytest.mark.parametrize("programmatic", [False, True])
    def test_launches_follow_each_other(self, programmatic: bool) -> None:
        kernel = Kernel(load(SOURCE), "step", 128)
        x = torch.arange(5000, dtype=torch.int32, device="cuda")
        expected = steps(x, 50)
        for _ in range(50):
            kernel.launch(40, (x, 5000), programmatic=programmatic)
        assert torch.equal(x, expected)

    @pytest.mark.parametrize("programmatic", [False, True])
    def test_replays_in_a_graph(self, programmatic: bool) -> None:
        kernel = Kernel(load(SOURCE), "step", 128)
        x = torch.arange(5000, dtype=torch.int32, device="cuda")
        expected = steps(x, 60)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(20):
                kernel.launch(40, (x, 5000), programmatic=programmatic)
        for _ in range(3):
            graph.replay()
        assert torch.equal(x, expected)

    @pytest.mark.parametrize("programmatic", [False, True])
    def test_cooperative_blocks_meet(self, programmatic: bool) -> None:
        kernel = Kernel(load(SOURCE), "meet", 32)
        blocks = kernel.blocks_at_once
        assert blocks >= kernel.gpu.num_sms
        counter, total = torch.zeros(2, dtype=torch.int32, device="cuda")
        out = torch.zeros(blocks, dtype=torch.int32, device="cuda")
        kernel.launch(blocks, (counter, total, out), cooperative=True, programmatic=programmatic)
        assert out.tolist() == [blocks * (blocks + 1) // 2] * blocks
        with pytest.raises(KernelError, match=r"kernel meet to launch .*CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE"):
            kernel.launch(blocks + 1, (counter, total, out), cooperative=True)

    def test_takes_all_shared_memory_of_a_block(self, gpu: Gpu) -> None:
        smem_bytes = gpu.smem_per_block_bytes
        kernel = Kernel(load(SOURCE), "fill", 1024, smem_bytes)
        out = torch.zeros(smem_bytes // 4, dtype=torch.int32, device="cuda")
        kernel.launch(1, (out, len(out)))
        assert torch.equal(out, torch.arange(len(out), dtype=torch.int32, device="cuda"))
        with pytest.raises(KernelError, match=f"expected {smem_bytes + 1} bytes of shared memory for a block of fill"):
            Kernel(load(SOURCE), "fill", 1024, smem_bytes + 1)

    def test_a_kernel_with_less_shared_memory_leaves_the_others_theirs(self, gpu: Gpu) -> None:
        """The most that a block may ask for belongs to the function, which they share."""
        large, small = (Kernel(load(SOURCE), "fill", 1024, size << 10) for size in (96, 64))
        for kernel in (large, small, large):
            out = torch.zeros(kernel.dynamic_smem_bytes // 4, dtype=torch.int32, device="cuda")
            kernel.launch(1, (out, len(out)))
            assert torch.equal(out, torch.arange(len(out), dtype=torch.int32, device="cuda"))

    def test_sees_the_parameters_that_the_driver_sees(self, pytestconfig: pytest.Config) -> None:
        """The sizes that were read from the cubin are the driver's."""
        if pytestconfig.getoption("--gpu-capability"):
            pytest.skip("the driver compiles for itself then")
        import ctypes

        from runtime.kernels.driver import driver

        module = load(SOURCE)
        for name, resources in module.resources.items():
            function = module.raw.get_function(name)
            offset, size = ctypes.c_size_t(), ctypes.c_size_t()
            for number, expected in enumerate(resources.parameter_bytes):
                handle = ctypes.c_void_p(function.kernel.ptr)
                assert (
                    driver().cuFuncGetParamInfo(
                        handle, ctypes.c_size_t(number), ctypes.byref(offset), ctypes.byref(size)
                    )
                    == 0
                )
                assert size.value == expected
            assert function.num_regs == resources.registers
            assert function.shared_size_bytes == resources.static_smem_bytes
            assert function.local_size_bytes == resources.stack_bytes

    def test_compiles_anew_what_the_driver_keeps(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """With a driver NVRTC has a cache of its own, which leaves nothing in the log; ours may be emptied any time."""
        first = load(SOURCE).resources
        monkeypatch.setenv("MOESPEQ_CACHE_DIR", str(tmp_path))
        assert load(SOURCE).resources == first

    def test_threads_launch_at_once(self) -> None:
        """Each thread packs its own arguments, also one that has not used CUDA before."""
        kernel = Kernel(load(SOURCE), "step", 128)
        xs = [torch.full((1000,), start, dtype=torch.int32, device="cuda") for start in range(4)]
        expected = [steps(x, 500) for x in xs]
        torch.cuda.synchronize()

        def work(x: torch.Tensor) -> None:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(500):
                    kernel.launch(8, (x, 1000))

        threads = [threading.Thread(target=work, args=(x,)) for x in xs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        torch.cuda.synchronize()
        assert all(torch.equal(x, wanted) for x, wanted in zip(xs, expected, strict=True))

    def test_a_fresh_thread_without_a_stream_of_its_own(self) -> None:
        kernel = Kernel(load(SOURCE), "step", 128)
        x = torch.zeros(1000, dtype=torch.int32, device="cuda")
        torch.cuda.synchronize()
        thread = threading.Thread(target=kernel.launch, args=(8, (x, 1000)))
        thread.start()
        thread.join()
        torch.cuda.synchronize()
        assert torch.equal(x, steps(torch.zeros_like(x), 1))

    def test_refuses_what_does_not_fit(self) -> None:
        module = load(SOURCE)
        kernel = Kernel(module, "add", 256)
        a = torch.zeros(4, device="cuda")
        with pytest.raises(ShapeError, match="tensors on the GPU of kernel add; found a tensor on cpu"):
            kernel.launch(1, (a.cpu(), a, a, 4))
        with pytest.raises(KernelError, match=r"kernel add to launch on a grid 0, 256 threads"):
            kernel.launch(0, (a, a, a, 4))
        with pytest.raises(KernelError, match=r"kernel sub in launch_probe\.cu; found add, "):
            Kernel(module, "sub", 256)


@pytest.mark.gpu
@pytest.mark.usefixtures("probes")
class TestTensorMap:
    @pytest.fixture(autouse=True)
    def _hopper(self, gpu: Gpu) -> None:
        if gpu.capability < (9, 0):
            pytest.skip("needs compute capability 9.0")

    @pytest.mark.parametrize("swizzle_bytes", [0, 128])
    def test_copies_a_box_of_rows(self, swizzle_bytes: int) -> None:
        x = torch.arange(100 * 200, device="cuda", dtype=torch.int16).view(torch.bfloat16).view(100, 200)
        box, row, column = (24, 64), 90, 160  # beyond the last row and the last element of a row
        map_ = tensor_map_2d(x.data_ptr(), x.dtype, (100, 200), 400, box, swizzle_bytes=swizzle_bytes)
        out = torch.full((24 * 128,), 99, dtype=torch.uint8, device="cuda")
        Kernel(load(SOURCE), "copy2d", 128, len(out)).launch(1, (map_, out, column, row, len(out)))
        expected = torch.zeros(24, 64, dtype=torch.bfloat16, device="cuda")
        expected[:10, :40] = x[90:, 160:]
        pieces = expected.view(torch.uint8).view(24, 8, 16)
        if swizzle_bytes:
            lines, places = torch.arange(24)[:, None], torch.arange(8)[None]
            pieces = pieces[lines, places ^ (lines % 8)]
        assert torch.equal(out, pieces.reshape(-1))

    def test_copies_a_box_of_planes(self) -> None:
        pool = torch.arange(4 * 1024, device="cuda", dtype=torch.int32).view(torch.uint8).view(4, 4096)
        map_ = tensor_map_3d(pool.data_ptr() + 512, pool.dtype, (4, 10, 96), (4096, 96), (2, 4, 48))
        out = torch.zeros(2 * 4 * 48, dtype=torch.uint8, device="cuda")
        Kernel(load(SOURCE), "copy3d", 64, len(out)).launch(1, (map_, out, 48, 5, 1, len(out)))
        field = pool[:, 512 : 512 + 960].view(4, 10, 96)
        assert torch.equal(out, field[1:3, 5:9, 48:].reshape(-1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"address": 8}, "an address that is a multiple of 16 for a tensor map; found 8"),
        ({"dtype": torch.complex64}, "a type among torch.uint8, .*found torch.complex64"),
        ({"shape": (0, 64)}, "dimensions of 1 to 2\\*\\*32"),
        ({"row_bytes": 120}, "strides that are multiples of 16"),
        ({"box": (257, 64)}, "a box of 1 to 256"),
        ({"box": (16, 4)}, "a box whose rows are a multiple of 16 bytes for a tensor map; found 8"),
        ({"box": (16, 128)}, "a box whose rows fit in the swizzle's 128 bytes for a tensor map; found 256"),
    ],
)
def test_tensor_maps_that_cannot_be_are_refused(change: dict[str, object], message: str) -> None:
    wanted = {"address": 0, "dtype": torch.bfloat16, "shape": (8, 64), "row_bytes": 128, "box": (8, 64)} | change
    with pytest.raises(ShapeError, match=message):
        tensor_map_2d(**wanted, swizzle_bytes=128)  # type: ignore[arg-type]
