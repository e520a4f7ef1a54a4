"""The traditional way: a loop over experts with library calls, tokens sorted on the host; baseline and fallback."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from runtime.kernels.dequant import dequantize_experts, plain_layout
from runtime.kernels.layout import SlotLayout
from runtime.kernels.reference import activate_torch


@dataclass(frozen=True, slots=True)
class ExpertTokens:
    """The tokens of one expert: int64 indices [n] of the token and of the expert's place among its top k."""

    expert_id: int
    tokens: Tensor
    places: Tensor


def tokens_by_expert(top_k_index: Tensor) -> list[ExpertTokens]:
    """Experts that have tokens, ascending, with their tokens, ascending; waits for the device."""
    host = top_k_index.cpu()
    result = []
    for expert_id in torch.unique(host).tolist():
        tokens, places = torch.nonzero(host == expert_id, as_tuple=True)
        result.append(ExpertTokens(expert_id, tokens.to(top_k_index.device), places.to(top_k_index.device)))
    return result


class LoopExperts:
    """A layer computed expert by expert.

    All arithmetic between the calls is BF16, as the model libraries do it; y is summed in BF16 in the order of experts.

    Args:
        layout: of the pool; int4 and int8 experts are expanded one after the other before use, on a GPU.
        pool: uint8 [S, slot_bytes].
        slot_of: each expert's slot, -1 for one that is not here and is left out.
    """

    def __init__(self, layout: SlotLayout, pool: Tensor, slot_of: list[int]) -> None:
        self.layout, self.pool, self.slot_of = layout, pool, slot_of
        self._plain = layout
        if layout.form.is_coded:
            self._plain = plain_layout(layout)
            self._scratch = self._plain.new_pool(1, pool.device)
            self._slots = torch.tensor(slot_of, dtype=torch.int32, device=pool.device)
            self._ids = torch.arange(len(slot_of), dtype=torch.int32, device=pool.device)
            self._one = torch.ones(1, dtype=torch.int32, device=pool.device)

    def run(self, x: Tensor, top_k_weights: Tensor, experts: list[ExpertTokens]) -> Tensor:
        """y BF16 [M, H].

        Args:
            x: BF16 [M, H].
            top_k_weights: float32 [M, k].
            experts: as `tokens_by_expert` gives them.
        """
        y = torch.zeros_like(x)
        weights = top_k_weights.to(x.dtype)
        for expert in experts:
            slot = self.slot_of[expert.expert_id]
            if slot < 0:
                continue
            p = self._expert(x.index_select(0, expert.tokens), expert.expert_id, slot)
            y.index_add_(0, expert.tokens, p * weights[expert.tokens, expert.places, None])
        return y

    def _expert(self, xs: Tensor, expert_id: int, slot: int) -> Tensor:
        """down(activation(gate_up(xs))) of one expert: BF16 [n, H]."""
        slots = self.pool[slot : slot + 1]
        biases = self.layout.biases(slots)
        if self.layout.form.is_coded:
            active = self._ids[expert_id : expert_id + 1]
            dequantize_experts(self.layout, self.pool, self._slots, active, self._one, self._scratch[0])
            slots = self._scratch
        gate_up, down, _ = self._plain.views_bf16(slots)
        gate, up = F.linear(xs, gate_up[0], None if biases is None else biases.gate_up[0]).chunk(2, dim=-1)
        h = activate_torch(gate, up, self.layout.shape.activation)
        return F.linear(h, down[0], None if biases is None else biases.down[0])
