"""How often each expert was used on a profile's texts: the part of a pack that warms caches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from runtime.artifacts.manifest import read_json, write_json
from runtime.errors import ArtifactError
from runtime.memory.location import ExpertKey

HEAT = "heat.json"
MEND = "make the pack again with `moespeq pack --force`"
Heat = Mapping[ExpertKey, float]
"""By (layer_id, expert_id), the share of all tokens that chose the expert."""


def save_heat(path: Path, heat: Heat, moe_layers: Sequence[int], num_experts: int) -> None:
    """Write a share for every expert of every layer, six decimals."""
    layers = {str(layer): [round(heat[layer, expert], 6) for expert in range(num_experts)] for layer in moe_layers}
    write_json(path, {"layers": layers})


def load_heat(path: Path, moe_layers: Sequence[int], num_experts: int) -> dict[ExpertKey, float]:
    """Read what `save_heat` wrote.

    Raises:
        ArtifactError: not a share for every expert of every layer.
    """
    body = read_json(path, "the heat of a pack's experts", MEND)
    layers = body.get("layers") if isinstance(body, dict) else None
    heat: dict[ExpertKey, float] = {}
    for layer in moe_layers:
        shares = layers.get(str(layer)) if isinstance(layers, dict) else None
        good = isinstance(shares, list) and len(shares) == num_experts
        if not good or not all(type(share) in (int, float) and 0 <= share < math.inf for share in shares or ()):
            raise ArtifactError(
                expected=f"{num_experts} shares of 0 or more for layer {layer} in {path}",
                found=f"{shares!r:.80}",
                mend=MEND,
            )
        heat |= {(layer, expert): float(share) for expert, share in enumerate(shares or ())}
    return heat


def hottest(heat: Heat, count: int) -> list[ExpertKey]:
    """So many experts, the most used first; equals in the order of layers."""
    return sorted(heat, key=lambda key: (-heat[key], key))[:count]


def hot_half(heat: Heat) -> list[ExpertKey]:
    """The fewest experts that serve half of all uses, the most used first."""
    half, served, hot = sum(heat.values()) / 2, 0.0, []
    for key in hottest(heat, len(heat)):
        if served >= half:
            break
        served += heat[key]
        hot.append(key)
    return hot
