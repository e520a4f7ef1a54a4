"""Shapes of expert layers to measure: models that people run, and any other as numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from runtime.errors import InputError
from runtime.kernels.shape import Activation, ExpertShape


@dataclass(frozen=True, slots=True)
class Geometry:
    """A layer of experts with a name for tables."""

    name: str
    shape: ExpertShape

    @property
    def label(self) -> str:
        """The numbers: experts, top-k, hidden x intermediate, and what differs from plain silu."""
        shape = self.shape
        parts = [
            f"{shape.num_experts}, {shape.top_k}, {shape.hidden_size} x {shape.moe_intermediate_size}",
            *([str(shape.activation)] if shape.activation != Activation.silu else []),
            *(["biases"] if shape.has_bias else []),
        ]
        return ", ".join(parts)


def _known(
    name: str, experts: int, top_k: int, hidden: int, inner: int,
    activation: Activation = Activation.silu, has_bias: bool = False,
) -> Geometry:  # fmt: skip
    return Geometry(name, ExpertShape(experts, top_k, hidden, inner, activation, has_bias))


# Experts of a layer, experts of a token, hidden size, intermediate size of one expert: from the models' configurations.
_GEOMETRIES = (
    _known("qwen1.5-moe", 60, 4, 2048, 1408),
    _known("deepseek-v2-lite", 64, 6, 2048, 1408),
    _known("phi-3.5-moe", 16, 2, 4096, 6400),
    _known("mixtral-8x7b", 8, 2, 4096, 14336),
    _known("qwen3-30b-a3b", 128, 8, 2048, 768),
    _known("olmoe", 64, 8, 2048, 1024),
    _known("gpt-oss-20b", 32, 4, 2880, 2880, activation=Activation.clamped, has_bias=True),
    _known("granite-3b-a800m", 40, 8, 1536, 512),
    _known("glm-4.5-air", 128, 8, 4096, 1408),
    _known("minimax-m2", 256, 8, 3072, 1536),
    _known("qwen3-235b-a22b", 128, 8, 4096, 1536),
    _known("gpt-oss-120b", 128, 4, 2880, 2880, activation=Activation.clamped, has_bias=True),
    _known("mixtral-8x22b", 8, 2, 6144, 16384),
    _known("deepseek-v3", 256, 8, 7168, 2048),
)
KNOWN = {geometry.name: geometry for geometry in _GEOMETRIES}
DEFAULT = tuple(KNOWN)[:4]
SEED_TABLE = tuple(_known(f"seed-{inner}", 60, 4, 2048, inner) for inner in (512, 1024, 1408, 2048))

_NUMBERS = re.compile(r"(\d+):(\d+):(\d+)x(\d+)((?::\w+)*)")


def parse_geometry(text: str) -> Geometry:
    """A geometry by name, or as EXPERTS:TOP_K:HIDDENxINTER with `:gelu`, `:gelu_tanh`, `:clamped` or `:bias` after it.

    Raises:
        InputError: no such name, or not of that form.
        ShapeError: numbers that no kernel computes.
    """
    if text in KNOWN:
        return KNOWN[text]
    match = _NUMBERS.fullmatch(text)
    words = match[5].split(":")[1:] if match else []
    activations = [word for word in words if word in list(Activation)]
    if match is None or len(activations) > 1 or set(words) - {*activations, "bias"}:
        raise InputError(
            expected=f"a geometry of {', '.join(KNOWN)}, or EXPERTS:TOP_K:HIDDENxINTER[:ACTIVATION][:bias]",
            found=repr(text),
            mend="correct --geometry, for example 60:4:2048x1408 or 32:4:2880x2880:clamped:bias",
        )
    activation = Activation(activations[0]) if activations else Activation.silu
    return _known(text, int(match[1]), int(match[2]), int(match[3]), int(match[4]), activation, "bias" in words)


def parse_geometries(texts: Sequence[str] | None) -> list[Geometry]:
    """Every geometry asked for, once; `all` means every known one, nothing the default ones."""
    names: list[str] = []
    for text in texts or DEFAULT:
        names += KNOWN if text == "all" else [text]
    return [parse_geometry(name) for name in dict.fromkeys(names)]
