"""A Hugging Face model folder: checked on opening, read tensor by tensor."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from runtime.artifacts.hub import find_model
from runtime.artifacts.manifest import sha256_bytes
from runtime.artifacts.safetensors_file import TensorInfo, as_tensor, pread, read_header
from runtime.errors import InputError

__all__ = ["Checkpoint", "TensorInfo"]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MEND = "download or copy the model again"
SAMPLES = 64  # blocks of a shard that go into the fingerprint
SAMPLE_BYTES = 4096


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a model folder and its configuration.

    Attributes:
        folder: the model folder.
        config: `config.json`.
        tensors: where each tensor lies, by its name on disk.
        digest: a fingerprint of the model: configuration, shard headers and sampled blocks of the data. It tells models
            apart without reading all of them; what is copied has full checksums of its own.
    """

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    digest: str

    @classmethod
    def open(cls, folder: str | Path) -> Checkpoint:
        """Open a folder and check every shard that its index names.

        Args:
            folder: what `find_model` takes.

        Raises:
            StorageError: no room to download it.
            InputError: no such model, no configuration, a shard that is absent or damaged, a tensor that is missing.
        """
        place = find_model(folder)
        config = _read_object(place / "config.json", "a model folder")
        files, expected = _shards(place)
        tensors: dict[str, TensorInfo] = {}
        for file in files:
            found = read_header(place / file, MEND)
            for name in found:
                if name in tensors:
                    raise InputError(
                        expected=f"tensor {name} once", found=f"it in {tensors[name].file} and {file}", mend=MEND
                    )
            tensors.update(found)
        for name, file in expected.items():
            if name not in tensors or tensors[name].file != file:
                raise InputError(
                    expected=f"tensor {name} in {place / file}, as {INDEX} says", found="none of that name", mend=MEND
                )
        if expected:
            tensors = {name: tensors[name] for name in expected}
        return cls(place, config, tensors, _fingerprint(place, config, files))

    def read(self, name: str) -> torch.Tensor:
        """One tensor in its stored type, in memory of its own.

        Raises:
            InputError: no tensor of that name.
        """
        info = self.info(name)
        return as_tensor(self.read_bytes(name), info.dtype, info.shape)

    def read_row(self, name: str, row: int) -> torch.Tensor:
        """`read(name)[row]` without reading the rest."""
        info = self.info(name)
        row_bytes = (info.end - info.start) // info.shape[0]
        data = pread(self.folder / info.file, info.start + row * row_bytes, row_bytes)
        return as_tensor(data, info.dtype, info.shape[1:])

    def read_bytes(self, name: str) -> bytearray:
        """The bytes of a tensor as they are stored."""
        info = self.info(name)
        return pread(self.folder / info.file, info.start, info.end - info.start)

    def sha256(self, name: str) -> str:
        """Digest of a tensor's bytes."""
        return sha256_bytes(self.read_bytes(name))

    def info(self, name: str) -> TensorInfo:
        """Where a tensor lies.

        Raises:
            InputError: no tensor of that name.
        """
        if name not in self.tensors:
            raise InputError(expected=f"tensor {name} in {self.folder}", found="none of that name", mend=MEND)
        return self.tensors[name]


def _read_object(path: Path, what: str) -> dict[str, Any]:
    if not path.is_file():
        raise InputError(
            expected=f"{what} with a {path.name}: {path}", found="no such file", mend="pass the folder of a whole model"
        )
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(expected=f"JSON in {path}", found=str(error), mend=MEND) from None
    if not isinstance(value, dict):
        raise InputError(expected=f"a JSON object in {path}", found=type(value).__name__, mend=MEND)
    return value


def _shards(folder: Path) -> tuple[list[str], dict[str, str]]:
    """The files to read, and which tensor each should hold (empty where no index says)."""
    if (folder / INDEX).is_file():
        weight_map = _read_object(folder / INDEX, "an index").get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise InputError(expected=f"a weight_map in {folder / INDEX}", found="none", mend=MEND)
        for file in weight_map.values():
            if Path(file).name != file or not file.isprintable():
                raise InputError(expected=f"plain file names in {folder / INDEX}", found=repr(file), mend=MEND)
        return sorted(set(weight_map.values())), weight_map
    if (folder / SINGLE).is_file():
        return [SINGLE], {}
    others = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".gguf"))
    found = f"only {', '.join(others[:3])}" if others else "no weights"
    raise InputError(expected=f"{SINGLE} or {INDEX} in {folder}", found=found, mend="pass a model saved as safetensors")


def _fingerprint(folder: Path, config: dict[str, Any], files: list[str]) -> str:
    settings = {key: value for key, value in config.items() if key not in ("transformers_version", "_name_or_path")}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for file in files:
        path = folder / file
        size = path.stat().st_size
        with path.open("rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            digest.update(f"{file} {size}".encode())
            digest.update(handle.read(length))
            span = max(size - 8 - length - SAMPLE_BYTES, 0)
            for sample in range(SAMPLES + 1):
                handle.seek(8 + length + span * sample // SAMPLES)
                digest.update(handle.read(SAMPLE_BYTES))
    return digest.hexdigest()
