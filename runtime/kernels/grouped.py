"""The layer by the library's grouped matrix product: sorted rows, two products over all experts, and a sum."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.errors import ShapeError
from runtime.kernels.combine import BiasPlace, activate_rows, combine_rows, gather_rows
from runtime.kernels.dequant import dequantize_experts, plain_layout
from runtime.kernels.layout import SlotLayout
from runtime.kernels.route import Route

MAX_GROUPS = 1023  # of torch's grouped matrix product


class GroupedExperts:
    """A layer computed with `torch._grouped_mm` in BF16; gate, up and p pass through BF16 between the kernels.

    BF16 slots are used where they lie, and pairs are sorted by slot. INT4 and INT8 experts that have tokens are first
    expanded to BF16 slots of this object, one an expert, and pairs are sorted by expert. A call may be captured in a
    CUDA graph from compute capability 9.0 up; below, torch's fallback waits for the device.

    Args:
        layout: of the pool.
        pool: uint8 [S, slot_bytes], its rows at multiples of 16 bytes.
        max_tokens: of any call; memory for its rows is allocated here.
        scratch: plain slots uint8 [E, plain slot_bytes] to use for expanding, shared by layers of one shape.

    Raises:
        ShapeError: more slots, or for codes more experts, than the library takes groups.
    """

    def __init__(self, layout: SlotLayout, pool: Tensor, max_tokens: int, scratch: Tensor | None = None) -> None:
        self.layout, self.pool = layout, pool
        shape, coded = layout.shape, layout.form.is_coded
        groups = shape.num_experts if coded else len(pool)
        if groups > MAX_GROUPS:
            raise ShapeError(
                expected=f"at most {MAX_GROUPS} {'experts' if coded else 'slots in the pool'}",
                found=f"{groups}",
                mend="give each layer a pool of its own, or use the gemm backend",
            )
        self._plain = plain_layout(layout)
        self.scratch = None
        if coded:
            self.scratch = self._plain.new_pool(groups, pool.device) if scratch is None else scratch
        slots = pool if self.scratch is None else self.scratch
        self._gate_up, self._down, _ = self._plain.views_bf16(slots)
        self.route = Route(shape.num_experts, shape.top_k, max_tokens, pool.device, None if coded else groups)
        rows = self.route.capacity
        self._xs = torch.zeros(rows, shape.hidden_size, dtype=torch.bfloat16, device=pool.device)
        self._h = torch.zeros(rows, shape.moe_intermediate_size, dtype=torch.bfloat16, device=pool.device)

    def run(
        self,
        x: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        slot_of: Tensor,
        out: Tensor | None = None,
        num_tokens: Tensor | None = None,
    ) -> Tensor:
        """y BF16 [M, H], `out` if given.

        Args:
            x: BF16 [M, H].
            top_k_index: int32 [M, k].
            top_k_weights: float32 [M, k].
            slot_of: int32 [E], -1 for experts that are not here and add nothing.
            out: BF16 [M, H] to write to.
            num_tokens: int32 [1] on the device, when only that many of the M tokens count.
        """
        out = torch.empty_like(x) if out is None else out
        route, shape = self.route, self.layout.shape
        rows = len(x) * shape.top_k
        route.build(top_k_index, slot_of, num_tokens)
        if self.scratch is not None:
            dequantize_experts(self.layout, self.pool, slot_of, route.active, route.num_active, self.scratch)
        xs, h = self._xs[:rows], self._h[:rows]
        gather_rows(x, route, xs, num_tokens)
        gate_up = torch._grouped_mm(xs, self._gate_up.transpose(-2, -1), offs=route.ends)
        gate_up_bias, down_bias = self._biases(slot_of, top_k_index)
        activate_rows(gate_up, route, shape.activation, gate_up_bias, h)
        p = torch._grouped_mm(h, self._down.transpose(-2, -1), offs=route.ends)
        combine_rows(p, route, top_k_weights, down_bias, out, num_tokens)
        return out

    def _biases(self, slot_of: Tensor, top_k_index: Tensor) -> tuple[BiasPlace | None, BiasPlace | None]:
        gate_up, down = self.layout.gate_up_bias, self.layout.down_bias
        if gate_up is None or down is None:
            return None, None
        place = (slot_of, top_k_index)
        return BiasPlace(self.pool, gate_up, *place), BiasPlace(self.pool, down, *place)
