"""Other ways to compute the experts of a decoding pass, to see what the usual one is worth."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from runtime.gpu.parts import Toolkit
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

    Args:
        inner: computes raw or residual records.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def run(self, *arguments: Any, pairs: Tensor | None = None, **named: Any) -> None:
        """See `ExpertKernels.run` and `ResidualExperts.run`; prompts are computed as usual."""
        *slots, x, top_k_index, top_k_weights, out = arguments
        step = 1 if len(x) <= ROWS else len(x)
        for first in range(0, len(x), step):
            part = slice(first, first + step)
            rows = [tensor[part] for tensor in (x, top_k_index, top_k_weights, out)]
            self._inner.run(*slots, *rows, pairs=None if pairs is None else pairs[part], **named)


def with_kernels(toolkit: Toolkit, kernels: str | None) -> Toolkit:
    """A toolkit that computes the exact experts in another way, or as usual."""
    if kernels == TOKEN_ORDER:
        made, residual = toolkit.kernels, toolkit.residual
        return dataclasses.replace(
            toolkit,
            kernels=lambda *wanted, **more: TokenOrder(made(*wanted, **more)),
            residual=dataclasses.replace(residual, kernels=lambda layout: TokenOrder(residual.kernels(layout))),
        )
    if kernels == PRODUCTS:
        return dataclasses.replace(toolkit, kernels=_products)
    return toolkit


def can_multiply(capability: str) -> bool:
    """Whether a GPU, of a capability such as "9.0", has grouped products that few tokens may use.

    Rows of others' products depend on each other.
    """
    return capability == "{}.{}".format(*CAPABILITY)


def _products(layout: SlotLayout, num_slots: int, max_tokens: int, beside: bool = False) -> Backend:
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
