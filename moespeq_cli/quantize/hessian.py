"""Second moments of what the experts' linears are fed, from exactly the tokens routed to each."""

from __future__ import annotations

import torch
from torch import Tensor

FLUSH_ROWS = 512  # rows gathered before a product: few rows make slow products, and fixed cuts make equal sums


class HessianSum:
    """Sum of x x^T over the inputs of each of several linears.

    The rows of a linear are multiplied in pieces of `FLUSH_ROWS`, cut by their count alone, so the sums are the
    same bits however the tokens were handed over: one sequence at a time or several.
    """

    def __init__(self, num_experts: int, in_features: int, device: torch.device | str = "cpu") -> None:
        self.in_features = in_features
        self.counts = [0] * num_experts
        self._sums: list[Tensor | None] = [None] * num_experts
        self._waiting: list[list[Tensor]] = [[] for _ in range(num_experts)]
        self._waiting_rows = [0] * num_experts
        self._device = torch.device(device)

    def add(self, expert: int, inputs: Tensor) -> None:
        """Count tokens of one expert.

        Args:
            expert: position of the expert among those summed here.
            inputs: [tokens, in_features], any float dtype.
        """
        rows = inputs.to(device=self._device, dtype=torch.float32)
        self.counts[expert] += rows.shape[0]
        while rows.shape[0]:
            taken = rows[: FLUSH_ROWS - self._waiting_rows[expert]]
            self._waiting[expert].append(taken)
            self._waiting_rows[expert] += taken.shape[0]
            rows = rows[taken.shape[0] :]
            if self._waiting_rows[expert] == FLUSH_ROWS:
                self._flush(expert)

    def hessian(self, expert: int) -> Tensor:
        """2 / n * sum of x x^T, float32 [in_features, in_features]; zeros where no token came."""
        self._flush(expert)
        total = self._sums[expert]
        if total is None:
            return torch.zeros(self.in_features, self.in_features, device=self._device)
        return total * (2.0 / self.counts[expert])

    def stacked(self) -> Tensor:
        """The Hessians of all experts, [experts, in_features, in_features]; the sums are given up one by one."""
        experts = len(self.counts)
        result = torch.empty(experts, self.in_features, self.in_features, device=self._device)
        for expert in range(experts):
            result[expert] = self.hessian(expert)
            self._sums[expert] = None
        return result

    def _flush(self, expert: int) -> None:
        if not self._waiting[expert]:
            return
        rows = torch.cat(self._waiting[expert])
        total = self._sums[expert]
        if total is None:
            self._sums[expert] = rows.t() @ rows
        else:
            total.addmm_(rows.t(), rows)
        self._waiting[expert].clear()
        self._waiting_rows[expert] = 0
