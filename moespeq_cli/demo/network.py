"""The demo model for training: parameters map one to one onto transformers' `Qwen2MoeForCausalLM`.

Weights are float32 masters, used in the type of the activations. Experts are computed in one of two ways:

    dense    every expert on every token, the unrouted ones weighted by zero; three large products
    grouped  only the routed ones, tokens sorted by expert and one grouped product a projection
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

EXPERT_MODES = ("dense", "grouped")


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the model, under the names of transformers' configuration."""

    vocab_size: int = 4096
    hidden_size: int = 256
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    num_experts: int = 16
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 128
    shared_expert_intermediate_size: int = 256
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads


class Routing(NamedTuple):
    """What the router of one layer did: scalars of the two losses, and each row's load of every expert."""

    balance: Tensor
    z: Tensor
    load: Tensor  # [rows, num_experts], share of the row's tokens that chose the expert


class Losses(NamedTuple):
    """Mean loss of every row, and the layers' routing: losses summed, loads stacked [layers, rows, num_experts]."""

    rows: Tensor
    balance: Tensor
    z: Tensor
    loads: Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear map computed in the type of `x`."""
    return functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


class RMSNorm(nn.Module):
    """Root mean square normalisation in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """The normalised and scaled rows."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight.to(x.dtype) * wide.to(x.dtype)


class _Gather(torch.autograd.Function):
    """Rows of x in the order of experts; its gradient is a gather too, where indexing would add atomically."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, slot: Tensor) -> Tensor:
        ctx.save_for_backward(slot)
        return x[token]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (slot,) = ctx.saved_tensors
        return grads[0][slot].sum(1), None, None


class _Combine(torch.autograd.Function):
    """The outputs of a token's experts, taken back from the order of experts."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, order: Tensor, slot: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return y[slot]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (order,) = ctx.saved_tensors
        return grads[0].flatten(0, 1)[order], None, None


class Experts(nn.Module):
    """The routed experts of one layer, fused as transformers stores them."""

    def __init__(self, shape: Shape, mode: str) -> None:
        super().__init__()
        self.mode, self.num_experts = mode, shape.num_experts
        inner, hidden = shape.moe_intermediate_size, shape.hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(shape.num_experts, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(shape.num_experts, hidden, inner))

    def forward(self, x: Tensor, weight: Tensor, index: Tensor) -> Tensor:
        """The weighted sum of each token's experts; x [tokens, hidden], weight and index [tokens, top_k]."""
        return self._dense(x, weight, index) if self.mode == "dense" else self._grouped(x, weight, index)

    def _dense(self, x: Tensor, weight: Tensor, index: Tensor) -> Tensor:
        tokens = x.shape[0]
        spread = torch.zeros(tokens, self.num_experts, dtype=x.dtype, device=x.device).scatter(1, index, weight)
        gate, up = linear(x, self.gate_up_proj.flatten(0, 1)).view(tokens, self.num_experts, 2, -1).unbind(2)
        inner = functional.silu(gate) * up * spread[:, :, None]
        return linear(inner.flatten(1), self.down_proj.permute(1, 0, 2).flatten(1))

    def _grouped(self, x: Tensor, weight: Tensor, index: Tensor) -> Tensor:
        tokens, top_k = index.shape
        flat = index.flatten()
        order = torch.argsort(flat, stable=True)
        positions = torch.arange(tokens * top_k, device=x.device)
        slot = torch.empty_like(order).scatter_(0, order, positions).view(tokens, top_k)
        counts = (flat[:, None] == torch.arange(self.num_experts, device=x.device)).sum(0)
        ends = counts.cumsum(0).to(torch.int32)
        by_expert = _Gather.apply(x, order // top_k, slot)  # type: ignore[no-untyped-call]
        gate_up = self.gate_up_proj.to(x.dtype).transpose(1, 2)
        gate, up = torch._grouped_mm(by_expert, gate_up, offs=ends).chunk(2, -1)
        y = torch._grouped_mm(functional.silu(gate) * up, self.down_proj.to(x.dtype).transpose(1, 2), offs=ends)
        back: Tensor = _Combine.apply(y, order, slot)  # type: ignore[no-untyped-call]
        return (back * weight[:, :, None]).sum(1)


class Block(nn.Module):
    """One decoder layer: grouped-query attention, then routed experts and one shared expert."""

    def __init__(self, shape: Shape, mode: str) -> None:
        super().__init__()
        self.shape = shape
        hidden, head = shape.hidden_size, shape.head_dim
        shared = shape.shared_expert_intermediate_size
        self.input_layernorm = RMSNorm(hidden, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(hidden, shape.rms_norm_eps)
        self.q_proj = nn.Linear(hidden, shape.num_attention_heads * head)
        self.k_proj = nn.Linear(hidden, shape.num_key_value_heads * head)
        self.v_proj = nn.Linear(hidden, shape.num_key_value_heads * head)
        self.o_proj = nn.Linear(shape.num_attention_heads * head, hidden, bias=False)
        self.router = nn.Parameter(torch.empty(shape.num_experts, hidden))
        self.experts = Experts(shape, mode)
        self.shared_gate_proj = nn.Linear(hidden, shared, bias=False)
        self.shared_up_proj = nn.Linear(hidden, shared, bias=False)
        self.shared_down_proj = nn.Linear(shared, hidden, bias=False)
        self.shared_expert_gate = nn.Linear(hidden, 1, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Routing]:
        """The new residual stream [rows, tokens, hidden] and what the router did."""
        x = x + self.attention(self.input_layernorm(x), cos, sin)
        hidden = self.post_attention_layernorm(x)
        weight, index, routing = self.route(hidden)
        flat = hidden.flatten(0, 1)
        y = self.experts(flat, weight.to(flat.dtype), index)
        inner = functional.silu(linear(flat, self.shared_gate_proj.weight)) * linear(flat, self.shared_up_proj.weight)
        shared = linear(inner, self.shared_down_proj.weight)
        y = y + torch.sigmoid(linear(flat, self.shared_expert_gate.weight)) * shared
        return x + y.view(x.shape), routing

    def attention(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Causal attention with rotary positions."""
        rows, tokens, _ = x.shape

        def heads(projection: nn.Linear) -> Tensor:
            return linear(x, projection.weight, projection.bias).view(rows, tokens, -1, self.shape.head_dim)

        def rotated(v: Tensor) -> Tensor:
            first, second = v.chunk(2, -1)
            return v * cos + torch.cat((-second, first), -1) * sin

        repeats = self.shape.num_attention_heads // self.shape.num_key_value_heads
        q, k, v = rotated(heads(self.q_proj)), rotated(heads(self.k_proj)), heads(self.v_proj)
        k, v = (part.repeat_interleave(repeats, dim=2) for part in (k, v))
        y = functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        return linear(y.transpose(1, 2).reshape(rows, tokens, -1), self.o_proj.weight)

    def route(self, hidden: Tensor) -> tuple[Tensor, Tensor, Routing]:
        """Weights and experts of every token [rows * tokens, top_k]; the weights are not renormalised."""
        shape = self.shape
        rows, tokens, _ = hidden.shape
        logits = linear(hidden.flatten(0, 1), self.router).float()
        probs = logits.softmax(-1)
        weight, index = probs.topk(shape.num_experts_per_tok, -1)
        chosen = (index[:, :, None] == torch.arange(shape.num_experts, device=hidden.device)).sum(1)
        load = chosen.view(rows, tokens, -1).float().mean(1)
        balance = shape.num_experts / shape.num_experts_per_tok * (load.mean(0) * probs.mean(0)).sum()
        return weight, index, Routing(balance, logits.logsumexp(-1).pow(2).mean(), load.detach())


class DemoModel(nn.Module):
    """The whole model, with tied embeddings."""

    def __init__(self, shape: Shape, mode: str = "dense") -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Block(shape, mode) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.initialise()

    @torch.no_grad()
    def initialise(self) -> None:
        """Normal weights, smaller where a layer adds to the residual stream; biases zero, norms one."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif "norm" not in name:
                adds = name.endswith(("o_proj.weight", "down_proj", "down_proj.weight"))
                parameter.normal_(0, 0.02 / math.sqrt(2 * self.shape.num_hidden_layers) if adds else 0.02)

    def compile_layers(self) -> None:
        """Compile one block, whose code all layers share, and the head."""
        torch._dynamo.config.cache_size_limit = 64
        for layer in self.layers:
            layer.forward = torch.compile(layer.forward, dynamic=False)
        self.row_losses = torch.compile(self.row_losses, dynamic=False)  # type: ignore[method-assign]

    def forward(self, ids: Tensor, targets: Tensor, dtype: torch.dtype) -> Losses:
        """Losses of rows [rows, tokens] whose next tokens are `targets`, computed in `dtype`."""
        x, routings = self.backbone(ids, dtype)
        balance = torch.stack([routing.balance for routing in routings]).sum()
        z = torch.stack([routing.z for routing in routings]).sum()
        return Losses(self.row_losses(x, targets), balance, z, torch.stack([routing.load for routing in routings]))

    def backbone(self, ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, list[Routing]]:
        """The residual stream after the last layer, and every layer's routing."""
        x = functional.embedding(ids, self.embed_tokens.weight).to(dtype)
        cos, sin = self.rotary(ids.shape[1], ids.device, dtype)
        routings = []
        for layer in self.layers:
            x, routing = layer(x, cos, sin)
            routings.append(routing)
        return x, routings

    def row_losses(self, x: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy of every row, in nats."""
        logits = linear(self.norm(x), self.embed_tokens.weight)
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
        return loss.view(targets.shape).mean(1)

    def logits(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Next-token logits [rows, tokens, vocab]."""
        return linear(self.norm(self.backbone(ids, dtype)[0]), self.embed_tokens.weight)

    def rotary(self, tokens: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine of the rotary positions, [1, tokens, 1, head_dim]."""
        head = self.shape.head_dim
        inverse = 1.0 / self.shape.rope_theta ** (torch.arange(0, head, 2, device=device).float() / head)
        angles = torch.outer(torch.arange(tokens, device=device).float(), inverse)
        angles = torch.cat((angles, angles), -1)
        return angles.cos().to(dtype)[None, :, None], angles.sin().to(dtype)[None, :, None]
