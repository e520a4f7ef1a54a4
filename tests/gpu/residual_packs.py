"""Packs of one tiny model of a family in both encodings."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

from runtime.artifacts.pack import Pack
from tests.pack.fixtures import make_pack, save_quantized
from tests.tiny import make_config, make_model, save_model


class Packs(NamedTuple):
    raw: Pack
    residual: Pack


def packs_of(source: Path, quantized: Path, folder: Path) -> Packs:
    """Of a model and its draft."""
    return Packs(*(make_pack(source, quantized, folder / name, encoding=name) for name in ("raw", "residual")))


def both_packs(folder: Path, kind: str, **overrides: Any) -> Packs:
    """Experts of 128 x 128 weights, the smallest whose residual records are shorter."""
    inner = "moe_intermediate_size" if hasattr(make_config(kind), "moe_intermediate_size") else "intermediate_size"
    heads = {} if kind.startswith("deepseek") else {"head_dim": 32}  # as wide together as the model: OLMoE's norms are
    sizes = {"hidden_size": 128, inner: 128} | heads | overrides
    source = save_model(make_model(kind, dtype=torch.bfloat16, **sizes), folder / "model")
    quantized = save_quantized(source, folder / "quantized")
    made = packs_of(source, quantized, folder)
    encodings = {entry.encoding for entry in made.residual.records["target"].values()}
    assert encodings == {"residual"}
    return made
