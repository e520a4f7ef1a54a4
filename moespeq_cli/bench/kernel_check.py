"""Is it right? Probes of every candidate on one layer, before anything is timed.

Three kinds of data, each blind where another sees: one-hot (layout, codes and scales, gate and up apart from down),
small integers (any order of sums gives the same bits), and random numbers, judged element by element. Then what a
backend promises beyond arithmetic: rows that do not depend on their batch, the same bits every time, experts that are
not here, and two passes that equal one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moespeq_cli.bench.kernel_bound import Interval, Rounding, answers
from moespeq_cli.bench.kernel_candidate import Batch, Candidate, Layer, Prepared
from moespeq_cli.bench.kernel_data import (
    Experts,
    column_of,
    integer_experts,
    one_hot_h_experts,
    random_experts,
    shown_from,
    visible_h_experts,
)
from runtime.errors import KernelError
from runtime.kernels.shape import ExpertShape, WeightForm

FEW = (1, 3, 7, 16, 17)  # tokens, odd on purpose
MANY = (33, 100, 257)  # for backends that compute so many
INVARIANT_ROWS = 16
Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Probe:
    """One layer with tokens whose right answers are known.

    Attributes:
        name: for messages.
        experts: the layer.
        batch: as many tokens as the largest count that is tried; smaller counts are its first rows.
        sums: as in `answers`.
    """

    name: str
    experts: Experts
    batch: Batch
    sums: str


def probes(shape: ExpertShape, form: WeightForm, num_tokens: int, generator: torch.Generator) -> Iterator[Probe]:
    """The probes of a layer, one at a time: a layer can take gigabytes."""
    yield one_hot_x(shape, form, num_tokens, generator)
    yield one_hot_h(shape, form, num_tokens, generator)
    yield integers(shape, form, num_tokens, generator)
    experts = random_experts(shape, form, generator)
    yield Probe("random", experts, random_batch(shape, num_tokens, generator), "float")
    yield Probe("random, one set of experts", experts, random_batch(shape, num_tokens, generator, same=True), "float")


def one_hot_x(shape: ExpertShape, form: WeightForm, num_tokens: int, generator: torch.Generator) -> Probe:
    """One element of x a token, and h copied to the output: shows gate and up columns."""
    experts = visible_h_experts(shape, form, generator)
    batch = _one_expert_a_token(shape, num_tokens, generator)
    columns = torch.randperm(shape.hidden_size, generator=generator, device=generator.device)
    columns = columns.repeat(-(-num_tokens // len(columns)))[:num_tokens]
    values = 2.0 ** torch.randint(0, 3, (num_tokens,), generator=generator, device=generator.device)
    batch.x[torch.arange(num_tokens, device=generator.device), columns] = values.bfloat16()
    return Probe("one-hot x", experts, batch, "single")


def one_hot_h(shape: ExpertShape, form: WeightForm, num_tokens: int, generator: torch.Generator) -> Probe:
    """One element of h a token: the output is a column of the down projection."""
    experts = one_hot_h_experts(shape, form, generator)
    batch = _one_expert_a_token(shape, num_tokens, generator)
    for token in range(num_tokens):
        expert = int(batch.top_k_index[token, batch.top_k_weights[token].argmax()])
        begin = shown_from(shape, expert)
        count = min(shape.hidden_size, shape.moe_intermediate_size - begin)
        row = begin + torch.randint(0, count, (1,), generator=generator, device=generator.device)
        batch.x[token, column_of(shape, expert, row)] = 1
    return Probe("one-hot h", experts, batch, "single")


def integers(shape: ExpertShape, form: WeightForm, num_tokens: int, generator: torch.Generator) -> Probe:
    """Small integers: every sum exact."""
    experts = integer_experts(shape, form, generator)
    hidden, device = shape.hidden_size, generator.device
    x = torch.zeros(num_tokens, hidden, dtype=torch.bfloat16, device=device)
    places = (
        torch.rand(num_tokens, hidden - 1, generator=generator, device=device).topk(min(48, hidden // 2)).indices + 1
    )
    signs = 2 * torch.randint(0, 2, places.shape, generator=generator, device=device) - 1
    x.scatter_(1, places, signs.bfloat16())
    x[:, 0] = 64
    batch = random_batch(shape, num_tokens, generator)
    weights = 0.5 + 0.5 * torch.randint(0, 2, batch.top_k_weights.shape, generator=generator, device=device)
    return Probe("integers", experts, Batch(x, batch.top_k_index, weights), "integer")


def random_batch(
    shape: ExpertShape, num_tokens: int, generator: torch.Generator, same: bool = False, skip: int | None = None
) -> Batch:
    """Random tokens and routing.

    Args:
        shape: of the layer.
        num_tokens: of the batch.
        generator: on the device wanted.
        same: whether all tokens choose the same experts.
        skip: an expert that none chooses, where there are enough of them.
    """
    device = generator.device
    x = torch.randn(num_tokens, shape.hidden_size, generator=generator, device=device).bfloat16()
    scores = torch.rand(1 if same else num_tokens, shape.num_experts, generator=generator, device=device)
    if skip is not None and shape.top_k < shape.num_experts:
        scores[:, skip] = -1
    best = scores.expand(num_tokens, -1).topk(shape.top_k)
    logits = torch.randn(num_tokens, shape.top_k, generator=generator, device=device)
    return Batch(x, best.indices.int().contiguous(), logits.softmax(-1))


def _one_expert_a_token(shape: ExpertShape, num_tokens: int, generator: torch.Generator) -> Batch:
    """Random routing, zero x, and weights of 1 for one expert of each token and 0 for its others."""
    batch = random_batch(shape, num_tokens, generator)
    weights = torch.zeros_like(batch.top_k_weights)
    rows = torch.arange(num_tokens, device=generator.device)
    weights[rows, rows % shape.top_k] = 1
    return Batch(torch.zeros_like(batch.x), batch.top_k_index, weights)


class Checker:
    """Judges candidates on one geometry and form, and remembers what was found.

    Args:
        shape, form: of the layer.
        candidates: to be judged.
        device: where.
        seed: of all data.

    Attributes:
        records: one a probe, count and candidate.
    """

    def __init__(
        self, shape: ExpertShape, form: WeightForm, candidates: Sequence[Candidate], device: str, seed: int = 0
    ) -> None:
        self.shape, self.form = shape, form
        self.generator = torch.Generator(device=device).manual_seed(seed)
        self.records: list[Record] = []
        limits = [(candidate, candidate.max_tokens(shape, form)) for candidate in candidates]
        self._candidates = [(candidate, min(limit, max(FEW + MANY))) for candidate, limit in limits if limit > 0]

    def run(self) -> list[Record]:
        """Every check.

        Raises:
            KernelError: a check failed; the message says which.
        """
        if not self._candidates:
            return self.records
        most = max(limit for _, limit in self._candidates)
        last: Probe | None = None
        for last in probes(self.shape, self.form, most, self.generator):
            self._probe(last)
        assert last is not None
        self._promises(last.experts)
        return self.records

    def _probe(self, probe: Probe) -> None:
        layer = self._layer(probe.experts)
        right: dict[Rounding, Interval] = {}
        for candidate, limit in self._candidates:
            prepared = candidate.prepare(self.shape, self.form, limit)  # anew: buffers of gigabytes go with the layer
            rounding = candidate.rounding(self.form)
            if rounding not in right:
                right[rounding] = answers(
                    probe.experts,
                    probe.batch.x,
                    probe.batch.top_k_index,
                    probe.batch.top_k_weights,
                    rounding,
                    probe.sums,
                )
            for count in (count for count in FEW + MANY if count <= limit):
                rows = slice(0, count)
                y = compute(prepared, layer, probe.batch.rows(rows))
                interval = right[rounding].rows(rows)
                self._record(candidate, probe.name, count, interval.wrong(y), interval)

    def _promises(self, experts: Experts) -> None:
        """What holds beside arithmetic, on random experts."""
        layer = self._layer(experts)
        for candidate, limit in self._candidates:
            prepared = candidate.prepare(self.shape, self.form, limit)
            few = random_batch(self.shape, min(limit, 17), self.generator, skip=0)
            y = compute(prepared, layer, few)
            again = all(torch.equal(compute(prepared, layer, few), y) for _ in range(3))
            self._record(candidate, "same bits in three repeats", len(few), None if again else "they differ")
            if candidate.row_invariant:
                self._row_invariance(candidate, prepared, layer, limit)
            self._absent(candidate, prepared, experts, layer, few)

    def _row_invariance(self, candidate: Candidate, prepared: Prepared, layer: Layer, limit: int) -> None:
        rows = min(INVARIANT_ROWS, limit)
        batch = random_batch(self.shape, rows, self.generator)
        alone = torch.cat([compute(prepared, layer, batch.rows(slice(t, t + 1))) for t in range(rows)])
        failed = []
        for count in range(1, rows + 1):
            for _ in range(3):
                order = torch.randperm(rows, generator=self.generator, device=self.generator.device)[:count]
                if not torch.equal(compute(prepared, layer, batch.rows(order)), alone[order]):
                    failed.append(count)
        found = f"other bits in batches of {sorted(set(failed))} rows" if failed else None
        self._record(candidate, "row invariance in random orders", rows, found)

    def _absent(self, candidate: Candidate, prepared: Prepared, experts: Experts, layer: Layer, batch: Batch) -> None:
        """Experts that are not here add nothing; a second pass over them gives the bits of one pass."""
        here = torch.arange(self.shape.num_experts, device=layer.slot_of.device) % 3 != 1
        some = Layer(layer.pool, torch.where(here, layer.slot_of, -1).int())
        y = compute(prepared, some, batch)
        rounding = candidate.rounding(self.form)
        right = answers(experts, batch.x, batch.top_k_index, batch.top_k_weights, rounding, "float", present=here)
        self._record(candidate, "experts that are not here", len(batch), right.wrong(y), right)
        rest = Layer(layer.pool, torch.where(here, -1, layer.slot_of).int())
        out = poisoned(batch)
        call = prepared.bind_passes(some, rest, batch, out)
        if call is not None:
            call()
            whole = compute(prepared, layer, batch)
            same = torch.equal(out, whole)
            self._record(candidate, "two passes as one", len(batch), None if same else "other bits")

    def _layer(self, experts: Experts) -> Layer:
        """Packed with slots in random order and two that hold noise."""
        num_slots = self.shape.num_experts + 2
        order = torch.randperm(num_slots, generator=self.generator, device=self.generator.device)
        slot_of = order[: self.shape.num_experts].int()
        return Layer(experts.pack(slot_of, num_slots), slot_of)

    def _record(
        self, candidate: Candidate, what: str, count: int, found: str | None, right: Interval | None = None
    ) -> None:
        self.records.append({"candidate": candidate.name, "check": what, "tokens": count, "ok": found is None})
        if right is not None:
            self.records[-1] |= {"exact_share": right.exact_share, "allowed_numbers": right.allowed}
        if found is not None:
            shape = self.shape
            raise KernelError(
                expected=(
                    f"{candidate.name} to pass '{what}' at {count} tokens ({self.form.kind}, {shape.num_experts} "
                    f"experts, top-{shape.top_k}, {shape.hidden_size} x {shape.moe_intermediate_size})"
                ),
                found=found,
                mend="this is a fault of the kernel or of the GPU: report it with this message; nothing was timed",
            )


def poisoned(batch: Batch) -> Tensor:
    """An output full of NaN."""
    return torch.full_like(batch.x, torch.nan)


def compute(prepared: Prepared, layer: Layer, batch: Batch) -> Tensor:
    """The output of a call, poisoned before."""
    out = poisoned(batch)
    prepared.bind(layer, batch, out)()
    return out
