"""Launch a kernel on torch's current stream with the memory of torch's tensors, copying nothing."""

from __future__ import annotations

import ctypes
import functools
import threading

import torch

from runtime.errors import KernelError
from runtime.kernels.arguments import Argument, Arguments
from runtime.kernels.compile import Module
from runtime.kernels.device import current_gpu
from runtime.kernels.driver import (
    COOPERATIVE,
    PROGRAMMATIC_STREAM_SERIALIZATION,
    LaunchAttribute,
    LaunchConfig,
    check,
    driver,
)

Grid = int | tuple[int, int] | tuple[int, int, int]

_SMEM_WITHOUT_ASKING = 48 << 10  # bytes of shared memory a block that every kernel may use


class Kernel:
    """One kernel on the GPU that was current when it was made.

    Args:
        module: as `compile.load` returns it.
        name: the `extern "C"` name of the kernel.
        threads: of a block.
        dynamic_smem_bytes: shared memory that each launch asks for beside what the source declares.
        beside_large: prefer most of an SM's memory to be shared memory even for a small block: blocks of kernels that
            want it otherwise are not on an SM together.

    Attributes:
        name, threads, dynamic_smem_bytes: as given.
        gpu: where it runs.
        resources: what it needs.

    Raises:
        KernelError: no such kernel, or the GPU has not that much shared memory.
    """

    def __init__(
        self, module: Module, name: str, threads: int, dynamic_smem_bytes: int = 0, beside_large: bool = False
    ) -> None:
        self.gpu = current_gpu()
        self.name, self.threads, self.dynamic_smem_bytes = name, threads, dynamic_smem_bytes
        if name not in module.resources:
            raise KernelError(
                expected=f"kernel {name} in {module.source.name}",
                found=", ".join(sorted(module.resources)) or "no kernel",
                mend="use one of these names",
            )
        self.resources = module.resources[name]
        smem_bytes = self.resources.static_smem_bytes + dynamic_smem_bytes
        if smem_bytes > self.gpu.smem_per_block_bytes:
            raise KernelError(
                expected=f"{smem_bytes} bytes of shared memory for a block of {name}",
                found=f"at most {self.gpu.smem_per_block_bytes} on {self.gpu.name}",
                mend="use fewer stages or smaller tiles",
            )
        self._raw = module.raw.get_function(name)
        # Never less than another kernel of the same function needs, which would be refused from then on.
        if smem_bytes > _SMEM_WITHOUT_ASKING and self._raw.max_dynamic_shared_size_bytes < dynamic_smem_bytes:
            self._raw.max_dynamic_shared_size_bytes = dynamic_smem_bytes
        if smem_bytes > _SMEM_WITHOUT_ASKING or beside_large:
            self._raw.preferred_shared_memory_carveout = 100  # per cent of the SM's memory, not for L1
        self._function: int = self._raw.kernel.ptr
        self._launch = driver().cuLaunchKernelEx
        self._programmatic = self.gpu.capability >= (9, 0)
        self._threads_calls = threading.local()

    def launch(
        self,
        grid: Grid,
        args: tuple[Argument, ...],
        *,
        programmatic: bool = False,
        cooperative: bool = False,
    ) -> None:
        """Queue one launch; returns at once, and may be captured in a CUDA graph.

        Args:
            grid: blocks, in x or in more dimensions.
            args: one for each parameter: a tensor (its address, whatever its strides), None (a null pointer), int or
                float (of the parameter's size), a NumPy scalar (of its own), bytes (a struct by value).
            programmatic: may start before the kernel ahead of it has ended, and must wait for it by
                `griddepcontrol.wait`; a plain launch below compute capability 9.0, which has no such instruction.
            cooperative: all blocks run at once, or the launch fails.

        Raises:
            ShapeError: arguments that do not fit the parameters.
            KernelError: the driver refuses.
        """
        if torch._C._cuda_getDevice() != self.gpu.index:
            with torch.cuda.device(self.gpu.index):
                return self.launch(grid, args, programmatic=programmatic, cooperative=cooperative)
        call = getattr(self._threads_calls, "call", None)
        if call is None:
            call = self._threads_calls.call = _Call(self)
        call.arguments.pack(args)
        config = call.configs[2 * (programmatic and self._programmatic) + cooperative]
        if grid != config.shape:
            config.set_grid(grid)
        # Not torch.cuda.current_stream(): it makes an object, 7.5 of the 19 us of a launch on the host of an H200.
        config.memory.stream = torch._C._cuda_getCurrentRawStream(self.gpu.index)
        result = self._launch(config.address, self._function, call.arguments.pointers, None)
        if result:
            check(result, f"kernel {self.name} to launch on a grid {grid}, {self.threads} threads a block")

    @functools.cached_property
    def blocks_at_once(self) -> int:
        """How many blocks the GPU runs at the same time if it runs nothing else."""
        count = ctypes.c_int()
        result = driver().cuOccupancyMaxActiveBlocksPerMultiprocessor(
            ctypes.addressof(count), self._function, self.threads, self.dynamic_smem_bytes
        )
        check(result, f"the occupancy of kernel {self.name}")
        return count.value * self.gpu.num_sms


class _Config:
    """How to launch a kernel, with certain attributes: a CUlaunchConfig and what it points to."""

    def __init__(self, kernel: Kernel, attributes: tuple[int, ...]) -> None:
        self._attributes = (LaunchAttribute * 2)(*(LaunchAttribute(id=number, value=1) for number in attributes))
        self.memory = LaunchConfig(
            block=(kernel.threads, 1, 1),
            dynamic_smem_bytes=kernel.dynamic_smem_bytes,
            attributes=self._attributes,
            num_attributes=len(attributes),
        )
        self.address = ctypes.addressof(self.memory)
        self.shape: Grid | None = None

    def set_grid(self, grid: Grid) -> None:
        self.memory.grid[:] = (grid, 1, 1) if isinstance(grid, int) else (*grid, 1, 1)[:3]
        self.shape = grid


class _Call:
    """What one thread needs to launch a kernel, allocated once: each launch only overwrites it."""

    def __init__(self, kernel: Kernel) -> None:
        import cupy

        cupy.cuda.runtime.setDevice(kernel.gpu.index)  # a thread that is new to CUDA has no context yet
        self.arguments = Arguments(kernel.name, kernel.resources.parameter_bytes)
        kinds = (
            (),
            (COOPERATIVE,),
            (PROGRAMMATIC_STREAM_SERIALIZATION,),
            (PROGRAMMATIC_STREAM_SERIALIZATION, COOPERATIVE),
        )
        self.configs = [_Config(kernel, kind) for kind in kinds]
