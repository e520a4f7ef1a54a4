"""How much the loss would feel the rounding of each linear: squared gradient times squared INT4 error.

One decoder layer is in memory at a time. The forward pass has left every layer's inputs on disk; the backward pass goes
through the layers from the last to the first, computes a layer again from its inputs, and hands the gradient of these
inputs on. The gradient of a linear's weights over one sequence is weighed with the rounding error, squared and summed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from moespeq_cli.profile.measure import TextSequence
from moespeq_cli.profile.modules import HEAD
from moespeq_cli.profile.scores import WAITING_BYTES, Factors, Place, Scores, Waiting, rounding_error
from runtime.artifacts.profile import EXPERT_LINEARS, expert_linear
from runtime.model.experts import Compute, combine, sorted_tokens
from runtime.model.families import LayerExperts
from runtime.model.stream import LayerStream, StreamedLayer

HEAD_TOKENS = 256  # whose logits, and what they are differentiated through, are in memory at a time
Take = Callable[[Tensor, Tensor], None]


class _Probed(torch.autograd.Function):
    """A linear that gives the factors of its weights' gradient to `take` and computes none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, take: Take) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.take = take
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        x, weight = ctx.saved_tensors
        ctx.take(gradients[0].detach(), x.detach())
        return gradients[0] @ weight, None, None, None


def probed_linear(x: Tensor, weight: Tensor, bias: Tensor | None, take: Take) -> Tensor:
    """`F.linear` of [m, in]; in the backward pass `take` gets d loss / d outputs, [m, out], and `x`."""
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
        waiting = Waiting(scores, lambda _: weight)
        for sequence, (domain, text) in enumerate(zip(self.domain, self.sequences, strict=True)):
            states = self._moved(hidden(sequence)).requires_grad_()
            with torch.enable_grad():
                normed = self.stream.normed(states)
            loss, before, factors = self._loss(domain, normed.detach(), text.input_ids[1:])
            waiting.add((HEAD, None), factors)
            waiting.settle(WAITING_BYTES)
            gradients.append(torch.autograd.grad(normed, states, before)[0].cpu())
            losses[domain] += loss
        waiting.settle()
        return scores, gradients, losses

    def _loss(self, domain: int, normed: Tensor, following: Tensor) -> tuple[float, Tensor, Factors]:
        """A sequence's loss, d loss / d `normed` [T, H], and the factors of the head's gradient."""
        count = len(following)
        before = torch.zeros_like(normed)
        outputs = normed.new_empty(count, len(self.stream.head_weight))
        total = 0.0
        for start in range(0, count, HEAD_TOKENS):
            rows = slice(start, min(start + HEAD_TOKENS, count))
            leaf = normed[rows].requires_grad_()
            with torch.enable_grad():
                logits = self.stream.head(leaf)
                loss = F.cross_entropy(logits.float(), following[rows].to(logits.device), reduction="sum")
            before[rows], outputs[rows] = torch.autograd.grad(loss, [leaf, logits])
            total += float(loss.detach())
        return total, before, Factors(domain, outputs.div_(self.stream.logits_scale), normed[:count])

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
            errors[name] = rounding_error(weight)
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
            if experts is not None:
                experts.waiting.settle(WAITING_BYTES)
        if experts is not None:
            experts.waiting.settle()
        return scores, gradients

    def _moved(self, tensor: Tensor) -> Tensor:
        """On the stream's device, in its type."""
        return tensor.to(self.stream.device, self.stream.dtype)


class _Experts:
    """The routed experts of the current layer, and the gradients of their weights that wait to be counted."""

    def __init__(self, layer: StreamedLayer, scores: Scores, dtype: torch.dtype) -> None:
        self.layer, self.dtype = layer, dtype
        assert layer.experts is not None
        self.waiting = Waiting(scores, partial(_expert_weight, layer.experts))
        for projection in EXPERT_LINEARS:
            stack: Tensor = getattr(layer.experts, projection)
            scores.open(expert_linear(layer.layer_id, projection), *stack.shape[:2])

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

        def take(projection: str, outputs: Tensor, inputs: Tensor) -> None:
            place = expert_linear(self.layer.layer_id, projection), expert_id
            self.waiting.add(place, Factors(domain, outputs, inputs))

        def take_gate_up(outputs: Tensor, inputs: Tensor) -> None:
            for projection, half in zip(("gate_proj", "up_proj"), outputs.chunk(2, dim=1), strict=True):
                take(projection, half, inputs)

        assert self.layer.math is not None
        between = self.layer.math.gate(probed_linear(x, gate_up, gate_up_bias, take_gate_up))
        return probed_linear(between, down, down_bias, partial(take, "down_proj"))


def _expert_weight(experts: LayerExperts, place: Place) -> Tensor:
    name, expert_id = place
    stack: Tensor = getattr(experts, name.rpartition(".")[2])
    return stack[expert_id]


def _no_experts(*_: Tensor) -> Tensor:
    raise AssertionError("a dense layer has no routed experts")
