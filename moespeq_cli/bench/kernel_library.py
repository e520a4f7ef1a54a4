"""What a library offers, as candidates: a loop over the experts, and the grouped matrix product."""

from __future__ import annotations

import torch
from torch import Tensor

from moespeq_cli.bench.kernel_bound import Rounding
from moespeq_cli.bench.kernel_candidate import MANY_TOKENS, Batch, Call, Layer, Prepared, PreparedExperts
from runtime.kernels.grouped import MAX_GROUPS, GroupedExperts
from runtime.kernels.layout import SlotLayout
from runtime.kernels.loop import LoopExperts, tokens_by_expert
from runtime.kernels.shape import ExpertShape, WeightForm


class Loop:
    """One expert after the other by library calls; the tokens of each are known before, so that only kernels count."""

    name, row_invariant = "loop", False

    def rounding(self, form: WeightForm) -> Rounding:
        return Rounding(weights=form.is_coded, products=True, everything=True)

    def max_tokens(self, shape: ExpertShape, form: WeightForm) -> int:
        return MANY_TOKENS

    def prepare(self, shape: ExpertShape, form: WeightForm, max_tokens: int) -> Prepared:
        return _PreparedLoop(SlotLayout(shape, form))


class _PreparedLoop:
    def __init__(self, layout: SlotLayout) -> None:
        self._layout = layout
        self._made: dict[int, tuple[Layer, LoopExperts]] = {}

    def bind(self, layer: Layer, batch: Batch, out: Tensor) -> Call:
        if id(layer) not in self._made:
            self._made[id(layer)] = layer, LoopExperts(self._layout, layer.pool, layer.slot_of.tolist())
        loop = self._made[id(layer)][1]
        experts = tokens_by_expert(batch.top_k_index)

        def call() -> None:
            out.copy_(loop.run(batch.x, batch.top_k_weights, experts))

        return call

    def bind_passes(self, first: Layer, second: Layer, batch: Batch, out: Tensor) -> Call | None:
        return None


class Grouped:
    """`torch._grouped_mm` over all experts, coded weights expanded to BF16 in every call."""

    name, row_invariant = "grouped", False

    def rounding(self, form: WeightForm) -> Rounding:
        return Rounding(weights=form.is_coded, products=True)

    def max_tokens(self, shape: ExpertShape, form: WeightForm) -> int:
        capable = torch.cuda.get_device_capability() >= (9, 0)  # else the library waits for the device in every call
        return MANY_TOKENS if capable and shape.num_experts + 2 <= MAX_GROUPS else 0

    def prepare(self, shape: ExpertShape, form: WeightForm, max_tokens: int) -> Prepared:
        layout = SlotLayout(shape, form)
        made: dict[int, GroupedExperts] = {}

        def experts(pool: Tensor) -> GroupedExperts:
            slots = 0 if form.is_coded else len(pool)
            if slots not in made:
                made[slots] = GroupedExperts(layout, max_tokens, slots, pool.device)
            return made[slots]

        return PreparedExperts(experts)
