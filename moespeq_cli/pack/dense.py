"""What goes into a pack unchanged: the tensors outside the routed experts, and the files beside the weights."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from moespeq_cli.pack.shards import header, write_all
from runtime.artifacts.checkpoint import Checkpoint
from runtime.artifacts.manifest import FileEntry
from runtime.artifacts.safetensors_file import DTYPES, pread

PIECE_BYTES = 64 << 20  # of a tensor in memory at a time
PATTERNS = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", "tokenizer*", "additional_chat_templates/*.jinja")
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".part")
STAGE_FILES = ("manifest.json", "progress.json", "report.json")  # of an artifact; not a model's


def model_files(folder: Path) -> list[Path]:
    """Configuration, tokenizer and licence texts of a model folder, relative to it: all but weights and their index."""
    found = {path for pattern in PATTERNS for path in folder.glob(pattern) if path.is_file()}
    return sorted(
        path.relative_to(folder)
        for path in found
        if path.suffix not in WEIGHT_SUFFIXES and not path.name.endswith(".index.json") and path.name not in STAGE_FILES
    )


def copy_model_files(source: Path, files: Sequence[Path], folder: Path) -> dict[str, FileEntry]:
    """Copy small files, contents only; returns their entries, keyed by their place in `folder`."""
    entries = {}
    for file in files:
        copy = folder / file
        copy.parent.mkdir(parents=True, exist_ok=True)
        with (source / file).open("rb") as reader, copy.open("wb") as writer:
            shutil.copyfileobj(reader, writer)
            writer.flush()
            os.fsync(writer.fileno())
        entries[file.as_posix()] = FileEntry.of(copy)
    return entries


def write_dense(checkpoint: Checkpoint, names: Sequence[str], path: Path) -> FileEntry:
    """Copy tensors, bytes and names as they are, into one safetensors file, a piece at a time.

    Wider types come first, so that every tensor is aligned to its own type.
    """
    infos = [checkpoint.info(name) for name in names]
    infos.sort(key=lambda info: (-DTYPES[info.dtype].itemsize, info.name))
    digest = hashlib.sha256()
    offset = 0

    with path.open("wb", buffering=0) as file:

        def put(data: bytes | bytearray) -> None:
            nonlocal offset
            write_all(file.fileno(), data, offset)
            digest.update(data)
            offset += len(data)

        put(header((info.name, info.dtype, info.shape, info.end - info.start) for info in infos))
        for info in infos:
            for start in range(info.start, info.end, PIECE_BYTES):
                put(pread(checkpoint.folder / info.file, start, min(PIECE_BYTES, info.end - start)))
        os.fsync(file.fileno())
    return FileEntry(offset, digest.hexdigest())
