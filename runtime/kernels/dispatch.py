"""The expert layer by whichever kernel is fastest for the number of tokens at hand."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from runtime.errors import ShapeError
from runtime.kernels.device import current_gpu
from runtime.kernels.fused import FusedConfig, FusedExperts
from runtime.kernels.gemm import CAPABILITY, GemmExperts
from runtime.kernels.grouped import MAX_GROUPS, GroupedExperts
from runtime.kernels.layout import SlotLayout
from runtime.kernels.tuning import INVARIANT_TOKENS, DispatchTable

FUSED, GEMM, GROUPED = "fused", "gemm", "grouped"
ROW_INVARIANT = (FUSED, GEMM)


class Backend(Protocol):
    """What the backends have in common; see `ExpertKernels.run`."""

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
    ) -> None: ...


class ExpertKernels:
    """The routed experts of layers of one geometry, for any number of tokens.

    Backends are made when they are first used: those for many tokens take memory in proportion to `max_tokens`, and
    for codes a BF16 slot for each expert. A first call of a number of tokens may compile and allocate; later ones only
    queue launches and may be captured in a CUDA graph, with `grouped` from compute capability 9.0 up. One instance
    serves one stream, as its memory is used by one call at a time.

    Args:
        layout: of the pools' slots.
        num_slots: of every pool.
        max_tokens: of any call.
        table: measured on this GPU, as a profile's `kernel_dispatch` holds it.
        config: the shape of the fused kernel, as a profile's `fused_kernel` holds it.
        beside: leave room for the kernel that is queued next; see `FusedExperts`.

    Raises:
        KernelError: no GPU that will do.
    """

    def __init__(
        self,
        layout: SlotLayout,
        num_slots: int,
        max_tokens: int,
        table: DispatchTable | None = None,
        config: FusedConfig | None = None,
        beside: bool = False,
    ) -> None:
        self.layout, self.num_slots, self.max_tokens = layout, num_slots, max_tokens
        self._gpu = current_gpu()
        self._config, self._beside = config or FusedConfig(), beside
        self._able = [name for name in (FUSED, GEMM, GROUPED) if self._can(name)]
        self._entry = None if table is None else table.find(layout.shape, layout.form)
        self._made: dict[str, Backend] = {}

    def backend(self, num_tokens: int) -> str:
        """What computes this many tokens: `fused`, `gemm` or `grouped`.

        The measured one, where the table has this layer. Else `fused` up to 16 tokens, and above them `gemm` on compute
        capability 9.0 and `grouped` on others. Up to 16 tokens it is one backend for all numbers, in which a row has
        the same bits in any batch.

        A measured one is passed over where it cannot run (`gemm` on other GPUs, more experts or slots than `grouped`
        takes, pools interleaved for `fused`), where it is `loop`, which waits for the host and cannot compute a layer
        in several calls, and up to 16 tokens where its rows depend on the batch.
        """
        few = num_tokens <= INVARIANT_TOKENS
        names = [FUSED] if few else [GEMM, GROUPED, FUSED]
        if self._entry is not None:
            names.insert(0, self._entry.backend(num_tokens))
        return next(name for name in names if name in self._able and (name in ROW_INVARIANT or not few))

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
            pool: uint8 [num_slots, slot_bytes]; interleaved where the config's `experts_per_block` says so.
            slot_of: int32 [E], -1 where an expert is not here: its pairs are left out.
            x, out: bfloat16 [M, H], M from 0 to max_tokens.
            top_k_index: int32 [M, k], distinct in a row.
            top_k_weights: float32 [M, k].
            pairs: float32 [M, k, H]: what each pair contributed is kept here, for a layer computed in several calls.
            resume: pairs that are not here count with what `pairs` holds.

        Raises:
            ShapeError: tensors that do not fit, more than max_tokens, or resume without pairs.
        """
        tokens = len(x)
        if tokens > self.max_tokens:
            raise ShapeError(
                expected=f"at most {self.max_tokens} tokens",
                found=f"{tokens}",
                mend="make ExpertKernels for as many tokens as a call may have, or split the call",
            )
        if resume and pairs is None:
            raise ShapeError(expected="pairs to resume from", found="none", mend="pass the pairs of the earlier call")
        if tokens:
            experts = self._experts(self.backend(tokens))
            experts.run(pool, slot_of, x, top_k_index, top_k_weights, out, pairs=pairs, resume=resume)

    def _can(self, name: str) -> bool:
        """Whether a backend computes such a layer on this GPU."""
        coded = self.layout.form.is_coded
        contiguous = not coded or self._config.experts_per_block <= 1
        if name == GEMM:
            return contiguous and self._gpu.capability == CAPABILITY
        if name == GROUPED:
            return contiguous and (self.layout.shape.num_experts if coded else self.num_slots) <= MAX_GROUPS
        return name == FUSED

    def _experts(self, name: str) -> Backend:
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def _make(self, name: str) -> Backend:
        device = torch.device("cuda", self._gpu.index)
        if name == FUSED:
            return FusedExperts(self.layout, self._config, self._beside)
        if name == GEMM:
            return GemmExperts(self.layout, self.max_tokens, device)
        return GroupedExperts(self.layout, self.max_tokens, self.num_slots, device)
