"""Launches of cuda/dequant.cu: coded experts expanded to plain BF16 slots."""

from __future__ import annotations

from functools import cache

import numpy as np
from torch import Tensor

from runtime.kernels.compile import Source, load
from runtime.kernels.device import current_gpu
from runtime.kernels.launch import Kernel
from runtime.kernels.layout import SlotLayout
from runtime.kernels.shape import WeightForm

_THREADS = 256
_BLOCKS_PER_SM = 64  # many short ones, as SMs do not keep step: 383 us at 16, 360 at 64 for 60 experts of 2048 x 1408


def source(form: WeightForm) -> Source:
    """cuda/dequant.cu for one form of codes."""
    return Source("dequant.cu", (("BITS", form.bits), ("SCALE_SETS", form.scale_sets)))


def plain_layout(layout: SlotLayout) -> SlotLayout:
    """Slots of the same experts in BF16."""
    return SlotLayout(layout.shape, WeightForm("bf16"))


def dequantize_experts(
    layout: SlotLayout, pool: Tensor, slot_of: Tensor, active: Tensor, num_active: Tensor, out: Tensor
) -> None:
    """Write (code - zero) * scale, rounded once to BF16, of the active experts.

    Args:
        layout: of the pool, int4 or int8.
        pool: uint8 [S, slot_bytes].
        slot_of: int32 [E]; active experts have a slot.
        active: int32 [>= num_active], experts, such as `Route.active`.
        num_active: int32 [1].
        out: uint8 [E, bytes of a plain slot], expert e to row e; or [bytes of a plain slot], where one expert at most
            is active. Biases are not copied.
    """
    plain = plain_layout(layout)
    gpu = current_gpu()
    sizes = (layout.shape.moe_intermediate_size, layout.shape.hidden_size)
    stride_bytes = out.stride(0) if out.dim() == 2 else 0
    where = (out, np.int64(stride_bytes), np.int64(plain.down.offset_bytes))
    coded = (pool, np.int64(pool.stride(0)), np.int64(layout.down.offset_bytes))
    _kernel(gpu.index, layout.form).launch(
        gpu.num_sms * _BLOCKS_PER_SM, (*coded, active, num_active, slot_of, *sizes, *where)
    )


@cache
def _kernel(gpu_index: int, form: WeightForm) -> Kernel:
    """The kernel on the current GPU; `gpu_index` only keeps those of different GPUs apart."""
    return Kernel(load(source(form)), "dequantize", _THREADS)
