"""What the routed experts of a layer were fed, and the second moments that GPTQ works from."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.model.stream import LayerTrace

PIECE_ROWS = 4096  # rows whose product is taken at once, so that float32 copies of wide inputs stay small
BLOCK = 256  # columns whose products are taken at once


class TokenLog:
    """Collects, as the observer of one layer, exactly the tokens that the router sent to each expert.

    Rows are kept in the order of the text. Nothing is padded, so nothing but text is counted.
    """

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts
        self._hidden: list[Tensor] = []
        self._choices: list[Tensor] = []

    def __call__(self, trace: LayerTrace) -> None:
        """Take one sequence's trace."""
        self._hidden.append(trace.hidden)
        self._choices.append(trace.top_k_index)

    @property
    def counts(self) -> list[int]:
        """Tokens of each expert."""
        total = torch.zeros(self.num_experts, dtype=torch.int64)
        for choices in self._choices:
            total += torch.bincount(choices.flatten(), minlength=self.num_experts)
        return [int(count) for count in total]

    def inputs(self, expert_id: int) -> Tensor:
        """The experts' input for each token of one expert, [tokens, H], where the layer computes."""
        taken = []
        for hidden, choices in zip(self._hidden, self._choices, strict=True):
            rows = (choices == expert_id).any(-1).nonzero().flatten()
            taken.append(hidden.index_select(0, rows.to(hidden.device)))
        return torch.cat(taken) if taken else torch.empty(0, 0)


def hessian(inputs: Tensor) -> Tensor:
    """Second moments 2 / n * sum of x x^T over n inputs, as GPTQ defines them for one linear.

    Args:
        inputs: [n, in_features], any float dtype; n may be 0.

    Returns:
        float32 [in_features, in_features]; all 0 where n is 0.
    """
    tokens, in_features = inputs.shape
    total = torch.zeros(in_features, in_features, device=inputs.device)
    for first in range(0, tokens, PIECE_ROWS):
        rows = inputs[first : first + PIECE_ROWS].to(torch.float32)
        for start in range(0, in_features, BLOCK):  # what is below the diagonal is what is above it
            stop = min(start + BLOCK, in_features)
            total[:stop, start:stop].addmm_(rows[:, :stop].t(), rows[:, start:stop])
    for start in range(BLOCK, in_features, BLOCK):
        total[start : start + BLOCK, :start] = total[:start, start : start + BLOCK].t()
    return total.mul_(2.0 / max(tokens, 1))
