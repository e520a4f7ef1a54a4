"""What the benchmark knows of a way to compute a layer: enough to judge it, to time it and to set it beside others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moespeq_cli.bench.kernel_bound import Rounding
from runtime.kernels.dispatch import Backend
from runtime.kernels.shape import ExpertShape, WeightForm

MANY_TOKENS = 65536  # of one call, for backends without a limit that matters here
Call = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer as kernels see it: pool uint8 [num_slots, slot_bytes] and slot_of int32 [E], -1 for no slot."""

    pool: Tensor
    slot_of: Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens and their routing: x bfloat16 [M, H], top_k_index int32 [M, k], top_k_weights float32 [M, k]."""

    x: Tensor
    top_k_index: Tensor
    top_k_weights: Tensor

    def __len__(self) -> int:
        return len(self.x)

    def rows(self, order: Tensor | slice) -> Batch:
        """Some tokens of it, contiguous."""
        return Batch(*(tensor[order].contiguous() for tensor in (self.x, self.top_k_index, self.top_k_weights)))


class Prepared(Protocol):
    """A candidate for one shape and form, its buffers allocated."""

    def bind(self, layer: Layer, batch: Batch, out: Tensor) -> Call:
        """A call that computes `out` bfloat16 [M, H] on the current stream and can be captured in a graph.

        What a backend must know on the host is found out here, not in the call.
        """

    def bind_passes(self, first: Layer, second: Layer, batch: Batch, out: Tensor) -> Call | None:
        """As `bind`, in two passes over the experts that either layer has, or None where a backend has no such way."""


class Candidate(Protocol):
    """A way to compute a layer.

    Attributes:
        name: for tables; where it is one of `BACKENDS`, a profile can choose it.
        row_invariant: whether a row has the same bits in any batch of few tokens.
    """

    name: str
    row_invariant: bool

    def rounding(self, form: WeightForm) -> Rounding:
        """Where it rounds besides h and y."""

    def max_tokens(self, shape: ExpertShape, form: WeightForm) -> int:
        """The most tokens that it computes at once; 0 where it cannot compute such a layer at all."""

    def prepare(self, shape: ExpertShape, form: WeightForm, max_tokens: int) -> Prepared:
        """Compile, allocate."""


class PreparedExperts:
    """`Prepared` for a backend of the runtime.

    Args:
        experts: gives the backend's object for a pool.
    """

    def __init__(self, experts: Callable[[Tensor], Backend]) -> None:
        self._experts = experts

    def pool(self, pool: Tensor) -> Tensor:
        """The pool as the backend reads it."""
        return pool

    def bind(self, layer: Layer, batch: Batch, out: Tensor) -> Call:
        pool, experts = self.pool(layer.pool), self._experts(layer.pool)

        def call() -> None:
            experts.run(pool, layer.slot_of, batch.x, batch.top_k_index, batch.top_k_weights, out)

        return call

    def bind_passes(self, first: Layer, second: Layer, batch: Batch, out: Tensor) -> Call | None:
        pools, experts = (self.pool(first.pool), self.pool(second.pool)), self._experts(first.pool)
        pairs = torch.full((*batch.top_k_index.shape, out.shape[1]), torch.nan, device=out.device)

        def call() -> None:
            tokens = (batch.x, batch.top_k_index, batch.top_k_weights, out)
            experts.run(pools[0], first.slot_of, *tokens, pairs=pairs)
            experts.run(pools[1], second.slot_of, *tokens, pairs=pairs, resume=True)

        return call
