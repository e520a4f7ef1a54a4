"""What rounding a linear's weights would hurt, summed over sequences, and the gradients that wait to be counted.

A gradient of weights [out, in] is a product of two matrices of a sequence's tokens, which are far smaller. Gradients of
several sequences wait as such factors; then a linear's weights are rounded once for all of them, a block of rows at a
time, and neither a whole gradient nor a whole rounding error is ever in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moespeq_cli.profile.rounding import block_rows, rounded

BITS = 4
WAITING_BYTES = 1 << 29  # of factors: those of some 4000 tokens in a layer of Qwen1.5-MoE

Place = tuple[str, int | None]  # a linear's name, and which of the routed experts it is


@dataclass(frozen=True, slots=True)
class Factors:
    """The gradient of a linear's weights over one sequence, `outputs.T @ inputs`.

    Attributes:
        domain: of the sequence.
        outputs: d loss / d outputs of the linear, [m, out].
        inputs: [m, in].
    """

    domain: int
    outputs: Tensor
    inputs: Tensor


@dataclass(slots=True)
class Scores:
    """Sums over sequences of (gradient x rounding error)^2, by linear.

    Attributes:
        channels: float64 [out], or [num_experts, out] for the routed experts; all domains.
        domains: float64 [num_domains]; all channels.
    """

    num_domains: int
    device: torch.device
    channels: dict[str, Tensor] = field(default_factory=dict)
    domains: dict[str, Tensor] = field(default_factory=dict)

    def open(self, name: str, *shape: int) -> None:
        """Begin a linear, so that one that no token reaches has zeros."""
        self.channels[name] = torch.zeros(*shape, dtype=torch.float64, device=self.device)
        self.domains[name] = torch.zeros(self.num_domains, dtype=torch.float64, device=self.device)

    def add(self, name: str, domain: int, gradient: Tensor, error: Tensor, place: Any = ...) -> None:
        """Count one sequence's gradient, [out, in], of the linear, or of its part at `place`."""
        score = (gradient * error).square_().sum(1, dtype=torch.float64)
        self.channels[name][place] += score
        self.domains[name][domain] += score.sum()

    def weigh(self, place: Place, weight: Tensor, waiting: Sequence[Factors]) -> None:
        """Count the gradients of one linear's weights [out, in]."""
        name, expert_id = place
        count = block_rows(weight)
        for start in range(0, len(weight), count):
            rows = slice(start, start + count)
            error = rounding_error(weight[rows])
            for one in waiting:
                gradient = one.outputs[:, rows].float().T @ one.inputs.float()
                self.add(name, one.domain, gradient, error, rows if expert_id is None else (expert_id, rows))

    def tensors(self) -> dict[str, Tensor]:
        """All sums, on the CPU: `channels NAME` and `domains NAME`."""
        tensors = {f"channels {name}": tensor.cpu() for name, tensor in self.channels.items()}
        return tensors | {f"domains {name}": tensor.cpu() for name, tensor in self.domains.items()}


class Waiting:
    """Gradients that are not counted yet, by linear."""

    def __init__(self, scores: Scores, weight: Callable[[Place], Tensor]) -> None:
        """Count into `scores`; `weight` gives a linear's weights, [out, in]."""
        self.scores, self.weight = scores, weight
        self.factors: dict[Place, list[Factors]] = {}
        self.num_bytes = 0

    def add(self, place: Place, factors: Factors) -> None:
        """Let one more wait."""
        self.factors.setdefault(place, []).append(factors)
        self.num_bytes += factors.outputs.nbytes + factors.inputs.nbytes

    @torch.no_grad()
    def settle(self, beyond_bytes: int = 0) -> None:
        """Count all of them, if they take more than so many bytes."""
        if self.num_bytes > beyond_bytes:
            for place in sorted(self.factors):
                self.scores.weigh(place, self.weight(place), self.factors.pop(place))
            self.num_bytes = 0


def rounding_error(weight: Tensor) -> Tensor:
    """What rounding takes from weights [out, in], float32."""
    return weight.float() - rounded(weight, BITS)
