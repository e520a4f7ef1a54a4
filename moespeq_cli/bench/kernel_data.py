"""Layers of experts made to find faults: random ones, and ones whose answer is known bit for bit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.kernels.layout import Biases, SlotLayout
from runtime.kernels.reference import dequantize
from runtime.kernels.shape import ExpertShape, WeightForm
from runtime.kernels.units import Codes

Linear = Codes | Tensor  # coded, or BF16 [E, rows, columns]
LARGE, SMALL = 64.0, 2.0**-6  # silu and gelu of 64 are 64 in FP32, so their product is exactly 1


@dataclass(frozen=True, slots=True)
class Experts:
    """All experts of one layer as plain tensors, gate_up [E, 2I, H] with gate rows first and down [E, H, I]."""

    shape: ExpertShape
    form: WeightForm
    gate_up: Linear
    down: Linear
    biases: Biases | None = None

    def weight(self, name: str, expert: int) -> Tensor:
        """One linear of one expert as float64: `gate_up` or `down`."""
        linear: Linear = getattr(self, name)
        if isinstance(linear, Tensor):
            return linear[expert].double()
        one = Codes(linear.codes[expert : expert + 1], linear.scales[expert : expert + 1])
        return dequantize(one, self.form)[0]

    def bias(self, name: str, expert: int) -> Tensor | None:
        """The bias of a linear as float64, or None."""
        return None if self.biases is None else getattr(self.biases, name)[expert].double()

    def pack(self, slot_of: Tensor, num_slots: int) -> Tensor:
        """A pool uint8 [num_slots, slot_bytes] with expert e in slot `slot_of[e]`; other slots hold noise."""
        layout = SlotLayout(self.shape, self.form)
        device = slot_of.device
        pool = torch.randint(0, 256, (num_slots, layout.slot_bytes), dtype=torch.uint8, device=device)
        for expert, slot in enumerate(slot_of.tolist()):
            if slot >= 0:
                one = slice(expert, expert + 1)
                biases = None if self.biases is None else Biases(self.biases.gate_up[one], self.biases.down[one])
                out = pool[slot : slot + 1]
                if isinstance(self.gate_up, Codes) and isinstance(self.down, Codes):
                    pair = [Codes(linear.codes[one], linear.scales[one]) for linear in (self.gate_up, self.down)]
                    layout.pack_codes(pair[0], pair[1], biases, out)
                elif isinstance(self.gate_up, Tensor) and isinstance(self.down, Tensor):
                    layout.pack_bf16(self.gate_up[one], self.down[one], biases, out)
        return pool


def random_experts(shape: ExpertShape, form: WeightForm, generator: torch.Generator) -> Experts:
    """Weights of about 1 / sqrt(inputs); every code occurs, and no two scales are alike."""
    return Experts(
        shape,
        form,
        _random_linear(form, (shape.num_experts, 2 * shape.moe_intermediate_size, shape.hidden_size), generator),
        _random_linear(form, (shape.num_experts, shape.hidden_size, shape.moe_intermediate_size), generator),
        _random_biases(shape, generator),
    )


def visible_h_experts(shape: ExpertShape, form: WeightForm, generator: torch.Generator) -> Experts:
    """Random gate and up rows, and a down projection that copies h to the output.

    An expert shows hidden_size elements of h, the first from `shown_from` on.
    """
    made = random_experts(shape, form, generator)
    size = (shape.num_experts, shape.hidden_size, shape.moe_intermediate_size)
    down = torch.zeros(size, dtype=torch.int8, device=generator.device)
    for expert in range(shape.num_experts):
        begin = shown_from(shape, expert)
        count = min(shape.hidden_size, shape.moe_intermediate_size - begin)
        rows = torch.arange(count, device=generator.device)
        down[expert, rows, rows + begin] = 1
    biases = None
    if made.biases is not None:
        biases = Biases(made.biases.gate_up, torch.zeros_like(made.biases.down))
    return Experts(shape, form, made.gate_up, _linear(form, down, _ones(form, size, generator)), biases)


def one_hot_h_experts(shape: ExpertShape, form: WeightForm, generator: torch.Generator) -> Experts:
    """Random down projections, and gate and up rows that turn column `column_of` of x into one element of h."""
    made = random_experts(shape, form, generator)
    inner, hidden = shape.moe_intermediate_size, shape.hidden_size
    size = (shape.num_experts, 2 * inner, hidden)
    ints, scales = torch.zeros(size, dtype=torch.int8, device=generator.device), _ones(form, size, generator)
    for expert in range(shape.num_experts):
        begin = shown_from(shape, expert)
        rows = torch.arange(begin, min(inner, begin + hidden), device=generator.device)
        ints[expert, rows, column_of(shape, expert, rows)] = 4
        ints[expert, rows + inner, column_of(shape, expert, rows)] = 1
    scales[:, :inner], scales[:, inner:] = LARGE / 4, SMALL
    biases = None
    if made.biases is not None:
        biases = Biases(torch.zeros_like(made.biases.gate_up), made.biases.down)
    return Experts(shape, form, _linear(form, ints, scales), made.down, biases)


def integer_experts(shape: ExpertShape, form: WeightForm, generator: torch.Generator) -> Experts:
    """Small integers with scales 1 and 2, such that every partial sum is exact for the tokens of the integer probe.

    The gate is 64 at least and 1024 at most, where silu and gelu give their argument. Down rows of many columns are
    thinned so that their sums stay below 2**24.
    """
    experts, inner, hidden = shape.num_experts, shape.moe_intermediate_size, shape.hidden_size
    gate_up = _integers((experts, 2 * inner, hidden), 2, generator)
    gate_up[:, :inner, 0] = 4
    gate_up[:, inner:, 0] = 0
    down = _integers((experts, hidden, inner), 2, generator)
    if inner > 1200:
        keep = torch.rand(inner, generator=generator, device=generator.device) < 1200 / inner
        for expert in range(experts):  # other columns for every expert, so that all columns are seen
            down[expert, :, ~keep.roll(expert * 1201)] = 0
    biases = None
    if shape.has_bias:
        biases = Biases(
            _integers((experts, 2 * inner), 2, generator).bfloat16(),
            _integers((experts, hidden), 8, generator).bfloat16(),
        )
    scales = [_powers(form, linear.shape, generator) for linear in (gate_up, down)]
    return Experts(shape, form, _linear(form, gate_up, scales[0]), _linear(form, down, scales[1]), biases)


def shown_from(shape: ExpertShape, expert: int) -> int:
    """The first element of h that an expert of the one-hot layers deals with; together they deal with all."""
    windows = -(-shape.moe_intermediate_size // shape.hidden_size)
    return expert % windows * shape.hidden_size


def column_of(shape: ExpertShape, expert: int, row: Tensor) -> Tensor:
    """The column of x that becomes element `row` of h in `one_hot_h_experts`."""
    return (row + 17 * expert) % shape.hidden_size


def _random_linear(form: WeightForm, size: tuple[int, int, int], generator: torch.Generator) -> Linear:
    device = generator.device
    if not form.is_coded:
        weights = torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16)
        return weights.mul_(size[2] ** -0.5)
    codes = torch.randint(0, 2 * form.zero, size, dtype=torch.uint8, generator=generator, device=device)
    spread = 0.5 + torch.rand(*size[:2], form.groups(size[2]), generator=generator, device=device)
    return Codes(codes, (spread * (size[2] ** -0.5 / (0.58 * form.zero))).half())


def _random_biases(shape: ExpertShape, generator: torch.Generator) -> Biases | None:
    if not shape.has_bias:
        return None
    sizes = ((shape.num_experts, 2 * shape.moe_intermediate_size), (shape.num_experts, shape.hidden_size))
    gate_up, down = (torch.randn(size, generator=generator, device=generator.device).bfloat16() for size in sizes)
    return Biases(gate_up, down)


def _integers(size: tuple[int, ...], largest: int, generator: torch.Generator) -> Tensor:
    return torch.randint(-largest, largest + 1, size, dtype=torch.int8, generator=generator, device=generator.device)


def _ones(form: WeightForm, size: tuple[int, int, int], generator: torch.Generator) -> Tensor:
    return torch.ones(*size[:2], form.groups(size[2]), device=generator.device)


def _powers(form: WeightForm, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    count = (*size[:2], form.groups(size[2]))
    return torch.randint(1, 3, count, generator=generator, device=generator.device).float()


def _linear(form: WeightForm, ints: Tensor, scales: Tensor) -> Linear:
    """Integers int8 [E, rows, columns] times scales [E, rows, groups], exact in every form."""
    if form.is_coded:
        return Codes((ints.short() + form.zero).byte(), scales.half())
    columns = ints.shape[-1]
    group = torch.arange(columns, device=ints.device) // form.group_columns(columns)
    expanded: Tensor = ints.bfloat16() * scales.bfloat16()[..., group]
    return expanded
