"""How much the loss would feel the rounding of each linear: squared gradient times squared INT4 error.

One decoder layer is in memory at a time. The forward pass has left every layer's inputs on disk; the backward pass goes
through the layers from the last to the first, computes a layer again from its inputs, and hands the gradient of these
inputs on. The gradient of a linear's weights exists for one sequence, is weighed with the rounding error, squared and
summed, and dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from moespeq_cli.profile.measure import TextSequence
from moespeq_cli.profile.modules import HEAD
from moespeq_cli.profile.rounding import rounded
from runtime.model.experts import Compute, combine, sorted_tokens
from runtime.model.stream import LayerStream, StreamedLayer

BITS = 4
KEPT_BYTES = 1 << 30  # of rounding errors of a layer's experts
HEAD_ROWS = 4096  # of the head's weights, which are rounded, and whose gradient is in memory, at a time
Take = Callable[[Tensor], None]


@dataclass(slots=True)
class Scores:
    """Sums over sequences of (gradient x rounding error)^2, by linear.

    Attributes:
        channels: float64 [out], or [num_experts, out] for the routed experts; all domains.
        domains: float64 [num_domains]; all channels.
    """

    num_domains: int
    device: torch.device
    channels: dict[str, Tensor] = field(default_factory=dict)
    domains: dict[str, Tensor] = field(default_factory=dict)

    def open(self, name: str, *shape: int) -> None:
        """Begin a linear, so that one that no token reaches has zeros."""
        self.channels[name] = torch.zeros(*shape, dtype=torch.float64, device=self.device)
        self.domains[name] = torch.zeros(self.num_domains, dtype=torch.float64, device=self.device)

    def add(self, name: str, domain: int, gradient: Tensor, error: Tensor, place: Any = ...) -> None:
        """Count one sequence's gradient, [out, in], of the linear, or of its part at `place`."""
        score = (gradient * error).square_().sum(1, dtype=torch.float64)
        self.channels[name][place] += score
        self.domains[name][domain] += score.sum()

    def tensors(self) -> dict[str, Tensor]:
        """All sums, on the CPU: `channels NAME` and `domains NAME`."""
        tensors = {f"channels {name}": tensor.cpu() for name, tensor in self.channels.items()}
        return tensors | {f"domains {name}": tensor.cpu() for name, tensor in self.domains.items()}


class _Probed(torch.autograd.Function):
    """A linear that gives the gradient of its weights to `take` and keeps none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, take: Take) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.take = take
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        x, weight = ctx.saved_tensors
        ctx.take(gradients[0].T @ x)
        return gradients[0] @ weight, None, None, None


def probed_linear(x: Tensor, weight: Tensor, bias: Tensor | None, take: Take) -> Tensor:
    """`F.linear` of [m, in]; in the backward pass `take` gets d loss / d weight, [out, in], of these tokens."""
    result: Tensor = _Probed.apply(x, weight, bias, take)  # type: ignore[no-untyped-call]
    return result


class SensitivityPass:
    """The backward pass over sequences that `stream` has embedded; arithmetic in the stream's type, float32 at best.

    The loss of a sequence is the sum of the cross entropies of all its tokens after the first, in nats.
    """

    def __init__(self, stream: LayerStream, sequences: Sequence[TextSequence], domain_names: Sequence[str]) -> None:
        self.stream = stream
        self.sequences = sequences
        self.domain = [domain_names.index(sequence.domain) for sequence in sequences]
        self.num_domains = len(domain_names)

    def head(self, hidden: Callable[[int], Tensor]) -> tuple[Scores, list[Tensor], Tensor]:
        """Loss and head.

        Args:
            hidden: gives a sequence's states after the last layer, [T, H].

        Returns:
            The head's scores, one [T, H] d loss / d states a sequence, on the CPU, and the loss by domain, float64
            [num_domains].
        """
        scores, gradients = Scores(self.num_domains, self.stream.device), []
        losses = torch.zeros(self.num_domains, dtype=torch.float64)
        weight = self.stream.head_weight.detach()
        scores.open(HEAD, len(weight))
        error = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
        for start in range(0, len(weight), HEAD_ROWS):  # rounding takes several times what it rounds
            rows = slice(start, start + HEAD_ROWS)
            error[rows] = _rounding_error(weight[rows])
        for sequence, (domain, text) in enumerate(zip(self.domain, self.sequences, strict=True)):
            states = self._moved(hidden(sequence)).requires_grad_()
            with torch.enable_grad():
                normed = self.stream.normed(states)
                leaf = normed.detach().requires_grad_()
                logits = self.stream.head(leaf)
                loss = F.cross_entropy(logits[:-1].float(), text.input_ids[1:].to(logits.device), reduction="sum")
            outputs = torch.autograd.grad(loss, [leaf, logits])
            for start in range(0, len(weight), HEAD_ROWS):
                rows = slice(start, start + HEAD_ROWS)
                gradient = (outputs[1][:, rows].float() / self.stream.logits_scale).T @ leaf.detach().float()
                scores.add(HEAD, domain, gradient, error[rows], rows)
            gradients.append(torch.autograd.grad(normed, states, outputs[0])[0].cpu())
            losses[domain] += float(loss.detach())
        return scores, gradients, losses

    def layer(
        self, layer: StreamedLayer, hidden: Callable[[int], Tensor], gradients: list[Tensor]
    ) -> tuple[Scores, list[Tensor]]:
        """One decoder layer.

        Args:
            layer: the current one.
            hidden: gives a sequence's states before the layer, [T, H].
            gradients: d loss / d states after the layer, one [T, H] a sequence; replaced one by one.

        Returns:
            Scores of the layer's linears by their names without the model's prefix (`layers.3.mlp.gate`), the routed
            experts' together (`layers.3.mlp.experts.down_proj`); and d loss / d states before the layer.
        """
        scores = Scores(self.num_domains, self.stream.device)
        prefix = f"layers.{layer.layer_id}."
        dense = {
            name.removesuffix(".weight"): weight
            for name, weight in layer.module.named_parameters()
            if weight.dim() == 2
        }
        errors = {}
        for name, weight in dense.items():
            scores.open(prefix + name, len(weight))
            errors[name] = _rounding_error(weight)
            weight.requires_grad_()
        experts = _Experts(layer, scores, self.stream.dtype) if layer.is_moe else None
        for sequence, domain in enumerate(self.domain):
            states = self._moved(hidden(sequence)).requires_grad_()
            compute = experts.compute(domain) if experts is not None else _no_experts
            with torch.enable_grad():
                output = layer.run(sequence, states, compute)
            found = torch.autograd.grad(
                output, [states, *dense.values()], self._moved(gradients[sequence]), allow_unused=True
            )
            gradients[sequence] = found[0].detach().cpu()
            for name, gradient in zip(dense, found[1:], strict=True):
                if gradient is not None:
                    scores.add(prefix + name, domain, gradient.float(), errors[name])
        return scores, gradients

    def _moved(self, tensor: Tensor) -> Tensor:
        """On the stream's device, in its type."""
        return tensor.to(self.stream.device, self.stream.dtype)


class _Experts:
    """The routed experts of the current layer, with their rounding errors."""

    def __init__(self, layer: StreamedLayer, scores: Scores, dtype: torch.dtype) -> None:
        self.layer, self.scores, self.dtype = layer, scores, dtype
        weights = layer.experts
        assert weights is not None
        self.names = {p: f"layers.{layer.layer_id}.mlp.experts.{p}" for p in ("gate_proj", "up_proj", "down_proj")}
        self.inner = weights.gate_proj.shape[1]
        for projection, name in self.names.items():
            stack: Tensor = getattr(weights, projection)
            scores.open(name, *stack.shape[:2])
        self.errors: dict[tuple[int, bool], Tensor] = {}
        self.kept_bytes = 0

    def compute(self, domain: int) -> Compute:
        def compute(hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            places, outputs = [], []
            for expert_id, part in sorted_tokens(top_k_index).items():
                places.append(part)
                x = hidden.index_select(0, part // top_k_index.shape[1])
                outputs.append(self._expert(expert_id, domain, x))
            order = torch.cat(places).argsort()
            rows = torch.cat(outputs).index_select(0, order)
            return combine(rows.view(*top_k_index.shape, -1), top_k_weights)

        return compute

    def _expert(self, expert_id: int, domain: int, x: Tensor) -> Tensor:
        gate_up, down, gate_up_bias, down_bias = self.layer.weights(expert_id, self.dtype)
        inner, names, scores = self.inner, self.names, self.scores

        def take_gate_up(gradient: Tensor) -> None:
            gradient, error = gradient.float(), self._error(expert_id, down=False)
            scores.add(names["gate_proj"], domain, gradient[:inner], error[:inner], expert_id)
            scores.add(names["up_proj"], domain, gradient[inner:], error[inner:], expert_id)

        def take_down(gradient: Tensor) -> None:
            scores.add(names["down_proj"], domain, gradient.float(), self._error(expert_id, down=True), expert_id)

        assert self.layer.math is not None
        between = self.layer.math.gate(probed_linear(x, gate_up, gate_up_bias, take_gate_up))
        return probed_linear(between, down, down_bias, take_down)

    def _error(self, expert_id: int, down: bool) -> Tensor:
        """Rounding error of down [H, I] or gate_up [2I, H]; of the first experts kept, of others made each time."""
        if (expert_id, down) in self.errors:
            return self.errors[expert_id, down]
        assert self.layer.experts is not None
        one = self.layer.experts.expert(expert_id)
        weight = one.down_proj if down else torch.cat([one.gate_proj, one.up_proj])
        error = _rounding_error(weight)
        if self.kept_bytes + error.nbytes <= KEPT_BYTES:
            self.errors[expert_id, down] = error
            self.kept_bytes += error.nbytes
        return error


def _rounding_error(weight: Tensor) -> Tensor:
    """What rounding takes from weights [out, in], float32."""
    return weight.float() - rounded(weight, BITS)


def _no_experts(*_: Tensor) -> Tensor:
    raise AssertionError("a dense layer has no routed experts")
