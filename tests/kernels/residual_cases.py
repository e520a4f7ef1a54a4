"""Experts that make residual records hard."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from moespeq_cli.bench.kernel_residual import ExactExperts
from runtime.kernels.layout import SlotLayout
from runtime.kernels.shape import ExpertShape, WeightForm
from runtime.kernels.units import Codes

SHAPES = {
    "one-unit": (ExpertShape(2, 1, 8, 8), WeightForm("int4", -1)),
    "odd": (ExpertShape(3, 2, 264, 40, has_bias=True), WeightForm("int4", -1)),
    "g32": (ExpertShape(2, 1, 96, 1152), WeightForm("int4", 32)),  # blocks of 8 and 1 unit
    "g64": (ExpertShape(2, 1, 192, 64), WeightForm("int4", 64)),
}


def any_bits(*sizes: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(1 << 15), 1 << 15, sizes, dtype=torch.int16, generator=generator).view(torch.bfloat16)


def wild(experts: ExactExperts, share: float, seed: int) -> ExactExperts:
    """With any bits as a share of the weights, any finite scales in a share of the groups, and more zero codes."""
    if not share:
        return experts
    generator = torch.Generator().manual_seed(seed)

    def chosen(like: Tensor, other: Tensor) -> Tensor:
        return torch.where(torch.rand(like.shape, generator=generator) < share, other, like)

    def codes(linear: Codes) -> Codes:
        bits = torch.randint(-(1 << 15), 1 << 15, linear.scales.shape, dtype=torch.int16, generator=generator)
        scales = bits.view(torch.float16)
        scales = torch.where(scales.isfinite(), scales, torch.zeros(()).half())
        scales = chosen(scales, torch.zeros_like(scales))
        return Codes(chosen(linear.codes, torch.full_like(linear.codes, 8)), chosen(linear.scales, scales))

    return ExactExperts(
        experts.layout,
        chosen(experts.gate_up, any_bits(*experts.gate_up.shape, seed=seed)),
        chosen(experts.down, any_bits(*experts.down.shape, seed=seed + 1)),
        codes(experts.gate_up_codes),
        codes(experts.down_codes),
        experts.biases,
    )


def with_scales_of_any_size(experts: ExactExperts, seed: int) -> ExactExperts:
    """With weights and scales times another power of two in every group, as far as F16 has the scale."""
    generator = torch.Generator().manual_seed(seed)

    def scaled(weights: Tensor, linear: Codes) -> tuple[Tensor, Codes]:
        power = torch.randint(-15, 21, linear.scales.shape, generator=generator)
        wanted = linear.scales.double() * 2.0**power
        power = torch.where((wanted.half().double() == wanted) & wanted.half().isfinite(), power, 0)
        groups = torch.arange(weights.shape[-1]) // -(-weights.shape[-1] // power.shape[-1])
        scales = (linear.scales.double() * 2.0**power).half()
        return (weights.double() * 2.0 ** power[..., groups]).bfloat16(), Codes(linear.codes, scales)

    gate_up, gate_up_codes = scaled(experts.gate_up, experts.gate_up_codes)
    down, down_codes = scaled(experts.down, experts.down_codes)
    return ExactExperts(experts.layout, gate_up, down, gate_up_codes, down_codes, experts.biases)


def with_turned_groups(experts: ExactExperts, share: float, seed: int) -> ExactExperts:
    """With weights and scales of a share of the groups of gate and up negated: no guess is wrong."""
    linear = experts.gate_up_codes
    turned = torch.rand(linear.scales.shape, generator=torch.Generator().manual_seed(seed)) < share
    sign = torch.where(turned, -1.0, 1.0)
    groups = torch.arange(experts.gate_up.shape[-1]) // -(-experts.gate_up.shape[-1] // sign.shape[-1])
    return replace(
        experts,
        gate_up=(experts.gate_up * sign[..., groups]).bfloat16(),
        gate_up_codes=Codes(linear.codes, (linear.scales * sign).half()),
    )


def with_exceptions(experts: ExactExperts, share: float, seed: int, scales: bool = True) -> ExactExperts:
    """With finite weights far from their codes as a share of all, as many `scales` negative or zero, and inputs that
    nothing looks at: exact zeros, which no guess gives, four of them in some lanes of a unit."""
    generator = torch.Generator().manual_seed(seed)

    def moved(weights: Tensor) -> Tensor:
        factor = 4.0 ** torch.randint(-3, 2, weights.shape, generator=generator)
        return torch.where(
            torch.rand(weights.shape, generator=generator) < share, -factor * weights, weights
        ).bfloat16()

    def turned(linear: Codes) -> Codes:
        factor = torch.randint(-1, 2, linear.scales.shape, generator=generator)
        chosen = torch.rand(linear.scales.shape, generator=generator) < share * scales
        return Codes(linear.codes, torch.where(chosen, factor * linear.scales, linear.scales).half())

    gate_up = moved(experts.gate_up)
    gate_up[:, :, :2] = 0
    return ExactExperts(
        experts.layout,
        gate_up,
        moved(experts.down),
        turned(experts.gate_up_codes),
        turned(experts.down_codes),
        experts.biases,
    )


def every_word() -> ExactExperts:
    """One expert whose gate and up rows are all 65536 words, each under all 16 codes."""
    shape, form = ExpertShape(1, 1, 1024, 512), WeightForm("int4", 128)
    words = torch.arange(1 << 20).view(1, 1024, 1024)
    codes = (words >> 16).to(torch.uint8)
    scales = torch.rand(1, 1024, 8, generator=torch.Generator().manual_seed(1)).half()
    gate_up = (words & 0xFFFF).to(torch.int32).to(torch.int16).view(torch.bfloat16)
    half = Codes(codes[:, :, :512].contiguous(), scales[:, :, :4].contiguous())
    return ExactExperts(SlotLayout(shape, form), gate_up, gate_up[:, :, :512].contiguous(), Codes(codes, scales), half)


def hostile(trials: int) -> tuple[ExactExperts, Tensor, int, Tensor]:
    """A record with some bytes changed, again and again.

    Returns:
        The experts, slots uint8 [trials, slot_bytes], the length of the record, and bool [trials]: whether the places
        of its blocks are among what was changed.
    """
    experts = ExactExperts.random(*SHAPES["g32"], 1)
    record = experts.records()[0]
    generator = torch.Generator().manual_seed(1)
    slots = experts.slots([record] * trials)
    tables = 4 * (experts.layout.gate_up_grid.tiles + 1)
    for trial, slot in enumerate(slots):
        within = (tables, len(record))[trial % 2]
        places = torch.randint(0, within, (1 + trial % 40,), generator=generator)
        slot[places] = torch.randint(0, 256, places.shape, dtype=torch.uint8, generator=generator)
    return experts, slots, len(record), (slots[:, :tables] != record[:tables]).any(1)
