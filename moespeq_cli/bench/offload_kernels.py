"""Other ways to compute the experts of a decoding pass, to see what the usual one is worth."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from runtime.gpu.engine import Toolkit
from runtime.gpu.target import ROWS
from runtime.kernels.dispatch import GEMM, Backend, ExpertKernels
from runtime.kernels.gemm import CAPABILITY
from runtime.kernels.layout import SlotLayout
from runtime.kernels.tuning import DispatchEntry, DispatchTable, TokenRange

TOKEN_ORDER = "token order"
PRODUCTS = "grouped products"


class TokenOrder:
    """Rows of a pass one after the other, each with its experts: they are read once a row, not once a pass.

    The bits are the usual ones, as a row has the same bits in any batch.
    """

    def __init__(self, inner: Backend) -> None:
        self._inner = inner

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
        """See `ExpertKernels.run`; prompts are computed as usual."""
        step = 1 if len(x) <= ROWS else len(x)
        for first in range(0, len(x), step):
            part = slice(first, first + step)
            self._inner.run(
                pool,
                slot_of,
                x[part],
                top_k_index[part],
                top_k_weights[part],
                out[part],
                pairs=None if pairs is None else pairs[part],
                resume=resume,
            )


def with_kernels(toolkit: Toolkit, kernels: str | None) -> Toolkit:
    """A toolkit that computes the exact experts in another way, or as usual."""
    if kernels == TOKEN_ORDER:
        return dataclasses.replace(toolkit, kernels=lambda *wanted: TokenOrder(toolkit.kernels(*wanted)))
    if kernels == PRODUCTS:
        return dataclasses.replace(toolkit, kernels=_products)
    return toolkit


def can_multiply(capability: str) -> bool:
    """Whether a GPU, of a capability such as "9.0", has grouped products that few tokens may use.

    Rows of others' products depend on each other.
    """
    return capability == "{}.{}".format(*CAPABILITY)


def _products(layout: SlotLayout, num_slots: int, max_tokens: int) -> Backend:
    shape = layout.shape
    always = DispatchEntry(
        hidden_size=shape.hidden_size,
        moe_intermediate_size=shape.moe_intermediate_size,
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        form=layout.form.kind,
        ranges=(TokenRange(None, GEMM),),
    )
    return ExpertKernels(layout, num_slots, max_tokens, DispatchTable((always,)))
