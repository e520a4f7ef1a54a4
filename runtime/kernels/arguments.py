"""Kernel parameters as the driver wants them: an array of pointers to values of the sizes that the kernel declares."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass

import numpy as np
import torch

from runtime.errors import ShapeError

Argument = torch.Tensor | int | float | np.generic | bytes | None

_INTEGERS = {1: "b", 2: "h", 4: "i", 8: "q"}
_FLOATS = {2: "e", 4: "f", 8: "d"}
_NUMPY = {f"i{n}": c for n, c in _INTEGERS.items()} | {f"u{n}": c.upper() for n, c in _INTEGERS.items()}
_NUMPY |= {f"f{n}": c for n, c in _FLOATS.items()}


@dataclass(frozen=True, slots=True)
class _Form:
    """How arguments of certain types are written, and at which places some need more than that."""

    layout: struct.Struct
    tensors: tuple[int, ...]
    nulls: tuple[int, ...]
    blocks: tuple[int, ...]


def require_aligned(**tensors: torch.Tensor | None) -> None:
    """Refuse tensors that kernels cannot read or write in vectors.

    Raises:
        ShapeError: naming the first one that does not begin at a multiple of 16 bytes.
    """
    for name, tensor in tensors.items():
        if tensor is not None and tensor.data_ptr() % 16:
            raise ShapeError(
                expected=f"{name} at a multiple of 16 bytes",
                found=f"address {tensor.data_ptr():#x}",
                mend="pass a tensor of its own, or a view that begins at a whole row",
            )


class Arguments:
    """Packs arguments into memory that is allocated once; not for two threads at once.

    Args:
        kernel: the name to use in errors.
        sizes: bytes of each parameter.

    Attributes:
        pointers: the address of the array of pointers, constant.
    """

    def __init__(self, kernel: str, sizes: tuple[int, ...]) -> None:
        self._kernel, self._sizes = kernel, sizes
        offsets, total = [], 0
        for size in sizes:
            total = -(-total // 8) * 8
            offsets.append(total)
            total += size
        self._values = ctypes.create_string_buffer(max(total, 1))
        base = ctypes.addressof(self._values)
        self._array = (ctypes.c_void_p * max(len(sizes), 1))(*(base + offset for offset in offsets))
        self._forms: dict[tuple[type, ...], _Form] = {}
        self.pointers = ctypes.addressof(self._array)

    def pack(self, values: tuple[Argument, ...]) -> None:
        """Write the values; an int or a float takes the parameter's size, a tensor and None a pointer's.

        Raises:
            ShapeError: another number of arguments than parameters, a size or a type that does not fit, an int out of
                range, a tensor that is not on a GPU.
        """
        kinds = tuple(map(type, values))
        form = self._forms.get(kinds)
        if form is None or (form.blocks and not self._fit(values, form.blocks)):
            form = self._forms[kinds] = self._form(values)
        plain = list(values)
        for place in form.tensors:
            tensor = plain[place]
            if not tensor.is_cuda:  # type: ignore[union-attr]
                raise self._wrong("tensors on the GPU", self._shown(values))
            plain[place] = tensor.data_ptr()  # type: ignore[union-attr]
        for place in form.nulls:
            plain[place] = 0
        try:
            form.layout.pack_into(self._values, 0, *plain)
        except struct.error as error:
            raise self._wrong("values that fit the parameters", f"{error}, for {self._shown(values)}") from error

    def _fit(self, values: tuple[Argument, ...], blocks: tuple[int, ...]) -> bool:
        """Whether structs have the lengths of their parameters; `struct` would cut or fill them up in silence."""
        return all(len(values[place]) == self._sizes[place] for place in blocks)  # type: ignore[arg-type]

    def _form(self, values: tuple[Argument, ...]) -> _Form:
        if len(values) != len(self._sizes):
            raise self._wrong(f"{len(self._sizes)} arguments", str(len(values)))
        codes = "<"
        for number, (value, size) in enumerate(zip(values, self._sizes, strict=True)):
            code = _code(value, size)
            if code is None or struct.calcsize(f"<{code}") != size:
                raise self._wrong(f"{size} bytes for parameter {number}", f"{type(value).__name__} {value!r}"[:200])
            codes += f"{-struct.calcsize(codes) % 8}x{code}"
        return _Form(
            struct.Struct(codes),
            tensors=tuple(i for i, value in enumerate(values) if isinstance(value, torch.Tensor)),
            nulls=tuple(i for i, value in enumerate(values) if value is None),
            blocks=tuple(i for i, value in enumerate(values) if isinstance(value, bytes)),
        )

    def _shown(self, values: tuple[Argument, ...]) -> str:
        return ", ".join(f"a tensor on {v.device}" if isinstance(v, torch.Tensor) else repr(v)[:40] for v in values)

    def _wrong(self, expected: str, found: str) -> ShapeError:
        return ShapeError(
            expected=f"{expected} of kernel {self._kernel}", found=found, mend="pass what the kernel's source declares"
        )


def _code(value: object, size: int) -> str | None:
    """The format of `struct` for one value, or None for a type that no parameter takes."""
    match value:
        case torch.Tensor() | None:
            return "Q"
        case np.generic():
            return _NUMPY.get(f"{value.dtype.kind}{value.itemsize}")
        case bytes():
            return f"{len(value)}s"
        case int():
            return _INTEGERS.get(size)
        case float():
            return _FLOATS.get(size)
        case _:
            return None
