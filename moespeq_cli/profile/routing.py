"""Counting a router's choices: how often, together with which, and how long after the last time."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def chosen_experts(top_k_index: Tensor, num_experts: int) -> Tensor:
    """Bool [T, E] from int64 [T, k]: which experts each token uses."""
    chosen = torch.zeros(len(top_k_index), num_experts, dtype=torch.bool)
    return chosen.scatter_(1, top_k_index, torch.ones_like(top_k_index, dtype=torch.bool))


def reuse_edges(longest: int) -> tuple[int, ...]:
    """Powers of two from 1 to above every distance that a sequence of `longest` tokens can hold."""
    return tuple(1 << bit for bit in range(max(1, (longest - 1).bit_length()) + 1))


def reuse_distances(chosen: Tensor) -> Tensor:
    """Distances in tokens between an expert's successive uses in one sequence.

    Args:
        chosen: bool [T, E].

    Returns:
        int64 [uses - experts that were used at all], each at least 1.
    """
    uses = chosen.T.nonzero()  # sorted by expert, then token
    expert_id, token = uses[:, 0], uses[:, 1]
    return token.diff()[expert_id.diff() == 0]


class RoutingTally:
    """Sums over sequences, by domain and layer; what they mean stands at `runtime.artifacts.profile.Profile`."""

    def __init__(self, num_domains: int, num_layers: int, num_experts: int, longest: int) -> None:
        self.num_experts = num_experts
        self.edges = torch.tensor(reuse_edges(longest))
        buckets = len(self.edges) - 1
        self.counts = torch.zeros(num_domains, num_layers, num_experts, dtype=torch.int64)
        self.coactivation = torch.zeros(num_layers, num_experts, num_experts, dtype=torch.int64)
        self.histogram = torch.zeros(num_domains, num_layers, buckets, dtype=torch.int64)
        self.first_uses = torch.zeros(num_domains, num_layers, dtype=torch.int64)
        self.distance = torch.zeros(num_domains, num_layers, dtype=torch.int64)
        self.kept = torch.zeros(num_domains, num_layers, dtype=torch.int64)
        self.keepable = torch.zeros(num_domains, num_layers, dtype=torch.int64)

    def add(self, domain: int, layer: int, top_k_index: Tensor) -> None:
        """Count one whole sequence in one layer.

        Args:
            domain: place on the domain axis.
            layer: place on the layer axis.
            top_k_index: int64 [T, k], tokens in order.
        """
        chosen = chosen_experts(top_k_index, self.num_experts)
        gaps = reuse_distances(chosen)
        ones = chosen.float()
        self.counts[domain, layer] += chosen.sum(0)
        self.coactivation[layer] += (ones.T @ ones).to(torch.int64)  # float32 is exact up to 2**24 tokens a sequence
        bucket = torch.bucketize(gaps, self.edges, right=True) - 1
        self.histogram[domain, layer] += torch.bincount(bucket, minlength=len(self.edges) - 1)
        self.first_uses[domain, layer] += int(chosen.any(0).sum())
        self.distance[domain, layer] += int(gaps.sum())
        self.kept[domain, layer] += int((gaps == 1).sum())
        self.keepable[domain, layer] += int(chosen[1:].sum())

    def counted(self) -> dict[str, Tensor]:
        """The sums alone, which `add` counts in."""
        names = ("counts", "coactivation", "histogram", "first_uses", "distance", "kept", "keepable")
        return {name: getattr(self, name) for name in names}

    def tensors(self) -> dict[str, Tensor]:
        """The sums and the means that follow from them, under their names in the artifact."""
        return {
            "counts": self.counts,
            "coactivation": self.coactivation,
            "reuse_histogram": self.histogram,
            "first_uses": self.first_uses,
            "reuse_mean": share(self.distance, self.histogram.sum(-1)),
            "kept_from_previous": share(self.kept, self.keepable),
        }


class RoutingTrace:
    """The choices of the first tokens, kept as they are, int16 [tokens, layers, top_k]."""

    def __init__(self, lengths: list[int], num_layers: int, top_k: int, max_tokens: int) -> None:
        self._spans: list[slice] = []
        start = 0
        for length in lengths:
            stop = min(start + length, max_tokens)
            if start == stop:
                break
            self._spans.append(slice(start, stop))
            start = stop
        self.tokens = start
        self.rows = torch.zeros(start, num_layers, top_k, dtype=torch.int16)

    @property
    def starts(self) -> Tensor:
        """int64 [sequences]: where each recorded sequence begins; a prefix of those measured."""
        return torch.tensor([span.start for span in self._spans], dtype=torch.int64)

    def add(self, sequence: int, layer: int, top_k_index: Tensor) -> None:
        """Record one sequence in one layer, or the part of it that fits."""
        if sequence < len(self._spans):
            span = self._spans[sequence]
            self.rows[span, layer] = top_k_index[: span.stop - span.start].to(torch.int16)


class AgreementTally:
    """The share of the target's experts that another routing of the same tokens also chooses, by domain and layer."""

    def __init__(self, num_domains: int, num_layers: int, num_experts: int) -> None:
        self.num_experts = num_experts
        self.common = torch.zeros(num_domains, num_layers, dtype=torch.int64)
        self.chosen = torch.zeros(num_domains, num_layers, dtype=torch.int64)

    def add(self, domain: int, layer: int, target_index: Tensor, draft_index: Tensor) -> None:
        """Compare one sequence in one layer; both int64 [T, k]."""
        target = chosen_experts(target_index, self.num_experts)
        draft = chosen_experts(draft_index, self.num_experts)
        self.common[domain, layer] += int((target & draft).sum())
        self.chosen[domain, layer] += int(target.sum())

    def shares(self) -> Tensor:
        """float64 [D, L]; NaN where nothing was compared."""
        return share(self.common, self.chosen)


def share(part: Tensor, whole: Tensor) -> Tensor:
    """`part / whole` in float64, NaN where there is nothing to divide by."""
    return torch.where(whole > 0, part.double() / whole.double().clamp(min=1), math.nan)


def number_or_none(value: float) -> float | None:
    """A share as JSON holds it: None where it is not defined."""
    return None if math.isnan(value) else value


def mean_or_none(values: list[float]) -> float | None:
    """The mean of the numbers that are defined, or None."""
    defined = [value for value in values if not math.isnan(value)]
    return sum(defined) / len(defined) if defined else None
