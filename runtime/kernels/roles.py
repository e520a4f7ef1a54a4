"""The fused expert layer for a few tokens, with warps that have roles: one launch of `moe_codes.cu`."""

from __future__ import annotations

from runtime.errors import KernelError
from runtime.kernels.fused import FusedExperts, FusedPlan
from runtime.kernels.layout import SlotLayout
from runtime.kernels.roles_plan import CAPABILITY, plan


class RolesExperts(FusedExperts):
    """As `FusedExperts`, for INT4 and INT8 experts that lie contiguous in their slots.

    Compute warps do nothing but compute: one warp claims and copies, others apply the activation. The order of sums
    differs from that of `FusedExperts`, and with it bits; within this class a token has the same bits in any batch.

    Args:
        layout: of the pools' slots.

    Raises:
        KernelError: no GPU of compute capability 9.0 or newer.
    """

    def __init__(self, layout: SlotLayout) -> None:
        super().__init__(layout)
        if self._gpu.capability < CAPABILITY:
            raise KernelError(
                expected="a GPU of compute capability 9.0 or newer for the kernel with roles",
                found=f"{self._gpu.name} of {self._gpu.capability[0]}.{self._gpu.capability[1]}",
                mend="use the backend fused",
            )

    def _plan(self, max_tokens: int) -> FusedPlan:
        return plan(self.layout, max_tokens, self._gpu.smem_per_block_bytes)
