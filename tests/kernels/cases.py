"""Random layers and tokens for the kernel tests, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.kernels.layout import Biases, SlotLayout
from runtime.kernels.reference import quantize
from runtime.kernels.shape import ExpertShape


def make_pool(
    layout: SlotLayout, num_slots: int, missing: tuple[int, ...] = (), device: str = "cpu", seed: int = 0
) -> tuple[Tensor, Tensor]:
    """A pool of random experts, and slot_of int32 [E] that scatters those not in `missing` over it.

    Slots that no expert has are filled with NaN or the widest scales, so that reading them shows.
    """
    generator = torch.Generator(device).manual_seed(seed)
    shape = layout.shape
    inner, hidden = shape.moe_intermediate_size, shape.hidden_size

    def normal(*sizes: int, scale: float) -> Tensor:
        return (torch.randn(*sizes, generator=generator, device=device) * scale).bfloat16()

    pool = torch.full((num_slots, layout.slot_bytes), 0x7F, dtype=torch.uint8, device=device)
    here = [expert for expert in range(shape.num_experts) if expert not in missing]
    order = torch.randperm(num_slots, generator=torch.Generator().manual_seed(seed))[: len(here)].tolist()
    slot_of = torch.full((shape.num_experts,), -1, dtype=torch.int32)
    for expert, slot in zip(here, order, strict=True):
        slot_of[expert] = slot
        gate_up, down = normal(1, 2 * inner, hidden, scale=hidden**-0.5), normal(1, hidden, inner, scale=inner**-0.5)
        biases = None
        if shape.has_bias:
            biases = Biases(normal(1, 2 * inner, scale=0.3), normal(1, hidden, scale=0.3))
        out = pool[slot : slot + 1]
        if layout.form.is_coded:
            layout.pack_codes(quantize(gate_up, layout.form), quantize(down, layout.form), biases, out)
        else:
            layout.pack_bf16(gate_up, down, biases, out)
    return pool, slot_of.to(device)


def make_tokens(shape: ExpertShape, tokens: int, device: str = "cpu", seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """x BF16 [M, H], top_k_index int32 [M, k] with distinct experts in a row, top_k_weights float32 [M, k]."""
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(tokens, shape.hidden_size, generator=generator, device=device).bfloat16()
    scores = torch.rand(tokens, shape.num_experts, generator=generator, device=device)
    weights, index = scores.topk(shape.top_k, dim=-1)
    return x, index.to(torch.int32).contiguous(), weights.contiguous()
