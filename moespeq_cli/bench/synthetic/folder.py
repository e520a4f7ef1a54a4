"""A built model on disk: sharded safetensors with index, configuration, tokenizer; it has its name only when whole."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from moespeq_cli.bench.synthetic.architecture import Architecture, TensorSpec
from moespeq_cli.bench.synthetic.tensors import TensorMaker
from moespeq_cli.demo import checkpoint_path
from moespeq_cli.quantize.folder import INDEX, save_tensors
from runtime.artifacts.folder import check_free_space, claim_output, refuse_strangers, write_guard
from runtime.artifacts.manifest import write_json
from runtime.errors import InputError

SHARD_BYTES = 2 << 30
SPARE_BYTES = 16 << 20  # headers, index, tokenizer
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
OWN_NAMES = re.compile(
    r"\.lock|progress\.json(\.part)?|(model-|config|generation_config|tokenizer|special_tokens_map).*"
)


def refuse_existing(out: Path) -> None:
    """Keep away from a place that is taken.

    Raises:
        InputError: something is at `out` already.
    """
    if out.exists() or out.is_symlink():
        raise InputError(
            expected=f"nothing at {out} yet",
            found="a folder" if out.is_dir() else "a file",
            mend="pass another --out, or remove it first",
        )


def plan_shards(architecture: Architecture, shard_bytes: int = SHARD_BYTES) -> list[list[TensorSpec]]:
    """The tensors in files of at most `shard_bytes`, in the model's order; a larger tensor has a file of its own."""
    shards: list[list[TensorSpec]] = [[]]
    filled = 0
    for spec in architecture.tensors():
        if shards[-1] and filled + spec.stored_bytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(spec)
        filled += spec.stored_bytes
    return shards


def needed_bytes(architecture: Architecture) -> int:
    """Disk that the folder takes."""
    return sum(spec.stored_bytes for spec in architecture.tensors()) + SPARE_BYTES


def write_model(
    config: Any,
    out: Path,
    seed: int = 0,
    advance: Callable[[float], None] = lambda gigabytes: None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the whole folder under another name, `OUT.part`, and rename it last.

    Args:
        config: from `make_config`.
        out: the folder; must not be there.
        seed: of the weights.
        advance: called with the GB of each shard.
        shard_bytes: the most that a file holds; one file's tensors are in memory.

    Raises:
        InputError: `out` is there, or `OUT.part` holds something else.
        StorageError: the disk is too small, or cannot be written.
        ArtifactError: another process is writing there.
    """
    refuse_existing(out)
    part = out.with_name(out.name + ".part")
    refuse_strangers(part, OWN_NAMES, "half-written model")
    architecture = Architecture.of(config)
    with claim_output(part, force=True):
        try:
            check_free_space(part, needed_bytes(architecture), "the model")
            _write_shards(architecture, part, seed, advance, shard_bytes)
            with write_guard("the model's configuration", part):
                _write_companions(config, part)
        except BaseException:  # Ctrl-C too: nothing can go on from here, so nothing is left
            shutil.rmtree(part, ignore_errors=True)
            raise
    with write_guard("the model", out.parent):
        refuse_existing(out)
        os.replace(part, out)


def _write_shards(
    architecture: Architecture, folder: Path, seed: int, advance: Callable[[float], None], shard_bytes: int
) -> None:
    maker = TensorMaker(architecture, seed, torch.device("cpu"))
    shards = plan_shards(architecture, shard_bytes)
    index: dict[str, str] = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # random numbers are made by one core a tensor
        for place, specs in enumerate(shards, 1):
            name = f"model-{place:05d}-of-{len(shards):05d}.safetensors"
            names = [spec.name for spec in specs]
            save_tensors(folder / name, dict(zip(names, pool.map(maker.make, specs), strict=True)))
            index |= dict.fromkeys(names, name)
            advance(sum(spec.stored_bytes for spec in specs) / 1e9)
    total = sum(spec.stored_bytes for spec in architecture.tensors())
    with write_guard("the model's index", folder):
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": index})


def _write_companions(config: Any, folder: Path) -> None:
    config.save_pretrained(folder)
    source = checkpoint_path()
    for name in TOKENIZER:
        shutil.copyfile(source / name, folder / name)
    settings = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    write_json(folder / "tokenizer_config.json", settings | {"model_max_length": config.max_position_embeddings})
    ids = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(folder / "generation_config.json", ids | {"do_sample": False})
