"""The fused expert layer for a few tokens: one launch of `moe_codes.cu`, `moe_bf16.cu` or `moe_small.cu`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from runtime.errors import ShapeError
from runtime.kernels import bf16_plan, codes_plan, fused_plan
from runtime.kernels.arguments import Argument, require_aligned
from runtime.kernels.compile import load
from runtime.kernels.device import Gpu, current_gpu
from runtime.kernels.fused_config import FusedConfig
from runtime.kernels.fused_plan import COLUMNS, MAX_TOKENS, FusedPlan
from runtime.kernels.launch import Kernel
from runtime.kernels.layout import SlotLayout
from runtime.kernels.shape import ExpertShape

__all__ = ["FusedConfig", "FusedExperts", "FusedPlan", "Variants", "plan", "require_tensor", "require_tokens"]


def plan(layout: SlotLayout, max_tokens: int, config: FusedConfig, gpu: Gpu, beside: bool = False) -> FusedPlan:
    """The kernel for a layer on a GPU, with its constants.

    From compute capability 9.0 up warps with roles compute, where the layer fits and the configuration does not fix
    `block_dim`: INT4 and INT8 by `codes_plan`, whatever the number of tokens, and BF16 of up to 8 tokens by
    `bf16_plan`. All else is computed by warps that are alike (`fused_plan`), BF16 with
    the same bits.

    Args:
        layout: of the pool's slots.
        max_tokens: wanted of one launch, 1 to 16; the plan may have fewer.
        config: what the caller fixes.
        gpu: where it will run.
        beside: leave room for the next kernel, where the kernel can.

    Raises:
        ShapeError: no variant of this configuration fits into the GPU's shared memory.
    """
    limit_bytes = gpu.smem_per_block_bytes
    if config.block_dim == 0 and gpu.capability >= codes_plan.CAPABILITY:
        if codes_plan.fits(layout, limit_bytes):
            return codes_plan.plan(layout, max_tokens, config.experts_per_block, limit_bytes, beside)
        if bf16_plan.fits(layout, max_tokens, config, limit_bytes):
            return bf16_plan.plan(layout, max_tokens, config, limit_bytes)
    return fused_plan.plan(layout, max_tokens, config, limit_bytes)


class FusedExperts:
    """The routed experts of layers of one geometry, best for at most a few tens of tokens.

    More than 16 tokens are cut into launches of up to 16. The output of a token has the same bits in any batch, and
    whatever else runs on the GPU: a launch waits for nothing but blocks of its own that run already. One instance
    serves one stream, as its scratch memory is used by one call at a time; instances may overlap.

    The first call of up to 8 tokens, and the first of more, compile and allocate; every later one only queues
    launches, and may be captured in a CUDA graph.

    Args:
        layout: of the pools' slots.
        config: the shape of the kernel. With `experts_per_block` above 1 pools of codes must be interleaved.
        beside: leave room on the GPU for the kernel that is queued next, which may begin at once
            (`RowOps.swiglu`); a little slower alone.

    Raises:
        KernelError: no GPU that will do.
    """

    def __init__(self, layout: SlotLayout, config: FusedConfig | None = None, beside: bool = False) -> None:
        self.layout, self.config = layout, config or FusedConfig()
        self._gpu = current_gpu()
        self._group = max(1, self.config.experts_per_block) if layout.form.is_coded else 1
        self._variants = Variants(
            lambda tokens: plan(layout, tokens, self.config, self._gpu, beside), layout.shape.moe_intermediate_size
        )

    def run(
        self,
        pool: Tensor,
        slot_of: Tensor,
        x: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        out: Tensor,
        *,
        pairs: Tensor | None = None,
        resume: bool = False,
    ) -> None:
        """Compute the layer into `out`; queued on torch's current stream.

        Args:
            pool: uint8 [S, slot_bytes], at a multiple of 16 bytes.
            slot_of: int32 [E], -1 where an expert is not here: its pairs are left out.
            x, out: bfloat16 [M, H], not the same memory; at multiples of 16 bytes.
            top_k_index: int32 [M, k], distinct in a row.
            top_k_weights: float32 [M, k].
            pairs: float32 [M, k, H], at a multiple of 16 bytes: what each pair contributed is kept here, for a layer
                computed in several calls.
            resume: pairs that are not here count with what `pairs` holds.

        Raises:
            ShapeError: tensors that do not fit, resume without pairs, or a GPU with too little shared memory.
        """
        self._check(pool, slot_of, x, top_k_index, top_k_weights, out, pairs)
        if resume and pairs is None:
            raise ShapeError(expected="pairs to resume from", found="none", mend="pass the pairs of the earlier call")
        self._variants.run(pool, slot_of, x, top_k_index, top_k_weights, out, pairs, resume)

    def _check(
        self,
        pool: Tensor,
        slot_of: Tensor,
        x: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        out: Tensor,
        pairs: Tensor | None,
    ) -> None:
        slots = len(pool)
        require_tensor("pool", pool, torch.uint8, (slots, self.layout.slot_bytes))
        require_tensor("slot_of", slot_of, torch.int32, (self.layout.shape.num_experts,))
        require_tokens(self.layout.shape, x, top_k_index, top_k_weights, out, pairs)
        require_aligned(pool=pool)
        if slots % self._group:
            raise ShapeError(
                expected=f"a pool of whole groups of {self._group} interleaved slots",
                found=f"{slots} slots",
                mend="fill the last group up, or set experts_per_block to 0 in fused_kernel",
            )


def require_tokens(
    shape: ExpertShape, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, out: Tensor, pairs: Tensor | None
) -> None:
    """Refuse tokens, routing or outputs that are not as `FusedExperts.run` says.

    Raises:
        ShapeError: naming the first one.
    """
    rows, choice = (len(x), shape.hidden_size), (len(x), shape.top_k)
    require_tensor("x", x, torch.bfloat16, rows)
    require_tensor("top_k_index", top_k_index, torch.int32, choice)
    require_tensor("top_k_weights", top_k_weights, torch.float32, choice)
    require_tensor("out", out, torch.bfloat16, rows)
    if pairs is not None:
        require_tensor("pairs", pairs, torch.float32, (*choice, shape.hidden_size))
    require_aligned(x=x, out=out, pairs=pairs)


def require_tensor(name: str, tensor: Tensor, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    """Refuse a tensor of another type or sizes, or with gaps.

    Raises:
        ShapeError: naming it.
    """
    if tensor.dtype != dtype or tensor.shape != sizes or not tensor.is_contiguous():
        found = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        raise ShapeError(
            expected=f"{name} as contiguous {str(dtype).removeprefix('torch.')} {list(sizes)}",
            found=found if tensor.is_contiguous() else f"{found} with strides {list(tensor.stride())}",
            mend="pass tensors made for this layer",
        )


class Variants:
    """The kernel for up to 8 tokens and the one for up to 16, compiled when first wanted.

    Args:
        plan: of at most so many tokens.
        inner: the layer's moe_intermediate_size.

    Attributes:
        made: by the most tokens wanted of a launch.
    """

    def __init__(self, plan: Callable[[int], FusedPlan], inner: int) -> None:
        self._plan, self._inner = plan, inner
        self.made: dict[int, _Variant] = {}

    def run(
        self,
        pool: Tensor,
        slot_of: Tensor,
        x: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        out: Tensor,
        pairs: Tensor | None,
        resume: bool,
        more: tuple[Argument, ...] = (),
    ) -> None:
        """Launches over all tokens; `more` are what the kernel takes beside the arguments of `moe_small.cu`."""
        most = COLUMNS if len(x) <= COLUMNS else MAX_TOKENS
        if most not in self.made:
            self.made[most] = _Variant(self._plan(most), self._inner)
        variant = self.made[most]
        step = variant.plan.max_tokens
        for first in range(0, len(x), step):
            part = slice(first, first + step)
            some = None if pairs is None else pairs[part]
            tokens = (x[part], top_k_index[part], top_k_weights[part])
            variant.launch(*tokens, slot_of, pool, out[part], some, resume, more)


class _Variant:
    """A compiled plan with the scratch that its calls share, on the current GPU."""

    def __init__(self, chosen: FusedPlan, inner: int) -> None:
        self.plan = chosen
        name = chosen.source.name.removesuffix(".cu")
        self._kernel = Kernel(load(chosen.source), name, chosen.threads, chosen.smem_bytes)
        device = torch.device("cuda", self._kernel.gpu.index)
        self._state = torch.zeros(2, dtype=torch.int32, device=device)
        self._h = torch.full((2, chosen.max_pairs, inner), -1, dtype=torch.int16, device=device)  # 0xffff: not written
        self._grid = self._kernel.gpu.num_sms

    def launch(
        self,
        x: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        slot_of: Tensor,
        pool: Tensor,
        out: Tensor,
        pairs: Tensor | None,
        resume: bool,
        more: tuple[Argument, ...],
    ) -> None:
        tokens = len(x)
        tensors = (x, top_k_index, top_k_weights, slot_of, pool, self._state, self._h, out, pairs)
        first_claim = self.plan.first_claim(tokens, self._grid)
        self._kernel.launch(self._grid, (*tensors, tokens, int(resume), first_claim, *more), programmatic=True)
