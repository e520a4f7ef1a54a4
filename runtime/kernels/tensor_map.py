"""Descriptors of tensors for the tensor memory accelerator of compute capability 9.0 and newer."""

from __future__ import annotations

import ctypes
from typing import Literal

import torch

from runtime.errors import ShapeError
from runtime.kernels.driver import check, driver

TENSOR_MAP_BYTES = 128
_ALIGN = 64  # of the descriptor in memory

_TYPES = {
    torch.uint8: 0,
    torch.int8: 0,
    torch.int32: 3,
    torch.int64: 5,
    torch.float16: 6,
    torch.float32: 7,
    torch.bfloat16: 9,
}
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}


def tensor_map_2d(
    address: int,
    dtype: torch.dtype,
    shape: tuple[int, int],
    row_bytes: int,
    box: tuple[int, int],
    *,
    swizzle_bytes: Literal[0, 32, 64, 128] = 0,
) -> bytes:
    """A descriptor of rows of elements, to pass by value as `const __grid_constant__ CUtensorMap`.

    Args:
        address: of the first element; a multiple of 16.
        dtype: bytes of any 8-bit type count as uint8.
        shape: rows and elements a row; what a box takes from beyond is zero.
        row_bytes: from one row to the next; a multiple of 16.
        box: rows and elements of one copy, each 1 to 256; the elements' bytes a multiple of 16, and no more than the
            swizzle's.
        swizzle_bytes: the span within which 16-byte pieces change places in shared memory; 0 for none.

    Raises:
        ShapeError: one of these does not hold.
        KernelError: the driver refuses.
    """
    return _encode(address, dtype, shape, (row_bytes,), box, swizzle_bytes)


def tensor_map_3d(
    address: int,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    strides_bytes: tuple[int, int],
    box: tuple[int, int, int],
    *,
    swizzle_bytes: Literal[0, 32, 64, 128] = 0,
) -> bytes:
    """A descriptor of planes of rows, such as the slots of a pool; see `tensor_map_2d`.

    Args:
        shape: planes, rows a plane and elements a row.
        strides_bytes: from one plane to the next, and from one row to the next.
        box: planes, rows and elements of one copy.
    """
    return _encode(address, dtype, shape, strides_bytes, box, swizzle_bytes)


def tensor_map(
    address: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides_bytes: tuple[int, ...],
    box: tuple[int, ...],
    *,
    swizzle_bytes: Literal[0, 32, 64, 128] = 0,
) -> bytes:
    """A descriptor of a tensor of 2 to 5 dimensions; see `tensor_map_2d`.

    Args:
        shape: outermost dimension first; elements lie side by side in the last one.
        strides_bytes: of all dimensions but the last, in any order of size.
        box: of one copy, in the order of `shape`.
    """
    return _encode(address, dtype, shape, strides_bytes, box, swizzle_bytes)


def _encode(
    address: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides_bytes: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int,
) -> bytes:
    """The driver counts dimensions from the innermost one, and leaves out that one's stride."""
    inner_bytes = box[-1] * dtype.itemsize
    demands = (
        (dtype in _TYPES, "a type among " + ", ".join(map(str, _TYPES)), dtype),
        (address % 16 == 0, "an address that is a multiple of 16", address),
        (all(1 <= n <= 1 << 32 for n in shape), "dimensions of 1 to 2**32", shape),
        (
            all(0 <= n < 1 << 40 and n % 16 == 0 for n in strides_bytes),
            "strides that are multiples of 16, below 2**40",
            strides_bytes,
        ),
        (all(1 <= n <= 256 for n in box), "a box of 1 to 256 in each dimension", box),
        (swizzle in _SWIZZLES, "a swizzle of 0, 32, 64 or 128 bytes", swizzle),
        (inner_bytes % 16 == 0, "a box whose rows are a multiple of 16 bytes", inner_bytes),
        (not swizzle or inner_bytes <= swizzle, f"a box whose rows fit in the swizzle's {swizzle} bytes", inner_bytes),
    )
    for holds, expected, found in demands:
        if not holds:
            raise ShapeError(
                expected=f"{expected} for a tensor map", found=str(found), mend="choose another layout or box"
            )
    rank = len(shape)
    memory = ctypes.create_string_buffer(TENSOR_MAP_BYTES + _ALIGN)
    offset = -ctypes.addressof(memory) % _ALIGN
    result = driver().cuTensorMapEncodeTiled(
        ctypes.addressof(memory) + offset,
        _TYPES[dtype],
        rank,
        address,
        (ctypes.c_uint64 * rank)(*reversed(shape)),
        (ctypes.c_uint64 * (rank - 1))(*reversed(strides_bytes)),
        (ctypes.c_uint32 * rank)(*reversed(box)),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        0,  # not interleaved
        _SWIZZLES[swizzle],
        2,  # fetch 128 bytes into L2
        0,  # zeros beyond the tensor
    )
    check(result, "a tensor map")
    return memory.raw[offset : offset + TENSOR_MAP_BYTES]
