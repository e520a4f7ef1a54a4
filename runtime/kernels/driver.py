"""The few calls of the CUDA driver that CuPy does not offer, through ctypes on the driver's own library."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from runtime.errors import KernelError

COOPERATIVE, PROGRAMMATIC_STREAM_SERIALIZATION = 2, 6  # CUlaunchAttributeID


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute with a value that is one int, such as the two above."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_int * 15))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("dynamic_smem_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("num_attributes", ctypes.c_uint),
    )


@functools.cache
def driver() -> Any:
    """The driver's library; its functions return a CUresult, 0 when all went well.

    Raises:
        KernelError: no driver is installed.
    """
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise KernelError(
            expected="NVIDIA's driver (libcuda.so.1)", found=str(error), mend="install it, or run where there is a GPU"
        ) from error
    pointer = ctypes.c_void_p
    library.cuLaunchKernelEx.argtypes = (pointer, pointer, pointer, pointer)
    library.cuOccupancyMaxActiveBlocksPerMultiprocessor.argtypes = (pointer, pointer, ctypes.c_int, ctypes.c_size_t)
    library.cuMemcpyHtoDAsync_v2.argtypes = (ctypes.c_uint64, pointer, ctypes.c_size_t, pointer)
    library.cuTensorMapEncodeTiled.argtypes = (
        pointer,
        ctypes.c_int,
        ctypes.c_uint32,
        *[pointer] * 5,
        *[ctypes.c_int] * 4,
    )
    return library


def check(result: int, action: str) -> None:
    """Raise a KernelError that names the driver's error, if there was one."""
    if result == 0:
        return
    name = ctypes.c_char_p()
    driver().cuGetErrorName(result, ctypes.byref(name))
    raise KernelError(
        expected=action,
        found=f"{(name.value or b'an unknown error').decode()} ({result})",
        mend="if another kernel failed before, mend that first; compute-sanitizer finds the fault",
    )
