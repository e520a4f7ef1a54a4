"""How the domains of a profile differ: in what they route to, and in how well one stands for another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.artifacts.profile import Profile

SPECIALISED = 2 / 3  # an expert of which one domain makes so much of the use, all domains taken as equally long
LEAST_USE = 0.01  # of that domain's tokens, below which it says nothing
CACHE_SHARE = 0.25  # of all experts, for which the domains serve each other


@dataclass(frozen=True, slots=True)
class Specialist:
    """An expert that works mostly for one domain; `rates` are shares of each domain's tokens."""

    layer: int
    expert: int
    domain: str
    share: float  # of the expert's use, all domains taken as equally long
    rates: dict[str, float]


def use_rates(profile: Profile) -> Tensor:
    """float64 [D, L, E]: the share of a domain's tokens that chose the expert."""
    tokens = torch.tensor([max(profile.manifest.domains[name], 1) for name in profile.manifest.domain_names])
    return profile.tensors["counts"].double() / tokens[:, None, None]


def divergence(profile: Profile) -> Tensor:
    """Jensen-Shannon divergence of two domains' use of the experts, in bits: 0 alike, 1 nothing in common.

    Returns:
        float64 [D, D, L]; NaN where a domain has no token.
    """
    counts = profile.tensors["counts"].double()
    shares = counts / counts.sum(-1, keepdim=True)  # NaN where there is nothing
    first, second = shares[:, None], shares[None, :]
    middle = (first + second) / 2
    return (entropy(middle) - (entropy(first) + entropy(second)) / 2).clamp(min=0)


def entropy(shares: Tensor) -> Tensor:
    """In bits, over the last axis."""
    return -torch.xlogy(shares, shares).sum(-1) / math.log(2)


def specialists(profile: Profile) -> list[Specialist]:
    """Experts that one domain makes most of the use of, the most specialised first; none with a single domain."""
    names = profile.manifest.domain_names
    if len(names) < 2:
        return []
    rates = use_rates(profile)
    shares = rates / rates.sum(0).clamp(min=1e-300)
    found = []
    for row, layer in enumerate(profile.manifest.moe_layers):
        for expert in range(profile.manifest.num_experts):
            share, place = shares[:, row, expert].max(0)
            if share >= SPECIALISED and rates[place, row, expert] >= LEAST_USE:
                used = dict(zip(names, rates[:, row, expert].tolist(), strict=True))
                found.append(Specialist(layer, expert, names[int(place)], float(share), used))
    return sorted(found, key=lambda s: (-s.share, -s.rates[s.domain], s.layer, s.expert))


def serving(profile: Profile, share: float = CACHE_SHARE) -> tuple[int, Tensor]:
    """How much of one domain's use the hottest experts of another serve, held and never changed.

    Args:
        profile: what was measured.
        share: of all experts that are held.

    Returns:
        How many experts that is, and float64 [D + 1, D]: held by the row's heat (the last: all domains alike), used by
        the column's domain.
    """
    rates = use_rates(profile).flatten(1)
    held = max(1, round(share * rates.shape[1]))
    heats = torch.cat([rates, rates.mean(0, keepdim=True)])
    masks = torch.zeros_like(heats).scatter_(1, heats.topk(held).indices, 1.0)
    return held, masks @ rates.T / rates.sum(1)


def sensitive_rankings(profile: Profile) -> dict[str, list[int]]:
    """The layers by sensitivity of their routed experts, the most sensitive first: of all texts, and of each domain.

    Domains on which nothing was measured are left out.
    """
    sensitivity, layers = profile.sensitivity(), profile.manifest.moe_layers
    rankings = {"all": ranked(layers, [sensitivity.experts_of(layer) for layer in layers])}
    for place, name in enumerate(profile.manifest.domain_names):
        if sensitivity.figures.tokens[name]:
            rankings[name] = ranked(layers, [sensitivity.experts_of(layer, place) for layer in layers])
    return rankings


def ranked(layers: Sequence[int], scores: Sequence[float]) -> list[int]:
    """Layers by falling score, equals in their order."""
    return [layer for layer, _ in sorted(zip(layers, scores, strict=True), key=lambda pair: (-pair[1], pair[0]))]
