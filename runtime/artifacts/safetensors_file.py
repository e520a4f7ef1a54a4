"""Where the tensors of a safetensors file lie, checked before anything is read.

Format: 8 bytes little-endian header length, a JSON header, then the data
(https://github.com/huggingface/safetensors). The library's own reader maps whole files; stages here read single
tensors, and slices of them, at known offsets, so that memory stays bounded.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from runtime.errors import InputError

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER_BYTES = 100_000_000  # the limit of the format's own library


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Name, place and form of one stored tensor; `start` and `end` are byte offsets in the file."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_header(path: Path, mend: str) -> dict[str, TensorInfo]:
    """Index one safetensors file.

    Args:
        path: the file.
        mend: what the user should do when it is damaged.

    Returns:
        The tensors by name.

    Raises:
        InputError: absent, empty, a pointer file, cut short, longer than its header says, or not of the format.
    """
    try:
        size = path.stat().st_size if path.is_file() else None
    except (OSError, ValueError):  # such as for a name that is too long, or holds a zero
        size = None
    if size is None:
        raise InputError(expected=f"a file {path}", found="no such file", mend=mend)
    if size == 0:
        raise InputError(expected=f"a safetensors file {path}", found="a file of length 0", mend=mend)
    with path.open("rb") as handle:
        prefix = handle.read(8)
        if prefix == b"version ":
            raise InputError(
                expected=f"a safetensors file {path}",
                found=f"a Git LFS pointer of {size} bytes in its place",
                mend="fetch the file itself, for instance with `git lfs pull`",
            )
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(MAX_HEADER_BYTES, size - 8):
            raise InputError(
                expected=f"a safetensors file {path} whose header fits in it",
                found=f"a header of {length} bytes in a file of {size} bytes",
                mend=mend,
            )
        raw = handle.read(length)
    tensors = _parse(path, raw, 8 + length, mend)
    end = max((info.end for info in tensors.values()), default=8 + length)
    if size != end:
        raise InputError(expected=f"{path} of {end} bytes, as its header says", found=f"{size} bytes", mend=mend)
    return tensors


def _parse(path: Path, raw: bytes, base: int, mend: str) -> dict[str, TensorInfo]:
    try:
        header = json.loads(raw, object_pairs_hook=_once)
        if not _are_strings(header.pop("__metadata__", {})):
            raise ValueError("metadata that is not text")
        infos = [_info(path, base, name, entry) for name, entry in header.items()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(
            expected=f"{path} with a safetensors header", found=f"{type(error).__name__}: {error}"[:300], mend=mend
        ) from None
    place = base
    for info in sorted(infos, key=lambda info: (info.start, info.end)):
        if info.dtype not in DTYPES:
            raise InputError(
                expected=f"{info.name} in {path} of a known type ({', '.join(DTYPES)})", found=info.dtype, mend=mend
            )
        item_bytes = DTYPES[info.dtype].itemsize
        if info.start != place or info.end - info.start != math.prod(info.shape) * item_bytes:
            raise InputError(
                expected=f"{info.name} in {path} at byte {place}, {math.prod(info.shape) * item_bytes} bytes long",
                found=f"bytes {info.start} to {info.end}",
                mend=mend,
            )
        place = info.end
    return {info.name: info for info in infos}


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose names differ; of equal ones, readers disagree which counts."""
    if len({name for name, _ in pairs}) != len(pairs):
        raise ValueError("a name that is there twice")
    return dict(pairs)


def _are_strings(metadata: Any) -> bool:
    return metadata is None or all(isinstance(value, str) for value in dict.values(metadata))


def _info(path: Path, base: int, name: str, entry: dict[str, Any]) -> TensorInfo:
    if set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name} with {', '.join(sorted(entry))}")
    shape, offsets = entry["shape"], entry["data_offsets"]
    for numbers in (shape, offsets):
        if type(numbers) is not list or any(type(number) is not int or not 0 <= number < 1 << 63 for number in numbers):
            raise ValueError(f"{name} with {numbers!r:.60} for whole numbers")
    if type(entry["dtype"]) is not str or len(offsets) != 2:
        raise ValueError(f"{name} with dtype {entry['dtype']!r:.40} and {len(offsets)} offsets")
    name.encode()
    return TensorInfo(name, path.name, entry["dtype"], tuple(shape), base + offsets[0], base + offsets[1])


def pread(path: Path, start: int, size: int) -> bytearray:
    """Read exactly `size` bytes at `start`.

    Raises:
        InputError: the file ends before.
    """
    buffer = bytearray(size)
    view = memoryview(buffer)
    done = 0
    with path.open("rb", buffering=0) as handle:
        while done < size:
            count = os.preadv(handle.fileno(), [view[done:]], start + done)
            if count == 0:
                raise InputError(
                    expected=f"{path} to reach byte {start + size}",
                    found=f"its end at byte {start + done}",
                    mend="the file changed while it was read: restore it and repeat the command",
                )
            done += count
    return buffer


def as_tensor(buffer: bytearray, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Look at bytes as a tensor of a stored type; the tensor owns the buffer."""
    if math.prod(shape) == 0:
        return torch.empty(shape, dtype=DTYPES[dtype])
    return torch.frombuffer(buffer, dtype=DTYPES[dtype]).reshape(shape)
