"""Residual records on the GPU beside BF16: first whether every bit is the same, then how long they take."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moespeq_cli.bench.kernel_residual import ExactExperts, resident
from moespeq_cli.bench.kernel_time import Machine, replay
from moespeq_cli.bench.kernels import Plan
from moespeq_cli.bench.tables import markdown, number, percent
from runtime.errors import KernelError, PlanError
from runtime.kernels.dequant import plain_layout
from runtime.kernels.residual import DIRECTORY_BYTES, ResidualPool, units_per_expert
from runtime.kernels.shape import ExpertShape, WeightForm

DISTINCT = 2  # experts that are encoded; the others of a layer repeat them at places of their own
Result = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer twice: as residual records beside the bank, expert e's codes in the bank's slot e, and in BF16.

    Attributes:
        pool: of the records.
        exact: uint8 [E, bytes of a BF16 slot], expert e in row e.
        slot_of: int32 [E], of the records.
        own: int32 [E], 0 to E - 1.
        record_bytes: of one record, in the mean.
    """

    pool: ResidualPool
    exact: Tensor
    slot_of: Tensor
    own: Tensor
    record_bytes: float

    @classmethod
    def random(cls, shape: ExpertShape, form: WeightForm, seed: int) -> Layer:
        count = shape.num_experts
        experts = ExactExperts.random(shape, form, min(count, DISTINCT), seed)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).cuda()
        pool, lengths = resident(experts, order)
        exact = experts.exact().cuda()
        own = torch.arange(count, dtype=torch.int32, device="cuda")
        repeated = exact[torch.arange(count, device="cuda") % len(exact)]
        return cls(pool, repeated, order.int(), own, sum(lengths) / len(lengths))

    def clone(self) -> Layer:
        """The same at another place."""
        tensors = (self.pool.records.clone(), self.pool.directory.clone(), self.pool.bank.clone())
        return dataclasses.replace(self, pool=ResidualPool(self.pool.layout, *tensors), exact=self.exact.clone())

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
                _require_same_bits(layer)
            results.append({"geometry": geometry.name, "checked": plan.check} | _time_decode(layer, machine))
        except torch.OutOfMemoryError as error:
            raise PlanError(
                expected=f"GPU memory for {geometry.name} ({geometry.label}) as residual records and in BF16",
                found=str(error).partition("\n")[0],
                mend="leave this geometry out, or stop what else uses the GPU",
            ) from error
        advance()
    return results


def _decode(layer: Layer, out: Tensor) -> None:
    number = torch.tensor([len(layer.own)], dtype=torch.int32, device="cuda")
    layer.pool.decode(layer.slot_of, layer.own, layer.own, number, out)


def _require_same_bits(layer: Layer) -> None:
    out = torch.zeros_like(layer.exact)
    _decode(layer, out)
    if not torch.equal(out, layer.exact):
        wrong = int((out != layer.exact).sum())
        raise KernelError(
            expected="records decoded to the weights that they were made of",
            found=f"{wrong} other bytes",
            mend="this is a fault of the kernel or of the GPU: report it with this message; nothing was timed",
        )


def _time_decode(layer: Layer, machine: Machine) -> Result:
    """All experts of a layer to BF16, and the directory of all of them."""
    count, layout, device = len(layer.own), layer.pool.layout, layer.exact.device
    out = torch.empty_like(layer.exact)
    number = torch.tensor([count], dtype=torch.int32, device=device)
    faults = torch.zeros(count, dtype=torch.int32, device=device)
    lengths = torch.full((count,), int(layer.record_bytes), dtype=torch.int64, device=device)
    half = out.view(torch.int64)
    other = torch.empty_like(half)

    def decoding() -> None:
        layer.pool.decode(layer.slot_of, layer.own, layer.own, number, out)

    def copying() -> None:
        torch.bitwise_not(half, out=other)

    times, copy = replay([decoding] * 4), replay([copying] * 4)
    spare = dataclasses.replace(layer.pool, directory=layer.pool.directory.clone())
    index = replay([lambda: spare.admit(layer.slot_of, layer.own, lengths, faults)] * 4)
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
    return f"Residual records, bit for bit as BF16\n\n{decode_table(results)}"


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
