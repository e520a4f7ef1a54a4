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
    """Layers of one geometry computed with `torch._grouped_mm`; gate, up and p pass through BF16 between the kernels.

    BF16 slots are used where they lie, and pairs are sorted by slot. INT4 and INT8 experts that have tokens are first
    expanded to BF16 slots of this object, one an expert, and pairs are sorted by expert. A call may be captured in a
    CUDA graph from compute capability 9.0 up; below, torch's fallback waits for the device. One instance serves one
    stream: its memory is used by one call at a time.

    Args:
        layout: of the pools' slots.
        max_tokens: of any call; memory for its rows is allocated here.
        num_slots: of each pool; without meaning for codes.
        device: where the pools are.

    Raises:
        ShapeError: more slots, or for codes more experts, than the library takes groups.
    """

    def __init__(self, layout: SlotLayout, max_tokens: int, num_slots: int, device: torch.device | str) -> None:
        self.layout, self.num_slots = layout, num_slots
        shape, coded = layout.shape, layout.form.is_coded
        groups = shape.num_experts if coded else num_slots
        if groups > MAX_GROUPS:
            raise ShapeError(
                expected=f"at most {MAX_GROUPS} {'experts' if coded else 'slots in a pool'}",
                found=f"{groups}",
                mend="give each layer a pool of its own, or use the gemm backend",
            )
        self._plain = plain_layout(layout)
        self.scratch = self._plain.new_pool(groups, device) if coded else None
        self.route = Route(shape.num_experts, shape.top_k, max_tokens, device, None if coded else groups)
        rows = self.route.capacity
        self._xs = torch.zeros(rows, shape.hidden_size, dtype=torch.bfloat16, device=device)
        self._h = torch.zeros(rows, shape.moe_intermediate_size, dtype=torch.bfloat16, device=device)

    def run(
        self,
        pool: Tensor,
        slot_of: Tensor,
        x: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        out: Tensor,
        *,
        num_tokens: Tensor | None = None,
        pairs: Tensor | None = None,
        resume: bool = False,
    ) -> None:
        """Compute the layer into `out`, on torch's current stream.

        Args:
            pool: uint8 [num_slots, slot_bytes], its rows at multiples of 16 bytes.
            slot_of: int32 [E], -1 where an expert is not here: its pairs are left out.
            x, out: bfloat16 [M, H].
            top_k_index: int32 [M, k], distinct in a row.
            top_k_weights: float32 [M, k].
            num_tokens: int32 [1] on the device, when only that many of the M tokens count; other rows are left alone.
            pairs: float32 [M, k, H]: what each pair contributed is kept here, for a layer computed in several calls.
            resume: pairs that are not here count with what `pairs` holds.

        Raises:
            ShapeError: a pool of another number of slots, tensors that do not fit, or resume without pairs.
        """
        route, shape = self.route, self.layout.shape
        slots = self._plain_slots(pool)
        route.build(top_k_index, slot_of, num_tokens)
        if self.scratch is not None:
            dequantize_experts(self.layout, pool, slot_of, route.active, route.num_active, self.scratch)
        gate_up_weight, down_weight, _ = self._plain.views_bf16(slots)
        gate_up_bias, down_bias = self._biases(pool, slot_of, top_k_index)
        rows = len(x) * shape.top_k
        xs, h = self._xs[:rows], self._h[:rows]
        gather_rows(x, route, xs, num_tokens)
        gate_up = torch._grouped_mm(xs, gate_up_weight.transpose(-2, -1), offs=route.ends)
        activate_rows(gate_up, route, shape.activation, gate_up_bias, h)
        p = torch._grouped_mm(h, down_weight.transpose(-2, -1), offs=route.ends)
        combine_rows(p, route, top_k_weights, down_bias, out, num_tokens, pairs=pairs, resume=resume)

    def _plain_slots(self, pool: Tensor) -> Tensor:
        if self.scratch is not None:
            return self.scratch
        if len(pool) != self.num_slots:
            raise ShapeError(
                expected=f"a pool of {self.num_slots} slots",
                found=f"{len(pool)}",
                mend="make GroupedExperts for pools of this size",
            )
        return pool

    def _biases(self, pool: Tensor, slot_of: Tensor, top_k_index: Tensor) -> tuple[BiasPlace | None, BiasPlace | None]:
        gate_up, down = self.layout.gate_up_bias, self.layout.down_bias
        if gate_up is None or down is None:
            return None, None
        return BiasPlace(pool, gate_up, slot_of, top_k_index), BiasPlace(pool, down, slot_of, top_k_index)
