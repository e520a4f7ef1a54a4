"""Which shard each expert goes to, so that experts that fire together are read from different drives."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.artifacts.heat import Heat

MAX_SWAPS = 8  # an expert; each swap lowers the cost, and about one an expert is usual before none does


@dataclass(frozen=True, slots=True)
class Routing:
    """What a routing profile says about one model.

    Attributes:
        coactivation: int64 [moe layers, E, E], how many tokens used both experts.
        counts: int64 [moe layers, E], how many tokens used each.
        heat: by (layer_id, expert_id), the share of all tokens that used it.
    """

    coactivation: Tensor
    counts: Tensor
    heat: Heat


def stripe(num_layers: int, num_experts: int, num_shards: int, routing: Routing | None) -> list[list[int]]:
    """The shard of every expert, layer by layer: round-robin, or by co-activation where a profile tells it.

    All shards get equally many experts, to one, of the whole model and of each layer.
    """
    shards = []
    for layer in range(num_layers):
        capacity = _capacity(layer, num_experts, num_shards)
        if routing is None:
            slots = [(layer * num_experts + expert) % num_shards for expert in range(num_experts)]
        else:
            slots = _separate(routing.coactivation[layer], routing.counts[layer], capacity)
        shards.append(slots)
    return shards


def read_order(layer: int, num_experts: int, routing: Routing | None) -> list[int]:
    """The order of a layer's experts within their shards: hot first, where a profile tells it."""
    if routing is None:
        return list(range(num_experts))
    counts = routing.counts[layer].tolist()
    return sorted(range(num_experts), key=lambda expert: (-counts[expert], expert))


def shared_reads(coactivation: Tensor, shards: list[int]) -> int:
    """How often two experts of one token lie in the same shard of a layer; what striping makes small."""
    place = torch.tensor(shards)
    same = (place[:, None] == place[None, :]).triu(1)
    return int((coactivation * same).sum())


def _capacity(layer: int, num_experts: int, num_shards: int) -> list[int]:
    """Experts of this layer in each shard; the odd ones go on where the layer before stopped."""
    start = layer * num_experts
    capacity = [num_experts // num_shards] * num_shards
    for odd in range(num_experts % num_shards):
        capacity[(start + odd) % num_shards] += 1
    return capacity


def _separate(coactivation: Tensor, counts: Tensor, capacity: list[int]) -> list[int]:
    """Split one layer's experts into groups of given sizes with little co-activation inside a group.

    A balanced max-cut: the hottest expert first, each to the group where it meets the least, the fullest group last
    among equals; then the best swap of two experts, again and again, while one gains.
    """
    num_experts, num_shards = len(counts), len(capacity)
    weights = coactivation.to(torch.float64)
    weights = (weights + weights.T) / 2
    weights.fill_diagonal_(0)
    room = list(capacity)
    met = torch.zeros(num_experts, num_shards, dtype=torch.float64)  # co-activation of an expert with each group
    place = torch.zeros(num_experts, dtype=torch.int64)
    heat = counts.tolist()
    for expert in sorted(range(num_experts), key=lambda expert: (-heat[expert], expert)):
        meets = met[expert].tolist()
        shard = min((s for s in range(num_shards) if room[s]), key=lambda s: (meets[s], -room[s], s))
        room[shard] -= 1
        place[expert] = shard
        met[:, shard] += weights[:, expert]
    for _ in range(MAX_SWAPS * num_experts):
        loss = met[:, place] - met.gather(1, place[:, None])  # [E, E]: the row's expert goes to the column's group
        gain = 2 * weights - loss - loss.T  # the two do not meet where they go: each has left
        gain[place[:, None] == place[None, :]] = 0
        left, right = divmod(int(gain.argmax()), num_experts)
        if gain[left, right] <= 0:
            break
        a, b = int(place[left]), int(place[right])
        shift = weights[:, right] - weights[:, left]
        met[:, a] += shift
        met[:, b] -= shift
        place[left], place[right] = b, a
    return [int(shard) for shard in place]
