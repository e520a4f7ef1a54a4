"""Layers of known experts with a fused kernel to compute them, and what their tests wait with."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from moespeq_cli.bench.kernel_bound import Interval, Rounding, answers
from moespeq_cli.bench.kernel_candidate import Batch
from moespeq_cli.bench.kernel_data import Experts, random_experts
from runtime.kernels.fused import FusedConfig, FusedExperts
from runtime.kernels.layout import SlotLayout
from runtime.kernels.shape import Activation, ExpertShape, WeightForm

DEVICE = "cuda"
FEW = (1, 3, 7, 16, 17)  # tokens of a call, odd on purpose; 17 are two launches
FORMS = [
    WeightForm("int4", 32),
    WeightForm("int4", 64),
    WeightForm("int4", 96),  # not a divisor of a unit's 128 columns
    WeightForm("int4", 128),
    WeightForm("int4", -1),
    WeightForm("int8", 64),
    WeightForm("int8", -1),
    WeightForm("bf16"),
]
INT4, INT8, BF16 = FORMS[3], FORMS[6], FORMS[7]
SMALL = [
    ExpertShape(5, 2, 64, 40, Activation.gelu),
    ExpertShape(257, 6, 288, 192, Activation.gelu_tanh, has_bias=True),
    ExpertShape(3, 3, 96, 48, Activation.clamped, has_bias=True),
    ExpertShape(1, 1, 16, 8),
    ExpertShape(9, 2, 1032, 520),  # one more row than whole tiles, one more column than whole units
]
LARGE = [
    ExpertShape(60, 4, 2048, 1408),
    ExpertShape(32, 4, 2880, 2880, Activation.clamped, has_bias=True),
    ExpertShape(128, 8, 2048, 768),
]
CASES = [(shape, form) for shape in SMALL for form in FORMS] + [
    (shape, form) for shape in LARGE for form in (INT4, INT8, BF16)
]

every_case = pytest.mark.parametrize(
    ("shape", "form"),
    CASES,
    ids=lambda value: (
        f"{value.kind}g{value.group_size}"
        if isinstance(value, WeightForm)
        else f"{value.num_experts}:{value.top_k}:{value.hidden_size}x{value.moe_intermediate_size}"
    ),
)
every_kind = pytest.mark.parametrize("form", [INT4, INT8, BF16], ids=lambda form: form.kind)


class Layer:
    """A layer in a pool with two slots too many, and a kernel to compute it."""

    def __init__(self, experts: Experts, config: FusedConfig | None = None, seed: int = 0) -> None:
        self.experts, self.shape, self.form = experts, experts.shape, experts.form
        self.layout = SlotLayout(self.shape, self.form)
        count = self.shape.num_experts
        generator = torch.Generator().manual_seed(seed)
        self.slot_of = torch.randperm(count + 2, generator=generator)[:count].int().to(DEVICE)
        self.pool = experts.pack(self.slot_of, count + 2)
        self.kernel = FusedExperts(self.layout, config)

    def run(self, batch: Batch, slot_of: Tensor | None = None, **passes: Any) -> Tensor:
        """The output, which held NaN before."""
        out = torch.full_like(batch.x, torch.nan)
        slot_of = self.slot_of if slot_of is None else slot_of
        self.kernel.run(self.pool, slot_of, batch.x, batch.top_k_index, batch.top_k_weights, out, **passes)
        return out

    def only(self, here: Tensor) -> Tensor:
        """slot_of with -1 but for experts of a mask bool [E]."""
        return torch.where(here, self.slot_of, -1).int()

    def answers(self, batch: Batch, sums: str = "float", present: Tensor | None = None) -> Interval:
        """The right ones; the fused kernel rounds h and y and nothing else."""
        return answers(self.experts, batch.x, batch.top_k_index, batch.top_k_weights, Rounding(), sums, present)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(seed)


def random_layer(shape: ExpertShape, form: WeightForm, config: FusedConfig | None = None) -> Layer:
    return Layer(random_experts(shape, form, generator()), config)


@dataclass
class Deadline:
    """Waits for events by asking, so that a kernel that never ends fails a test instead of stopping the run."""

    seconds: float = 20.0

    def wait(self, *events: torch.cuda.Event) -> None:
        end = time.monotonic() + self.seconds
        while not all(event.query() for event in events):
            assert time.monotonic() < end, f"not done after {self.seconds} s"
            time.sleep(0.001)


def recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(stream)
    return event
