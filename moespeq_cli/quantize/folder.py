"""The files of a quantized folder: shards by rename, the source's companions, configuration and index."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from moespeq_cli.quantize.plan import Plan, QuantizeOptions
from runtime.artifacts.checkpoint import Checkpoint
from runtime.artifacts.folder import write_guard
from runtime.artifacts.manifest import FileEntry, by_rename, write_json
from runtime.errors import ArtifactError
from runtime.model.families import MoeSpec, dense_names

INDEX = "model.safetensors.index.json"
DENSE_SHARD_BYTES = 2 << 30
COMPANIONS = (
    "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt",
    "chat_template*", "*.tiktoken", "*.model", "LICENSE*",
)  # fmt: skip
# What a loader that quantises more than routed experts has to leave alone, as regular expressions of module names.
UNQUANTIZED = (
    r"-:.*\.self_attn\..*", r"-:.*\.shared_experts?(\..*)?$", r"-:.*\.shared_mlp\..*", r"-:.*\.shared_expert_gate$",
    r"-:.*\.(gate|router)$",
    r"-:.*\.layers\.\d+\.mlp\.(gate|up|down)_proj$", r"-:.*lm_head$",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shards:
    """Which file holds what; settled beforehand, so that a finished shard never has to be renamed."""

    dense: list[list[str]]  # names on disk
    layers: tuple[int, ...]

    @classmethod
    def plan(cls, checkpoint: Checkpoint, spec: MoeSpec) -> Shards:
        """Cut what is copied into files of about 2 GiB; every layer with experts gets a file of its own."""
        dense: list[list[str]] = [[]]
        filled = 0
        for name in dense_names(checkpoint, spec):
            size = checkpoint.tensors[name].end - checkpoint.tensors[name].start
            if dense[-1] and filled + size > DENSE_SHARD_BYTES:
                dense.append([])
                filled = 0
            dense[-1].append(name)
            filled += size
        return cls(dense, spec.moe_layers)

    def dense_file(self, place: int) -> str:
        """Name of a shard of copied tensors."""
        return self._name(place)

    def layer_file(self, layer_id: int) -> str:
        """Name of a layer's shard."""
        return self._name(len(self.dense) + self.layers.index(layer_id))

    def _name(self, place: int) -> str:
        return f"model-{place + 1:05d}-of-{len(self.dense) + len(self.layers):05d}.safetensors"


def save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file by rename, on disk before it has its name."""
    with write_guard(path.name, path.parent), by_rename(path) as part:
        try:
            save_file(tensors, part, metadata={"format": "pt"})
        except SafetensorError as error:  # says in words alone what the operating system refused
            if number := re.search(r"\(os error (\d+)\)", str(error)):
                raise OSError(int(number[1]), os.strerror(int(number[1])), str(part)) from error
            raise
        part.chmod(0o644)  # the library leaves it readable to its owner alone
        with part.open("rb") as handle:
            os.fsync(handle.fileno())


def hidden_file(folder: Path, layer_id: int) -> Path:
    """Where the states before a layer are kept while the work is unfinished."""
    return folder / f"hidden-{layer_id:05d}.safetensors"


def save_hidden(
    folder: Path, layer_id: int, hidden: list[Tensor], others: dict[str, list[Tensor]] | None = None
) -> None:
    """Keep the states before a layer, so that a stopped run goes on without running the layers before it again.

    Args:
        folder: the output.
        layer_id: the layer.
        hidden: of the calibration sequences.
        others: of the drafts that are compared, by name.
    """
    lists = {"": hidden} | {f"{name}.": states for name, states in (others or {}).items()}
    tensors = {f"{name}{i:06d}": states.contiguous() for name, part in lists.items() for i, states in enumerate(part)}
    save_tensors(hidden_file(folder, layer_id), tensors)


def load_hidden(folder: Path, layer_id: int) -> dict[str, list[Tensor]]:
    """What `save_hidden` kept: the calibration sequences' states under "", those of drafts by name.

    Raises:
        ArtifactError: the file is gone.
    """
    path = hidden_file(folder, layer_id)
    if not path.is_file():
        raise ArtifactError(
            expected=f"the hidden states of the stopped run in {path}",
            found="no such file",
            mend="start over with --force",
        )
    found: dict[str, list[Tensor]] = {}
    states = load_file(path)
    for key in sorted(states):
        found.setdefault(key.rpartition(".")[0], []).append(states[key].clone())
    return found


def copy_companions(source: Path, folder: Path) -> list[str]:
    """Copy tokenizer, generation configuration and licence; returns their names."""
    names = sorted({path.name for pattern in COMPANIONS for path in source.glob(pattern) if path.is_file()})
    with write_guard("the tokenizer files", folder):
        for name in names:
            with by_rename(folder / name) as part:
                shutil.copyfile(source / name, part)
    return names


def quantization_config(plan: Plan, options: QuantizeOptions) -> dict[str, Any]:
    """The interchange format's description of itself, for config.json and quantize_config.json."""
    dynamic: dict[str, dict[str, int]] = {pattern: {} for pattern in UNQUANTIZED}
    for layer_id, form in plan.formats.items():
        experts = rf"\.layers\.{layer_id}\.mlp\.experts\.\d+\."
        if form.kept:
            dynamic[rf"-:.*{experts}({'|'.join(form.kept)})$"] = {}
        if (form.bits, form.group_size) != (options.bits, options.group_size):
            dynamic[rf"+:.*{experts}.*"] = {"bits": form.bits, "group_size": form.group_size}
    return {
        "quant_method": "gptq",
        "checkpoint_format": "gptq",
        "bits": options.bits,
        "group_size": options.group_size,
        "sym": True,
        "desc_act": False,
        "static_groups": True,
        "true_sequential": False,
        "damp_percent": options.damp_percent,
        "lm_head": False,
        "pack_dtype": "int32",
        "dynamic": dynamic,
        "modules_to_not_convert": list(options.skip_modules),
        "meta": {"quantizer": ["moespeq"]},
    }


def write_configuration(folder: Path, checkpoint: Checkpoint, quantization: dict[str, Any]) -> list[str]:
    """Write config.json and quantize_config.json; returns their names."""
    with write_guard("the configuration", folder):
        write_json(folder / "config.json", {**checkpoint.config, "quantization_config": quantization})
        write_json(folder / "quantize_config.json", quantization)
    return ["config.json", "quantize_config.json"]


def write_index(folder: Path, contents: dict[str, dict[str, int]]) -> str:
    """Write the index of the shards.

    Args:
        contents: file to tensor names and their sizes in bytes.
    """
    body = {
        "metadata": {"total_size": sum(size for tensors in contents.values() for size in tensors.values())},
        "weight_map": {name: file for file, tensors in contents.items() for name in tensors},
    }
    with write_guard("the index", folder):
        write_json(folder / INDEX, body)
    return INDEX


def entries(folder: Path, names: Iterable[str]) -> dict[str, FileEntry]:
    """Sizes and checksums for the manifest."""
    return {name: FileEntry.of(folder / name) for name in names}


def sizes(tensors: dict[str, Tensor]) -> dict[str, int]:
    """Bytes of each tensor."""
    return {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
