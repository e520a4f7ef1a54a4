"""How alike two models' next-token distributions are."""

from __future__ import annotations

import torch
from torch import Tensor


class OutputTally:
    """Sums over positions."""

    def __init__(self) -> None:
        self.tokens, self.same, self.overlap = 0, 0.0, 0.0

    def add(self, target: Tensor, draft: Tensor) -> None:
        """Compare [T, vocab_size] logits."""
        self.tokens += len(target)
        self.same += int((target.argmax(-1) == draft.argmax(-1)).sum())
        common = torch.minimum(target.float().softmax(-1), draft.float().softmax(-1))
        self.overlap += float(common.sum(dtype=torch.float64))

    def share(self, part: float) -> float | None:
        """Of all positions; None where there was none."""
        return part / self.tokens if self.tokens else None
