"""A device that is none: tensors say that they lie on it and compute on the CPU, so that a mix-up shows without a GPU.

An operation on tensors of two devices is an error, as it is with CUDA; so is reading one as if it were on the CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

NAME = "pretended"
MOVES = ("aten::_to_copy", "aten::copy_")
MIXED = (*MOVES, "aten::index.", "aten::index_put", "aten::_index_put")  # CUDA takes indices from the CPU
_registered: list[str] = []


@contextlib.contextmanager
def pretended_device() -> Iterator[torch.device]:
    """The device, for as long as the block lasts."""
    register: Any = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
    if register is None:
        pytest.skip("this torch registers no device from Python")
    if not _registered:
        register(NAME)
        _registered.append(NAME)
    real: Callable[..., Tensor] = torch.tensor

    def made(*arguments: Any, device: Any = None, **named: Any) -> Tensor:  # it goes past the dispatcher
        return real(*arguments, **named).to(device)

    with pytest.MonkeyPatch.context() as patch, _Mode():
        patch.setattr(torch, "tensor", made)
        yield torch.device(NAME)


class _Pretended(Tensor):
    """Wraps a tensor of the CPU."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls: type[_Pretended], inner: Tensor) -> Any:
        make: Any = torch.Tensor._make_wrapper_subclass
        return make(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(NAME, 0),
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def tolist(self) -> Any:
        return self.inner.tolist()

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        return _run(function, arguments, named or {})


class _Mode(TorchDispatchMode):
    """Sees what is made on the device out of nothing, and what is moved there."""

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        return _run(function, arguments, named or {})


def _run(function: Any, arguments: Any, named: dict[str, Any]) -> Any:
    name, given = function.name(), list(_tensors((arguments, named)))
    ours = [isinstance(x, _Pretended) for x in given if isinstance(x, _Pretended) or x.dim()]
    if len(set(ours)) == 2 and not name.startswith(MIXED):
        raise RuntimeError(f"{name}: expected all tensors to be on the same device")
    there = any(ours)
    if name.startswith("aten::copy_"):
        there = isinstance(arguments[0], _Pretended)
    elif named.get("device") is not None:
        there = torch.device(named["device"]).type == NAME
        named = named | {"device": torch.device("cpu") if there else named["device"]}
    result = function(*_changed(_inner, arguments), **_changed(_inner, named))
    if not there:
        return result
    known = {id(x.inner): x for x in given if isinstance(x, _Pretended)}  # what works in place gives its own back

    def outer(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return known[id(value)] if id(value) in known else _Pretended(value)

    return _changed(outer, result)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)


def _changed(change: Callable[[Any], Any], value: Any) -> Any:
    """Lists, tuples and dictionaries as the dispatcher gives them, with all else in them changed."""
    if isinstance(value, dict):
        return {key: _changed(change, part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_changed(change, part) for part in value])
    return change(value)


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, _Pretended) else value
