"""Pairs of experts that tokens use together, against what chance would give."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.artifacts.profile import Profile

LEAST_SHARE = 1 / 200  # of all tokens; a rarer pair says nothing
ROUNDS = 300


@dataclass(frozen=True, slots=True)
class Pair:
    """The two experts of a layer that meet most often compared with chance."""

    layer: int
    first: int
    second: int
    share: float  # of all tokens
    lift: float


def by_chance(uses: Tensor, top_k: int) -> Tensor:
    """How often two experts would meet if tokens chose `top_k` different ones by nothing but how much each is used.

    That is quasi-independence, the model of a table whose diagonal cannot be: the product of one weight an expert, of
    such sizes that each expert meets others as often as it does, `top_k - 1` times a use. (The plain product of both
    rates promises more, 1.3 times as much for even use and `top_k` 4, because it lets a token choose an expert twice.)

    Args:
        uses: [E], tokens that chose the expert.
        top_k: experts of a token.

    Returns:
        float64 [E, E], zeros on the diagonal.
    """
    meetings = uses.double() * (top_k - 1)
    weights = (meetings / meetings.sum().sqrt()).nan_to_num(0.0)  # of no use there is nothing to share out
    for _ in range(ROUNDS):
        others = weights.sum() - weights
        weights = torch.where(others > 0, (weights * meetings / others.clamp(min=1e-300)).sqrt(), weights)
    return torch.outer(weights, weights).fill_diagonal_(0.0)


def lifts(profile: Profile, row: int) -> Tensor:
    """Of the `row`-th layer with experts, meetings of two experts relative to chance: float64 [E, E].

    NaN on the diagonal and where one of the two is never used.
    """
    together = profile.tensors["coactivation"][row].double()
    chance = by_chance(together.diagonal(), profile.manifest.top_k)
    return torch.where(chance > 0, together / chance.clamp(min=1e-300), torch.nan)


def strongest(profile: Profile, row: int) -> Pair | None:
    """The pair with the highest lift among those on enough tokens; None where no pair is."""
    together = profile.tensors["coactivation"][row].double()
    tokens = max(sum(profile.manifest.domains.values()), 1)
    found = lifts(profile, row).nan_to_num(0.0).triu(1)
    found[together < tokens * LEAST_SHARE] = 0
    first, second = divmod(int(found.argmax()), len(found))
    if not float(found[first, second]):
        return None
    share, lift = float(together[first, second]) / tokens, float(found[first, second])
    return Pair(profile.manifest.moe_layers[row], first, second, share, lift)
