"""Residual records on the GPU beside BF16: first whether every bit is the same, then how long they take."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moespeq_cli.bench.kernel_candidate import Batch, Call
from moespeq_cli.bench.kernel_check import FEW, random_batch
from moespeq_cli.bench.kernel_residual import ExactExperts, resident
from moespeq_cli.bench.kernel_time import CALLS, GRAPH_US, L2_TIMES, MAX_LAYERS, Machine, replay
from moespeq_cli.bench.kernels import Plan
from moespeq_cli.bench.tables import markdown, number, percent
from runtime.errors import KernelError, PlanError
from runtime.kernels.dequant import plain_layout
from runtime.kernels.fused import FusedExperts
from runtime.kernels.residual import DIRECTORY_BYTES, ResidualPool, units_per_expert
from runtime.kernels.residual_experts import ResidualExperts
from runtime.kernels.shape import ExpertShape, WeightForm

DISTINCT = 2  # experts that are encoded; the others of a layer repeat them at places of their own
Result = dict[str, Any]
Experts = ResidualExperts | FusedExperts


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer twice: as residual records beside the bank, expert e's codes in the bank's slot e, and in BF16.

    Attributes:
        pool: of the records.
        exact: uint8 [E, bytes of a BF16 slot], expert e in row e.
        slot_of: int32 [E], of the records.
        own: int32 [E], 0 to E - 1.
        lengths: int64 [E], bytes of the records.
    """

    pool: ResidualPool
    exact: Tensor
    slot_of: Tensor
    own: Tensor
    lengths: Tensor

    @classmethod
    def random(cls, shape: ExpertShape, form: WeightForm, seed: int) -> Layer:
        count = shape.num_experts
        experts = ExactExperts.random(shape, form, min(count, DISTINCT), seed)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).cuda()
        pool, lengths = resident(experts, order)
        exact = experts.exact().cuda()
        own = torch.arange(count, dtype=torch.int32, device="cuda")
        repeated = exact[torch.arange(count, device="cuda") % len(exact)]
        return cls(pool, repeated, order.int(), own, torch.tensor(lengths, device="cuda"))

    def clone(self) -> Layer:
        """The same at another place."""
        old = self.pool
        pool = dataclasses.replace(
            old, records=old.records.clone(), directory=old.directory.clone(), bank=old.bank.clone()
        )
        return dataclasses.replace(self, pool=pool, exact=self.exact.clone())

    @property
    def record_bytes(self) -> float:
        """Of one record, in the mean."""
        return float(self.lengths.double().mean())

    @property
    def expert_bytes(self) -> float:
        """What a kernel must read of an expert: codes with scales, its record, its directory."""
        layout = self.pool.layout
        return layout.weight_bytes + self.record_bytes + units_per_expert(layout) * DIRECTORY_BYTES


def measure_residual(plan: Plan, form: WeightForm, machine: Machine, advance: Callable[[], None]) -> list[Result]:
    """Check and time every geometry.

    Args:
        plan: layers and numbers of tokens.
        form: of the bank, int4.
        machine: for the floor.
        advance: called after each.

    Raises:
        KernelError: another bit; nothing of its layer was timed.
        PlanError: a layer that does not fit in memory.
    """
    results = []
    for geometry in plan.geometries:
        try:
            layer = Layer.random(geometry.shape, form, plan.seed)
            if plan.check:
                _require_same_weights(layer)
                _require_same_bits(layer)
            facts = {"geometry": geometry.name, "checked": plan.check} | _time_decode(layer, machine)
            results.append(facts | {"rows": _time_rows(layer, plan, machine)})
        except torch.OutOfMemoryError as error:
            raise PlanError(
                expected=f"GPU memory for {geometry.name} ({geometry.label}) as residual records and in BF16",
                found=str(error).partition("\n")[0],
                mend="leave this geometry out, or stop what else uses the GPU",
            ) from error
        advance()
    return results


def _require_same_weights(layer: Layer) -> None:
    out = torch.zeros_like(layer.exact)
    number = torch.tensor([len(layer.own)], dtype=torch.int32, device="cuda")
    layer.pool.decode(layer.slot_of, layer.own, layer.own, number, out)
    if not torch.equal(out, layer.exact):
        raise _wrong(
            "records decoded to the weights that they were made of", f"{int((out != layer.exact).sum())} bytes"
        )


def _require_same_bits(layer: Layer) -> None:
    """Outputs from records against those in BF16: tokens of one element, of integers, of random numbers."""
    shape = layer.pool.layout.shape
    backends = backends_of(layer)
    generator = torch.Generator("cuda").manual_seed(1)
    for tokens in FEW:
        batch = random_batch(shape, tokens, generator)
        one_hot, whole = torch.zeros_like(batch.x), (batch.x * 4).round()
        one_hot[torch.arange(tokens), torch.arange(tokens) * 7 % shape.hidden_size] = 2.0
        for name, x in (("random", batch.x), ("one-hot", one_hot), ("whole", whole)):
            outs = {name: torch.full_like(x, torch.nan) for name in backends}
            for backend, out in outs.items():
                call_of(backends[backend], layer, Batch(x, batch.top_k_index, batch.top_k_weights), out)()
            wrong = int((outs["residual"].view(torch.int16) != outs["bf16"].view(torch.int16)).sum())
            if wrong:
                raise _wrong(f"the bits of BF16 for {tokens} {name} tokens", f"{wrong} of {x.numel()} numbers")


def _wrong(expected: str, found: str) -> KernelError:
    return KernelError(
        expected=expected,
        found=f"{found} otherwise",
        mend="this is a fault of the kernel or of the GPU: report it with this message; nothing was timed",
    )


def backends_of(layer: Layer) -> dict[str, Experts]:
    """By the names of the results."""
    return {"residual": ResidualExperts(layer.pool.layout), "bf16": FusedExperts(plain_layout(layer.pool.layout))}


def call_of(backend: Experts, layer: Layer, batch: Batch, out: Tensor) -> Call:
    """What computes a batch by one of these."""
    tokens = (batch.x, batch.top_k_index, batch.top_k_weights, out)
    if isinstance(backend, FusedExperts):
        return lambda: backend.run(layer.exact, layer.own, *tokens)
    return lambda: backend.run(layer.pool, layer.slot_of, layer.own, *tokens)


def _time_rows(layer: Layer, plan: Plan, machine: Machine) -> list[Result]:
    """Records beside BF16 at every number of tokens, over as many layers as L2 does not hold."""
    shape, layers, rows = layer.pool.layout.shape, [layer], []
    plain_bytes = plain_layout(layer.pool.layout).weight_bytes
    for tokens in plan.tokens:
        most = shape.num_experts * (1 - (1 - shape.top_k / shape.num_experts) ** tokens)
        needed = min(MAX_LAYERS, max(2, -(-L2_TIMES * machine.l2_bytes // int(most * layer.expert_bytes))))
        layers += [layer.clone() for _ in range(needed - len(layers))]
        floor_us = most * layer.expert_bytes / machine.read_gb_per_s / 1e3
        count = max(needed, min(CALLS, int(GRAPH_US / floor_us)))
        generator = torch.Generator("cuda").manual_seed(plan.seed + tokens)
        batches = [random_batch(shape, tokens, generator) for _ in range(count)]
        experts = sum(len(torch.unique(batch.top_k_index)) for batch in batches) / count
        out, times = torch.empty_like(batches[0].x), {}
        for name, backend in backends_of(layer).items():
            calls = [call_of(backend, layers[i % needed], batch, out) for i, batch in enumerate(batches)]
            times[name] = dataclasses.asdict(replay(calls))
        sizes = {"residual": experts * layer.expert_bytes, "bf16": experts * plain_bytes}
        floors = {name: size / machine.read_gb_per_s / 1e3 for name, size in sizes.items()}
        rows.append({"tokens": tokens, "experts": experts, "bytes": sizes, "floor_us": floors, "times": times})
    return rows


def row_table(result: Result) -> str:
    """Records beside BF16 as Markdown: a line a number of tokens."""
    rows = []
    for row in result["rows"]:
        cells = [str(row["tokens"]), number(row["experts"], 1)]
        for name in ("residual", "bf16"):
            time, floor_us = row["times"][name], row["floor_us"][name]
            spread = f"({number(time['low_us'])}-{number(time['high_us'])})"
            cells += [f"{number(time['median_us'])} {spread}", number(floor_us), number(time["median_us"] / floor_us)]
        rows.append(cells)
    head = ("residual, us", "floor, us", "ratio", "BF16, us", "floor, us", "ratio")
    return markdown(("tokens", "experts hit", *head), rows)


def _time_decode(layer: Layer, machine: Machine) -> Result:
    """All experts of a layer to BF16, and the directory of all of them."""
    count, layout, device = len(layer.own), layer.pool.layout, layer.exact.device
    out = torch.empty_like(layer.exact)
    number = torch.tensor([count], dtype=torch.int32, device=device)
    faults = torch.zeros(count, dtype=torch.int32, device=device)
    half = out.view(torch.int64)
    other = torch.empty_like(half)

    def decoding() -> None:
        layer.pool.decode(layer.slot_of, layer.own, layer.own, number, out)

    def copying() -> None:
        torch.bitwise_not(half, out=other)

    times, copy = replay([decoding] * 4), replay([copying] * 4)
    spare = dataclasses.replace(layer.pool, directory=layer.pool.directory.clone())
    index = replay([lambda: spare.admit(layer.slot_of, layer.own, layer.lengths, faults)] * 4)
    written = plain_layout(layout).weight_bytes
    moved = count * (layer.expert_bytes + written)
    return {
        "experts": count,
        "bits_a_weight": 8 * layer.record_bytes / layout.shape.weights_per_expert,
        "expert_bytes": layer.expert_bytes,
        "decode": {
            "times": dataclasses.asdict(times),
            "bytes": moved,
            "gb_per_s": moved / times.median_us / 1e3,
            "copy_gb_per_s": 2 * half.numel() * 8 / copy.median_us / 1e3,
            "of_copy": moved / times.median_us / 1e3 / machine.copy_gb_per_s,
        },
        "admit": dataclasses.asdict(index),
    }


def residual_text(results: Sequence[Result]) -> str:
    """Everything as Markdown."""
    parts = ["Residual records", decode_table(results)]
    for result in results:
        checked = "the bits of BF16" if result["checked"] else "unchecked"
        parts.append(f"{result['geometry']}, few tokens, {checked}\n\n{row_table(result)}")
    return "\n\n".join(parts)


def decode_table(results: Sequence[Result]) -> str:
    """The stand-alone decode as Markdown."""
    rows = [
        (
            result["geometry"],
            number(result["bits_a_weight"]),
            number(result["decode"]["times"]["median_us"], 1),
            number(result["decode"]["gb_per_s"], 0),
            number(result["decode"]["copy_gb_per_s"], 0),
            percent(result["decode"]["of_copy"]),
            number(result["admit"]["median_us"], 1),
        )
        for result in results
    ]
    head = (
        "geometry",
        "bits a weight",
        "decode of all experts, us",
        "GB/s, read and written",
        "copy of as many weights, GB/s",
        "of the copy bandwidth of this run",
        "admit of all records, us",
    )
    return markdown(head, rows)
