"""What a right kernel may answer, element by element: float64 from the formula, and how far rounding can lead from it.

The interval is built stage by stage. Products and sums of gate and up are off by at most an FP32 sum's error, so h
before its rounding is known to within some `e`, and h after it lies between bf16(h - e) and bf16(h + e): for most
elements these are one number, and the few where they differ are charged in full to the down projection. The output then
lies between the BF16 roundings of y - e and y + e. So a correct kernel is allowed one, two or a few neighbouring BF16
numbers, and a dead element, a wrong scale or one missing product falls outside.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moespeq_cli.bench.kernel_data import Experts
from runtime.kernels.shape import CLAMP_ALPHA, CLAMP_LIMIT, Activation

U32, U16 = 2.0**-24, 2.0**-8  # unit roundoff of float32 and bfloat16
STEEPEST = 1.13  # no activation here has a larger derivative
LIMIT = 2.0**24  # integers below it are exact in float32


@dataclass(frozen=True, slots=True)
class Rounding:
    """Where a backend rounds to BF16 besides h and y.

    Attributes:
        weights: codes are expanded to BF16 weights.
        products: gate, up and down leave their products as BF16.
        everything: every operation between products is rounded too, the sum over experts and router weights included.
    """

    weights: bool = False
    products: bool = False
    everything: bool = False


@dataclass(frozen=True, slots=True)
class Interval:
    """What may be answered.

    Attributes:
        low, high: bfloat16 [M, H], ends included.
        reference: float64 [M, H].
    """

    low: Tensor
    high: Tensor
    reference: Tensor

    @property
    def exact_share(self) -> float:
        """Share of the elements for which one number is right."""
        return float((self.low == self.high).double().mean())

    @property
    def allowed(self) -> int:
        """How many BF16 numbers are right for an element, in the median."""
        return 1 + int((_ordered(self.high) - _ordered(self.low)).median())

    def rows(self, order: Tensor | slice) -> Interval:
        """Some tokens of it."""
        return Interval(self.low[order], self.high[order], self.reference[order])

    def wrong(self, y: Tensor) -> str | None:
        """Where and how an answer bfloat16 [M, H] is worst outside, or None; NaN is outside."""
        outside = ~((y >= self.low) & (y <= self.high))
        if not bool(outside.any()):
            return None
        distance = torch.where(outside, (y.double() - self.reference).abs(), 0).nan_to_num(nan=torch.inf)
        row, column = divmod(int(distance.argmax()), y.shape[1])
        low, high, found = (float(tensor[row, column]) for tensor in (self.low, self.high, y))
        return (
            f"{int(outside.sum())} of {y.numel()} elements outside; worst at token {row}, column {column}: "
            f"{found:g} where {low:g} to {high:g} is right"
        )


def _ordered(values: Tensor) -> Tensor:
    """BF16 numbers as integers that count them: neighbours differ by 1."""
    bits = values.view(torch.int16).int()
    return torch.where(bits < 0, -(2**15) - bits, bits)


def answers(
    experts: Experts,
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    rounding: Rounding,
    sums: str,
    present: Tensor | None = None,
) -> Interval:
    """The interval of right answers of a layer.

    Args:
        experts: the layer.
        x: bfloat16 [M, H].
        top_k_index: integer [M, k].
        top_k_weights: float32 [M, k].
        rounding: of the backend that is judged.
        sums: what sums can lose: `float` (FP32 in any order, tensor cores included), `single` (one product is not zero,
            so only the scale's product rounds), `integer` (nothing as long as they stay below 2**24).
        present: bool [E], experts that are there; the others add nothing.
    """
    shape, num_tokens = experts.shape, len(x)
    p = torch.zeros(num_tokens, shape.top_k, shape.hidden_size, dtype=torch.float64, device=x.device)
    error = torch.zeros_like(p)
    for expert in torch.unique(top_k_index).tolist():
        if present is None or bool(present[expert]):
            token, place = torch.where(top_k_index == expert)
            p[token, place], error[token, place] = _expert(experts, expert, x[token].double(), rounding, sums)
    weights = top_k_weights.double().unsqueeze(-1)
    y, total = (weights * p).sum(1), (weights * p).abs().sum(1)
    lost = (weights.abs() * error).sum(1) + _joined(total, (shape.top_k + 1) * U32 * total, sums, 2.0, y)
    if rounding.everything:
        lost = lost + (shape.top_k + 2) * U16 * total
    return Interval((y - lost).bfloat16(), (y + lost).bfloat16(), y)


def _expert(experts: Experts, expert: int, x: Tensor, rounding: Rounding, sums: str) -> tuple[Tensor, Tensor]:
    """down(h) of one expert for rows x [n, H], and how far FP32 and roundings on the way may lead from it."""
    value, error = _product(x, _weight(experts, "gate_up", expert, rounding), sums)
    value, error = _leave(value, error, experts.bias("gate_up", expert), rounding, sums)
    h, lost = _activate(experts.shape.activation, value, error, sums)
    if rounding.everything:  # the activation's steps, and what the rounding of an exponential's argument makes of it
        lost = lost + U16 * (5 + 2 * value.chunk(2, dim=-1)[0].abs().clamp(max=60)) * h.abs()
    h, flip = _round(h, lost)
    down = _weight(experts, "down", expert, rounding)
    p, error = _product(h, down, sums)
    flips = flip @ down.abs().T
    if sums == "float":  # random data: few of those that may flip do, and not all in the same direction
        flips = torch.minimum(flips, 4 * (flip**2 @ (down**2).T).sqrt())
    return _leave(p, error + flips, experts.bias("down", expert), rounding, sums)


def _weight(experts: Experts, name: str, expert: int, rounding: Rounding) -> Tensor:
    weight = experts.weight(name, expert)
    return weight.bfloat16().double() if rounding.weights else weight


def _product(x: Tensor, weight: Tensor, sums: str) -> tuple[Tensor, Tensor]:
    """x @ weight.T and the bound of its error, [n, rows] both."""
    total = x @ weight.T
    if sums != "float":
        return total, _joined(x.abs() @ weight.abs().T, 2 * U32 * total.abs(), sums, 1.0, total)
    # FP32 sums in any order wander like the square root of their length, and a tensor core cuts off each of K / 16
    # sums: by at most 2^-23 of what it has so far, by half of that in the mean, and so far it has half in the mean.
    columns = x.shape[1]
    spread = (x**2 @ (weight**2).T).sqrt()
    return total, U32 * (2 * columns**0.5 + columns / 16) * torch.maximum(spread, total.abs())


def _leave(total: Tensor, error: Tensor, bias: Tensor | None, rounding: Rounding, sums: str) -> tuple[Tensor, Tensor]:
    """A product as it leaves: with its bias, and rounded where the backend does that."""
    if rounding.products and not rounding.everything:  # the bias is added to what has been rounded
        total, error = _round(total, error)
    if bias is not None:
        size = total.abs() + bias.abs()
        total = total + bias
        error = error + _joined(size, 2 * U32 * size, sums, 1.0, total)
    if not rounding.everything:
        return total, error
    return _round(total, error + U16 * total.abs())  # a library may add partial sums in BF16 first


def _round(value: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    """What is known to within an error, rounded to BF16, and how far from that another rounding can be."""
    rounded = value.bfloat16().double()
    above, below = (value + error).bfloat16().double(), (value - error).bfloat16().double()
    return rounded, torch.maximum(above - rounded, rounded - below)


def _joined(worst: Tensor, error: Tensor, sums: str, parts: float, value: Tensor) -> Tensor:
    """The error of a sum: none where float32 holds all of it, as integers (or `1 / parts`) or one product."""
    if sums == "integer":
        return torch.where(parts * worst < LIMIT, 0, error)
    return torch.where(value.float().double() == value, 0, error) if sums == "single" else error


def _activate(kind: Activation, value: Tensor, error: Tensor, sums: str) -> tuple[Tensor, Tensor]:
    """h before its rounding and the bound of its error, from gate and up rows side by side [n, 2I]."""
    (gate, up), (gate_error, up_error) = value.chunk(2, dim=-1), error.chunk(2, dim=-1)
    if kind == Activation.clamped:
        gate, up = gate.clamp(max=CLAMP_LIMIT), up.clamp(-CLAMP_LIMIT, CLAMP_LIMIT) + 1
        bent = gate * torch.sigmoid(CLAMP_ALPHA * gate)
    elif kind == Activation.silu:
        bent = gate * torch.sigmoid(gate)
    else:
        bent = torch.nn.functional.gelu(gate, approximate="tanh" if kind == Activation.gelu_tanh else "none")
    own = (8 * U32 + 2 * U32 * gate.abs()) * bent.abs()  # of exp and of the division by 1 + exp
    if kind in (Activation.gelu, Activation.gelu_tanh):
        own = own + 8 * U32 * gate.abs()  # 1 + erf and 1 + tanh cancel for negative arguments
    if sums != "float" and kind != Activation.clamped:
        own = torch.where(gate >= 20, 0, own)  # the sigmoid is 1 in float32 from 17 on
        bent = torch.where(gate >= 20, gate, bent)
    h = bent * up
    lost = STEEPEST * gate_error * (up.abs() + up_error) + bent.abs() * up_error + own * up.abs()
    return h, lost + _joined(h.abs(), 2 * U32 * h.abs(), sums, 1.0, h)
