"""A kernel made of float32 torch, with a place for a fault: what the checks are checked with."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moespeq_cli.bench.kernel_bound import Rounding
from moespeq_cli.bench.kernel_candidate import Batch, Call, Layer
from runtime.kernels.layout import Biases, SlotLayout
from runtime.kernels.reference import activate_torch, dequantize
from runtime.kernels.shape import ExpertShape, WeightForm
from runtime.kernels.units import Codes


class Fault:
    """Nothing wrong; subclasses override one of the places."""

    name = "none"

    def linear(self, name: str, linear: Codes | Tensor) -> Codes | Tensor:
        """Of one expert, [1, rows, columns]."""
        return linear

    def h(self, h: Tensor) -> Tensor:
        return h

    def p(self, p: Tensor, slot_of: Tensor) -> Tensor:
        """[M, k, H]."""
        return p

    def y(self, y: Tensor, call: int) -> Tensor:
        return y


@dataclass
class Simulated:
    """A candidate; sums in float32, columns in the order of `seed`."""

    fault: Fault
    name: str = "fused"
    rounds: Rounding = field(default_factory=Rounding)
    row_invariant: bool = True
    most: int = 100

    def rounding(self, form: WeightForm) -> Rounding:
        return self.rounds

    def max_tokens(self, shape: ExpertShape, form: WeightForm) -> int:
        return self.most

    def prepare(self, shape: ExpertShape, form: WeightForm, max_tokens: int) -> Prepared:
        assert max_tokens <= self.most
        return Prepared(shape, form, self.fault, self.rounds)


@functools.lru_cache(maxsize=256)  # by what a slot holds: every call reads the same few
def _unpacked(shape: ExpertShape, form: WeightForm, slot: bytes) -> tuple[Any, Any, Biases | None]:
    layout = SlotLayout(shape, form)
    unpack: Any = layout.unpack_codes if layout.form.is_coded else layout.views_bf16
    found: tuple[Any, Any, Biases | None] = unpack(torch.frombuffer(bytearray(slot), dtype=torch.uint8)[None])
    return found


@functools.lru_cache(maxsize=256)
def _dense(shape: ExpertShape, form: WeightForm, slot: bytes, rounded: bool) -> tuple[Tensor, Tensor]:
    gate_up, down, _ = _unpacked(shape, form, slot)
    return _weight(gate_up, form, rounded), _weight(down, form, rounded)


def _weight(linear: Codes | Tensor, form: WeightForm, rounded: bool) -> Tensor:
    weight = linear[0].double() if isinstance(linear, Tensor) else dequantize(linear, form)[0]
    return (weight.bfloat16() if rounded else weight).float()


class Prepared:
    def __init__(self, shape: ExpertShape, form: WeightForm, fault: Fault, rounding: Rounding) -> None:
        self.shape, self.form, self.fault, self.rounding, self.calls = shape, form, fault, rounding, 0

    def bind(self, layer: Layer, batch: Batch, out: Tensor) -> Call:
        def call() -> None:
            self._join(self._pairs(layer, batch), batch, out, layer.slot_of)

        return call

    def bind_passes(self, first: Layer, second: Layer, batch: Batch, out: Tensor) -> Call | None:
        def call() -> None:
            p = self._pairs(first, batch) + self._pairs(second, batch)
            self._join(p, batch, out, first.slot_of)

        return call

    def _join(self, p: Tensor, batch: Batch, out: Tensor, slot_of: Tensor) -> None:
        p = self.fault.p(p, slot_of)
        y = torch.zeros(batch.x.shape)
        for j in range(self.shape.top_k):
            y += batch.top_k_weights[:, j, None] * p[:, j]
        self.calls += 1
        out.copy_(self.fault.y(y.bfloat16(), self.calls))

    def _pairs(self, layer: Layer, batch: Batch) -> Tensor:
        p = torch.zeros(len(batch), self.shape.top_k, self.shape.hidden_size)
        for expert in torch.unique(batch.top_k_index).tolist():
            if (slot := int(layer.slot_of[expert])) < 0:
                continue
            held = layer.pool[slot].numpy().tobytes()
            gate_up, down = self._weights(held)
            biases = _unpacked(self.shape, self.form, held)[2]
            token, j = torch.where(batch.top_k_index == expert)
            joined = self._linear(gate_up, batch.x[token].float(), None if biases is None else biases.gate_up[0])
            gate, up = joined.chunk(2, -1)
            h = self.fault.h(activate_torch(gate, up, self.shape.activation).bfloat16())
            p[token, j] = self._linear(down, h.float(), None if biases is None else biases.down[0])
        return p

    def _weights(self, slot: bytes) -> tuple[Tensor, Tensor]:
        if type(self.fault).linear is Fault.linear:
            return _dense(self.shape, self.form, slot, self.rounding.weights)
        gate_up, down, _ = _unpacked(self.shape, self.form, slot)
        return self._changed("gate_up", gate_up), self._changed("down", down)

    def _changed(self, name: str, linear: Codes | Tensor) -> Tensor:
        if isinstance(linear, Codes):  # of which the fault may change some
            linear = Codes(linear.codes.clone(), linear.scales.clone())
        return _weight(self.fault.linear(name, linear), self.form, self.rounding.weights)

    def _linear(self, weight: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        # Row by row, so that a row's sums do not depend on its batch.
        y = torch.stack([weight @ row for row in x]) if len(x) else x.new_zeros(0, len(weight))
        y = y.bfloat16().float() if self.rounding.products else y
        return y if bias is None else y + bias.float()
