"""The kernels of a decoding pass's dense steps on the host, launched by `RowKernels` itself."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from torch import Tensor

from runtime.kernels import gate, rows
from runtime.kernels.compile import Source
from runtime.kernels.device import Gpu
from tests.kernels import emulated

KERNELS = {
    "rows_linear.cu": ("linear_rows", "add_rows", "join_rows", "swiglu_rows", "swiglu_beside_rows"),
    "rows_norm.cu": ("norm_rows", "rotate_rows", "route_rows"),
    "rows_attention.cu": ("attend_rows",),
    "rows_next.cu": ("next_rows",),
    "gate.cu": ("gate_open", "gate_wait"),
}
AHEAD = {  # places of arguments that the kernel ahead may have written: not there before a block has waited for it
    "linear_rows": (2,),
    "add_rows": (2, 8),
    "join_rows": (1, 7, 8, 9),
    "swiglu_rows": (1,),
    "swiglu_beside_rows": (),
    "norm_rows": (0,),
    "rotate_rows": (0, 1, 2, 3),
    "route_rows": (0,),
    "next_rows": (0, 2),
    "attend_rows": (0, 1, 2),
    "gate_open": (0,),
    "gate_wait": (0, 4),
}


class Kernel:
    """In the place of `runtime.kernels.launch.Kernel`."""

    def __init__(
        self,
        folder: Path,
        source: Source,
        name: str,
        threads: int,
        smem_bytes: int,
        edit: tuple[str, str] | None,
    ) -> None:
        listed = "".join(f"KERNEL({kernel})" for kernel in KERNELS[source.name])
        defines = {**dict(source.defines), "KERNELS": listed}
        self._library = emulated.library("rows.cpp", source.name, defines, folder, edit=edit)
        self._library.launch.restype = ctypes.c_char_p
        self._name, self._threads, self._smem_bytes = name, threads, smem_bytes

    def launch(
        self, grid: int | tuple[int, int], args: tuple[Tensor | int | float | None, ...], programmatic: bool
    ) -> None:
        assert programmatic
        values = [_value(argument) for argument in args]
        addresses = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        late = [args[place] for place in AHEAD[self._name] if args[place] is not None]
        if self._name == "norm_rows" and args[0] is args[3]:
            late = []  # in place: a block's results would go with what it read
        tensors = [tensor for tensor in late if isinstance(tensor, Tensor)]
        starts = (ctypes.c_void_p * len(late))(*(tensor.data_ptr() for tensor in tensors))
        sizes = (ctypes.c_ulonglong * len(late))(*(_span_bytes(tensor) for tensor in tensors))
        columns, lines = grid if isinstance(grid, tuple) else (grid, 1)
        launch = (self._name.encode(), columns, lines, self._threads, self._smem_bytes, 1)
        fault = self._library.launch(*launch, addresses, len(late), starts, sizes)
        assert fault is None, fault.decode()


def _value(argument: Tensor | int | float | None) -> ctypes.c_void_p | ctypes.c_int | ctypes.c_float:
    if argument is None or isinstance(argument, Tensor):
        return ctypes.c_void_p(None if argument is None else argument.data_ptr())
    return ctypes.c_float(argument) if isinstance(argument, float) else ctypes.c_int(argument)


def _span_bytes(tensor: Tensor) -> int:
    """From the first to the last element."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def row_kernels(folder: Path, monkeypatch: pytest.MonkeyPatch, edit: tuple[str, str] | None = None) -> rows.RowKernels:
    """The steps, on tensors of the host; `edit` is a text of the sources and what to put in its place."""

    def kernel(gpu_index: int, source: Source, name: str, threads: int, smem_bytes: int = 0) -> Kernel:
        return Kernel(folder, source, name, threads, smem_bytes, edit)

    monkeypatch.setattr(rows, "_kernel", kernel)
    with monkeypatch.context() as patch:
        patch.setattr(rows, "current_gpu", lambda: Gpu(0, "the emulated machine", (9, 0), 4, 100 << 10))
        patch.setattr(torch, "device", lambda *_: "cpu")
        return rows.RowKernels()


def gate_kernels(folder: Path, monkeypatch: pytest.MonkeyPatch) -> gate.GateKernels:
    """The gates, on tensors of the host; nothing but `stop` ends their waiting."""
    monkeypatch.setattr(gate, "_kernel", lambda _, name: Kernel(folder, gate.SOURCE, name, 256, 0, None))
    monkeypatch.setattr(gate, "current_gpu", lambda: Gpu(0, "the emulated machine", (9, 0), 4, 100 << 10))
    return gate.GateKernels()
