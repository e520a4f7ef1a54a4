"""Layers of random experts in a pool, with the kernel for few tokens on the emulated machine that computes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtime.kernels import bf16_plan, codes_plan, fused_plan
from runtime.kernels.fused_config import FusedConfig
from runtime.kernels.layout import Biases, SlotLayout
from runtime.kernels.reference import compute_torch, quantize, slot_experts
from runtime.kernels.shape import ExpertShape, WeightForm
from tests.kernels import emulated

ANY_SMEM_BYTES = 1 << 24  # the emulated machine has as much shared memory as is asked for
FEW_ROLES_BYTES = 128 << 10  # room for few compute warps, so that the emulation has less to do

SHAPE = ExpertShape(6, 3, 288, 192)


class Layer:
    """A layer with random experts in a pool, and the kernel's variant for it."""

    def __init__(
        self,
        folder: Path,
        shape: ExpertShape,
        form: WeightForm,
        max_tokens: int = 8,
        arch: int = 900,
        edit: tuple[str, str] | None = None,
        roles: bool = False,
        stages: int = 3,
        beside: bool = False,
        more: dict[str, int] | None = None,
        block_dim: int = 128,
        smem_bytes: int | None = None,
    ) -> None:
        self.shape, self.layout = shape, SlotLayout(shape, form)
        if roles and not form.is_coded:
            chosen = bf16_plan.plan(self.layout, max_tokens, FusedConfig(), smem_bytes or ANY_SMEM_BYTES)
        elif roles:
            chosen = codes_plan.plan(self.layout, max_tokens, 0, smem_bytes or FEW_ROLES_BYTES, beside)
        else:
            config = FusedConfig(block_dim=block_dim, stages=stages)
            chosen = fused_plan.plan(self.layout, max_tokens, config, ANY_SMEM_BYTES)
        self.defines, self.most_first_claim = dict(chosen.source.defines), chosen.most_first_claim
        self.defines |= more or {}
        self.kernel = emulated.build(self.layout, self.defines, folder, arch, chosen.source.name, edit)
        assert self.kernel.library.shared_bytes() == chosen.smem_bytes
        random = torch.Generator().manual_seed(7)
        experts, inner, hidden = shape.num_experts, shape.moe_intermediate_size, shape.hidden_size
        gate_up = (torch.randn(experts, 2 * inner, hidden, generator=random) * hidden**-0.5).bfloat16()
        down = (torch.randn(experts, hidden, inner, generator=random) * inner**-0.5).bfloat16()
        biases = None
        if shape.has_bias:
            biases = Biases(
                torch.randn(experts, 2 * inner, generator=random).bfloat16(),
                torch.randn(experts, hidden, generator=random).bfloat16(),
            )
        if form.is_coded:
            self.pool = self.layout.pack_codes(quantize(gate_up, form), quantize(down, form), biases)
        else:
            self.pool = self.layout.pack_bf16(gate_up, down, biases)
        self.pool = emulated.fenced(self.pool)  # no kernel may read past it
        self.slot_of = torch.randperm(experts, generator=random).int()

    def batch(self, tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """x [1, M, H], top_k_index and top_k_weights [1, M, k]."""
        random = torch.Generator().manual_seed(seed)
        x = torch.randn(1, tokens, self.shape.hidden_size, generator=random).bfloat16()
        chosen = torch.rand(tokens, self.shape.num_experts, generator=random).topk(self.shape.top_k)
        return x, chosen.indices[None].int(), torch.rand(1, tokens, self.shape.top_k, generator=random)

    def run(self, *batch: Tensor, slot_of: Tensor | None = None, **options: Any) -> Tensor:
        return self.kernel.run(self.pool, self.slot_of if slot_of is None else slot_of, *batch, **options)

    def error(self, y: Tensor, x: Tensor, index: Tensor, weights: Tensor) -> float:
        """The relative error of one call's y [M, H]."""
        experts = slot_experts(self.layout, self.pool, self.slot_of.tolist())
        right = compute_torch(x, index, weights, experts, self.shape.activation).y
        return float((y.double() - right).norm() / right.norm())
