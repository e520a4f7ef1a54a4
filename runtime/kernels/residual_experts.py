"""The fused expert layer for a few tokens from residual records: one launch of `moe_residual.cu`, the bits of BF16."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from runtime.errors import KernelError, ShapeError
from runtime.kernels import residual_plan
from runtime.kernels.dequant import plain_layout
from runtime.kernels.device import current_gpu
from runtime.kernels.fused import FusedConfig, FusedExperts, Variants, require_tensor, require_tokens
from runtime.kernels.layout import SlotLayout
from runtime.kernels.residual import ResidualPool


@dataclass(frozen=True, slots=True)
class RawSlots:
    """Experts whose records are `raw`: pool uint8 [S, bytes of a BF16 slot], slot_of int32 [E], -1 for all others."""

    pool: Tensor
    slot_of: Tensor


class ResidualExperts:
    """The routed experts of layers of one geometry, exact, from residual records and the resident INT4 bank.

    The output has the bits that `FusedExperts` gives for the same weights in BF16 with the same configuration, on the
    same GPU. All else is as there: more than 16 tokens are several launches, a row has the same bits in any batch, one
    instance serves one stream, and calls may be captured in a CUDA graph after the first of their size.

    Args:
        layout: of the bank's slots, int4.
        config: of the BF16 kernel.

    Raises:
        KernelError: no GPU of compute capability 9.0 or newer.
    """

    def __init__(self, layout: SlotLayout, config: FusedConfig | None = None) -> None:
        self.layout, self.config = layout, config or FusedConfig()
        gpu = current_gpu()
        if gpu.capability < residual_plan.CAPABILITY:
            raise KernelError(
                expected="a GPU of compute capability 9.0 or newer to compute from residual records",
                found=f"{gpu.name} of {gpu.capability[0]}.{gpu.capability[1]}",
                mend="decode the records with ResidualPool.decode and compute in BF16",
            )
        self._variants = [self._variants_for(short_scales, gpu.smem_per_block_bytes) for short_scales in (False, True)]
        self._raw = FusedExperts(plain_layout(layout), self.config)
        self._pairs = torch.empty(0, device=torch.device("cuda", gpu.index))

    def run(
        self,
        pool: ResidualPool,
        slot_of: Tensor,
        bank_slot_of: Tensor,
        x: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        out: Tensor,
        *,
        raw: RawSlots | None = None,
        pairs: Tensor | None = None,
        resume: bool = False,
    ) -> None:
        """Compute the layer into `out`; queued on torch's current stream.

        Args:
            pool: records and bank.
            slot_of: int32 [E], of admitted records, -1 where an expert has none here.
            bank_slot_of: int32 [E], of the experts' codes; an expert with -1 in either is left out.
            x, out: bfloat16 [M, H], not the same memory; at multiples of 16 bytes.
            top_k_index: int32 [M, k], distinct in a row.
            top_k_weights: float32 [M, k].
            raw: experts of the layer whose records are `raw`, and -1 in `slot_of`: a second launch computes them, so
                leave it out for layers that have none.
            pairs, resume: as in `FusedExperts.run`.

        Raises:
            ShapeError: tensors that do not fit, resume without pairs, or a GPU with too little shared memory.
        """
        shape = self.layout.shape
        for name, table in (("slot_of", slot_of), ("bank_slot_of", bank_slot_of)):
            require_tensor(name, table, torch.int32, (shape.num_experts,))
        require_tokens(shape, x, top_k_index, top_k_weights, out, pairs)
        if pool.layout.form != self.layout.form or pool.layout.shape != shape:
            raise ShapeError(
                expected=f"a pool for {shape} in {self.layout.form}",
                found=f"one for {pool.layout.shape} in {pool.layout.form}",
                mend="make ResidualExperts for the layer's own layout",
            )
        if resume and pairs is None:
            raise ShapeError(expected="pairs to resume from", found="none", mend="pass the pairs of the earlier call")
        if raw is not None and pairs is None:
            pairs = self._own_pairs(top_k_index)
        tokens = (x, top_k_index, top_k_weights, out)
        more = (slot_of, pool.records, np.uint64(pool.records.stride(0)), pool.directory)
        self._variants[pool.short_scales].run(pool.bank, bank_slot_of, *tokens, pairs, resume, more)
        if raw is not None:
            self._raw.run(raw.pool, raw.slot_of, *tokens, pairs=pairs, resume=True)

    def _variants_for(self, short_scales: bool, smem_limit_bytes: int) -> Variants:
        """Compiled when first wanted."""
        return Variants(
            lambda tokens: residual_plan.plan(self.layout, tokens, self.config, smem_limit_bytes, short_scales),
            self.layout.shape.moe_intermediate_size,
        )

    def _own_pairs(self, top_k_index: Tensor) -> Tensor:
        """Room for what each pair contributes, float32 [M, k, H]; grows, and is kept."""
        size = top_k_index.numel() * self.layout.shape.hidden_size
        if self._pairs.numel() < size:
            self._pairs = self._pairs.new_empty(size)
        return self._pairs[:size].view(*top_k_index.shape, -1)
