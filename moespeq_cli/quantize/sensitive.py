"""Which layers to hold finer, by what a profile says that rounding them would cost."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from runtime.artifacts.manifest import MANIFEST, require_same_model, sha256_file
from runtime.artifacts.profile import Profile
from runtime.errors import InputError


@dataclass(frozen=True, slots=True)
class SensitiveChoice:
    """The layers that a profile picked.

    Attributes:
        layers: true numbers, ascending.
        ranking: every layer with routed experts and its sensitivity, the most sensitive first.
        share: of the layers, as asked for.
        profile_sha256: of the profile's manifest.
    """

    layers: tuple[int, ...]
    ranking: tuple[tuple[int, float], ...]
    share: float
    profile_sha256: str


def choose_layers(folder: Path, share: float, model_digest: str) -> SensitiveChoice:
    """The most sensitive share of the layers with routed experts, rounded up to whole layers.

    A layer's sensitivity is the sum over its routed experts' linears and their output channels. All such layers hold
    equally many weights, so this is also the order of gain a byte.

    Args:
        folder: a profile of this model.
        share: 0 picks none, 1 all.
        model_digest: of the model.

    Raises:
        InputError: a profile of another model, or a share that is none.
        ArtifactError: unfinished, damaged, or without sensitivity.
    """
    if not 0 <= share <= 1:
        raise InputError(expected="--sensitive-share from 0 to 1", found=str(share), mend="pass another, 0.1 is usual")
    profile = Profile.open(folder, verify=True)
    require_same_model("profile", folder, profile.manifest.model_digest, model_digest)
    sensitivity = profile.sensitivity()
    scores = [(layer_id, sensitivity.experts_of(layer_id)) for layer_id in profile.manifest.moe_layers]
    ranking = tuple(sorted(scores, key=lambda pair: (-pair[1], pair[0])))
    count = math.ceil(share * len(ranking) - 1e-9)  # 0.1 of 30 is 3, whatever floats say
    return SensitiveChoice(
        tuple(sorted(layer_id for layer_id, _ in ranking[:count])), ranking, share, sha256_file(folder / MANIFEST)
    )
