"""Parameters are packed by the sizes that a kernel declares, and what does not fit is refused by its name."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from runtime.errors import ShapeError
from runtime.kernels.arguments import Argument, Arguments


def packed(sizes: tuple[int, ...], *values: Argument) -> list[bytes]:
    """What the driver would copy: so many bytes from each pointer."""
    arguments = Arguments("k", sizes)
    arguments.pack(values)
    return read(arguments, sizes)


def read(arguments: Arguments, sizes: tuple[int, ...]) -> list[bytes]:
    pointers = (ctypes.c_void_p * len(sizes)).from_address(arguments.pointers)
    return [ctypes.string_at(pointer, size) for pointer, size in zip(pointers, sizes, strict=True)]


def test_ints_and_floats_take_the_size_of_the_parameter() -> None:
    values = packed((1, 2, 4, 8, 2, 4, 8), -5, -600, -70000, -(1 << 40), 0.5, 0.1, 0.1)
    assert [int.from_bytes(value, "little", signed=True) for value in values[:4]] == [-5, -600, -70000, -(1 << 40)]
    floats = (np.frombuffer(value, dtype)[0] for value, dtype in zip(values[4:], ("f2", "f4", "f8"), strict=True))
    assert list(floats) == [np.float16(0.5), np.float32(0.1), 0.1]


@pytest.mark.parametrize("dtype", ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"])
def test_numpy_scalars_keep_their_bytes(dtype: str) -> None:
    kind = np.dtype(dtype)
    value = kind.type(0.375) if kind.kind == "f" else np.iinfo(kind).max
    scalar = kind.type(value)
    assert packed((kind.itemsize,), scalar) == [scalar.tobytes()]


def test_structs_lie_at_multiples_of_eight() -> None:
    sizes = (1, 128, 3, 8)
    arguments = Arguments("k", sizes)
    block, odd = bytes(range(128)), b"abc"
    arguments.pack((7, block, odd, None))
    assert read(arguments, sizes) == [b"\x07", block, odd, bytes(8)]
    pointers = (ctypes.c_void_p * 4).from_address(arguments.pointers)
    assert all((pointer - pointers[0]) % 8 == 0 for pointer in pointers)


def test_packs_again_into_the_same_memory() -> None:
    sizes = (4, 4)
    arguments = Arguments("k", sizes)
    before = arguments.pointers
    arguments.pack((1, 2))
    arguments.pack((3, np.float32(1)))
    assert arguments.pointers == before
    assert read(arguments, sizes) == [b"\x03\0\0\0", np.float32(1).tobytes()]


def test_a_kernel_without_parameters() -> None:
    assert packed(()) == []


@pytest.mark.parametrize(
    ("sizes", "values", "message"),
    [
        ((4, 4), (1,), "expected 2 arguments of kernel k; found 1"),
        ((4,), (1 << 31,), "expected values that fit the parameters of kernel k; found .*, for 2147483648"),
        ((4,), (np.int64(1),), r"expected 4 bytes for parameter 0 of kernel k; found int64 np.int64\(1\)"),
        ((8, 8), (None, np.int32(1)), "expected 8 bytes for parameter 1 of kernel k; found int32"),
        ((16,), (5,), "expected 16 bytes for parameter 0 of kernel k; found int 5"),
        ((16,), (b"abc",), "expected 16 bytes for parameter 0 of kernel k; found bytes b'abc'"),
        ((1,), (0.5,), "expected 1 bytes for parameter 0 of kernel k; found float"),
        ((8,), ("text",), "expected 8 bytes for parameter 0 of kernel k; found str 'text'"),
        ((8,), (torch.zeros(2),), "expected tensors on the GPU of kernel k; found a tensor on cpu"),
        ((4,), (torch.zeros(2),), "expected 4 bytes for parameter 0 of kernel k; found Tensor"),
    ],
)
def test_what_does_not_fit_is_refused(sizes: tuple[int, ...], values: tuple[Argument, ...], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        packed(sizes, *values)


def test_a_struct_of_another_size_is_refused_after_one_that_fits() -> None:
    arguments = Arguments("k", (4,))
    arguments.pack((b"abcd",))
    with pytest.raises(ShapeError, match="expected 4 bytes for parameter 0"):
        arguments.pack((b"abc",))
