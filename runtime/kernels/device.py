"""The GPU that torch works on, and whether moespeq's kernels run there."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path

import torch

from runtime.errors import KernelError
from runtime.kernels.driver import check, driver
from runtime.memory.numa import SYSFS, node_of_device

_OLDEST = (8, 0)
_SMEM_PER_BLOCK_OPTIN = 97  # CUdevice_attribute
_PCI_ADDRESS_BYTES = 32  # an address takes 13


@dataclass(frozen=True, slots=True)
class Gpu:
    """One NVIDIA GPU.

    Attributes:
        index: its number for torch and CuPy alike.
        capability: compute capability, such as (9, 0).
        num_sms: streaming multiprocessors.
        smem_per_block_bytes: the most shared memory, static and dynamic, that a block may ask for.
    """

    index: int
    name: str
    capability: tuple[int, int]
    num_sms: int
    smem_per_block_bytes: int


def current_gpu() -> Gpu:
    """The GPU that is current in torch.

    Raises:
        KernelError: there is none, or it is older than compute capability 8.0.
    """
    if not torch.cuda.is_available():
        raise KernelError(
            expected="an NVIDIA GPU of compute capability 8.0 or newer",
            found=f"none that torch {torch.__version__} can use",
            mend="run on a machine with such a GPU and with a CUDA build of torch",
        )
    return _gpu(torch.cuda.current_device())


def numa_node(sysfs: Path = SYSFS) -> int | None:
    """The NUMA node of the GPU that is current in torch; None where the machine does not say, or there is no GPU.

    Args:
        sysfs: where bus/ is.
    """
    if not torch.cuda.is_available():
        return None
    address = ctypes.create_string_buffer(_PCI_ADDRESS_BYTES)
    if driver().cuDeviceGetPCIBusId(address, len(address), torch.cuda.current_device()) != 0:
        return None
    return node_of_device(address.value.decode(), sysfs)


@functools.cache
def _gpu(index: int) -> Gpu:
    facts = torch.cuda.get_device_properties(index)
    capability = (facts.major, facts.minor)
    if capability < _OLDEST:
        raise KernelError(
            expected="an NVIDIA GPU of compute capability 8.0 or newer",
            found=f"{facts.name} of {facts.major}.{facts.minor}",
            mend="run on an A100 or a newer GPU",
        )
    smem_bytes = ctypes.c_int()
    result = driver().cuDeviceGetAttribute(ctypes.byref(smem_bytes), _SMEM_PER_BLOCK_OPTIN, index)
    check(result, f"the shared memory of {facts.name}")
    return Gpu(index, facts.name, capability, facts.multi_processor_count, smem_bytes.value)
