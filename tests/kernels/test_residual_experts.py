"""Few tokens from residual records on the GPU: the bits of BF16, however the experts are spread."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moespeq_cli.bench.kernel_candidate import Batch
from moespeq_cli.bench.kernel_check import random_batch
from moespeq_cli.bench.kernel_residual import ExactExperts, resident
from runtime.errors import ShapeError
from runtime.kernels.dequant import plain_layout
from runtime.kernels.fused import FusedExperts
from runtime.kernels.residual import ResidualPool
from runtime.kernels.residual_experts import RawSlots, ResidualExperts
from runtime.kernels.shape import Activation, ExpertShape, WeightForm
from tests.kernels.layers import FEW, generator
from tests.kernels.residual_cases import with_exceptions, with_scales_of_any_size

pytestmark = pytest.mark.gpu
CASES = {
    "narrow": (ExpertShape(6, 3, 288, 192), WeightForm("int4", 32), 1e-3),
    "one-unit": (ExpertShape(3, 2, 8, 8), WeightForm("int4", -1), 0.1),
    "odd": (ExpertShape(9, 2, 1032, 520, Activation.gelu), WeightForm("int4", -1), 1e-4),
    "bias": (ExpertShape(5, 2, 96, 1160, Activation.clamped, True), WeightForm("int4", -1), 1e-4),
    "many": (ExpertShape(257, 6, 256, 128, Activation.gelu_tanh, True), WeightForm("int4", 64), 1e-4),
    "wide": (ExpertShape(4, 2, 4096, 2304), WeightForm("int4", 128), 1e-6),
    "qwen": (ExpertShape(60, 4, 2048, 1408), WeightForm("int4", 128), 0.0),
}
DISTINCT = 3  # experts that differ, where encoding more takes long


class Both:
    """A layer as residual records and in BF16."""

    def __init__(self, name: str, short_scales: bool = False) -> None:
        self.shape, form, share = CASES[name]
        count = self.shape.num_experts
        experts = ExactExperts.random(self.shape, form, min(count, DISTINCT), seed=2, short_scales=short_scales)
        experts = with_scales_of_any_size(experts, seed=3) if short_scales else experts
        experts = with_exceptions(experts, share, seed=4) if share else experts
        self.slot_of = torch.randperm(count, generator=torch.Generator().manual_seed(1)).int().cuda()
        self.pool, _ = resident(experts, self.slot_of)
        assert self.pool.short_scales == short_scales
        exact = experts.exact().cuda()
        self.exact = exact[torch.arange(count, device="cuda") % len(exact)]
        self.own = torch.arange(count, dtype=torch.int32, device="cuda")
        self.ours = ResidualExperts(experts.layout)
        self.theirs = FusedExperts(plain_layout(experts.layout))

    def run(
        self, batch: Batch, slot_of: Tensor | None = None, bank_slot_of: Tensor | None = None, **more: Any
    ) -> Tensor:
        out = torch.full_like(batch.x, torch.nan)
        tables = (self.slot_of if slot_of is None else slot_of, self.own if bank_slot_of is None else bank_slot_of)
        self.ours.run(self.pool, *tables, batch.x, batch.top_k_index, batch.top_k_weights, out, **more)
        return out

    def right(self, batch: Batch) -> Tensor:
        out = torch.full_like(batch.x, torch.nan)
        self.theirs.run(self.exact, self.own, batch.x, batch.top_k_index, batch.top_k_weights, out)
        return out


@pytest.fixture(params=[(name, short) for name in CASES for short in (False, True)], scope="module", ids=str)
def both(request: pytest.FixtureRequest, gpu: Any) -> Both:
    return Both(*request.param)


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


@pytest.mark.parametrize("tokens", FEW)
def test_has_the_bits_of_bf16(both: Both, tokens: int) -> None:
    batch = random_batch(both.shape, tokens, generator(tokens))
    one_hot = torch.zeros_like(batch.x)
    one_hot[torch.arange(tokens), torch.arange(tokens) * 5 % both.shape.hidden_size] = 4.0
    for x in (batch.x, one_hot, (batch.x * 4).round()):
        kind = Batch(x, batch.top_k_index, batch.top_k_weights)
        right = both.right(kind)
        assert right.isfinite().all()
        assert same(both.run(kind), right)
    together = random_batch(both.shape, tokens, generator(tokens), same=True)
    assert same(both.run(together), both.right(together))


def test_passes_and_raw_experts_end_with_the_bits_of_one_call(both: Both) -> None:
    batch = random_batch(both.shape, 7, generator(3))
    right = both.right(batch)
    here = both.own % 2 == 0
    some, others = torch.where(here, both.slot_of, -1).int(), torch.where(here, -1, both.slot_of).int()
    raw = RawSlots(both.exact, torch.where(here, -1, both.own).int())
    assert same(both.run(batch, some, raw=raw), right)
    pairs = torch.full((*batch.top_k_index.shape, both.shape.hidden_size), torch.nan, device="cuda")
    both.run(batch, some, pairs=pairs)
    assert same(both.run(batch, others, pairs=pairs, resume=True), right)
    both.run(batch, bank_slot_of=torch.where(here, both.own, -1).int(), pairs=pairs)
    assert same(both.run(batch, others, pairs=pairs, resume=True), right)


def test_a_graph_has_the_same_bits_every_time(both: Both) -> None:
    batch = random_batch(both.shape, 6, generator(4))
    right = both.right(batch)
    out = torch.empty_like(batch.x)

    def call() -> None:
        tokens = (batch.x, batch.top_k_index, batch.top_k_weights, out)
        both.ours.run(both.pool, both.slot_of, both.own, *tokens)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(5):
            call()
    for _ in range(20):
        out.fill_(torch.nan)
        graph.replay()
        assert same(out, right)


def test_records_with_faults_end(both: Both) -> None:
    """What they compute means nothing, but nothing hangs and nothing else is touched."""
    records = both.pool.records.clone()
    records[:, :64] = 255
    pool = ResidualPool.of(both.pool.layout, records, both.pool.bank)
    faults = torch.zeros(len(records), dtype=torch.int32, device="cuda")
    lengths = torch.full((len(records),), records.shape[1], device="cuda")
    pool.admit(both.slot_of, both.own, lengths, faults)
    assert bool((faults > 0).all())
    batch = random_batch(both.shape, 6, generator(5))
    out = torch.empty_like(batch.x)
    both.ours.run(pool, both.slot_of, both.own, batch.x, batch.top_k_index, batch.top_k_weights, out)
    torch.cuda.synchronize()
    assert same(both.run(batch), both.right(batch))


def test_a_pool_of_another_layer_is_refused(both: Both) -> None:
    batch = random_batch(both.shape, 1, generator(6))
    with pytest.raises(ShapeError, match="slot_of"):
        both.run(batch, both.slot_of.long())
