"""The dense steps of a decoding pass as the library's own modules compute them, in torch operations on any device."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from runtime.kernels.rows import Routing, StepLog


class TorchRows:
    """See `RowOps`: the same, of any shapes; a row's bits are those that torch's products give it."""

    def fits_linear(self, weight: Tensor) -> bool:
        """See `RowOps`."""
        return True

    def fits_norm(self, width: int) -> bool:
        """See `RowOps`."""
        return True

    def fits_attention(self, size: int, groups: int) -> bool:
        """See `RowOps`."""
        return True

    def fits_router(self, num_experts: int, top_k: int) -> bool:
        """See `RowOps`."""
        return True

    def linear(self, weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
        """See `RowOps`."""
        return F.linear(x, weight, bias)

    def add(self, weight: Tensor, bias: Tensor | None, x: Tensor, residual: Tensor) -> Tensor:
        """See `RowOps`."""
        return residual + F.linear(x, weight, bias)

    def join(self, weight: Tensor, x: Tensor, residual: Tensor, routed: Tensor, gate: Tensor | None) -> Tensor:
        """See `RowOps`."""
        shared = F.linear(x, weight)
        return residual + (routed + (shared if gate is None else torch.sigmoid(gate) * shared))

    def swiglu(self, weight: Tensor, x: Tensor, beside: bool = False) -> Tensor:
        """See `RowOps`."""
        gate, up = F.linear(x, weight).chunk(2, -1)
        return F.silu(gate) * up

    def norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor | None = None) -> Tensor:
        """See `RowOps`."""
        groups = x.reshape(len(x), -1, len(weight))
        if bias is not None:
            y = F.layer_norm(groups, weight.shape, weight, bias, eps)
        else:
            wide = groups.float()
            y = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
        return y.flatten(-2) if out is None else out.copy_(y.flatten(-2))

    def rotate(
        self,
        qkv: Tensor,
        cosine: Tensor,
        sine: Tensor,
        positions: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        """See `RowOps`."""
        key_heads, _, size = keys.shape
        heads = qkv.reshape(len(qkv), -1, size)
        turned, new_values = heads[:, :-key_heads], heads[:, -key_heads:]
        rotated = cosine.shape[-1]
        part, rest = turned[..., :rotated], turned[..., rotated:]
        left, right = part.chunk(2, -1)
        part = part * cosine[:, None] + torch.cat((-right, left), -1) * sine[:, None]
        turned = torch.cat((part, rest), -1)
        keys.index_copy_(1, positions, turned[:, -key_heads:].transpose(0, 1))
        values.index_copy_(1, positions, new_values.transpose(0, 1))
        return turned[:, :-key_heads].contiguous()

    def attend(
        self, q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, length: int, scale: float, window: int | None
    ) -> Tensor:
        """See `RowOps`."""
        rows, heads, size = q.shape
        key_heads = len(keys)
        grouped = q.view(rows, key_heads, heads // key_heads, size).permute(1, 2, 0, 3).flatten(1, 2)
        at = torch.arange(length, device=q.device)
        seen = at <= positions[:, None]
        if window is not None:
            seen &= at > positions[:, None] - window
        mask = seen.repeat(heads // key_heads, 1)[None]
        y = F.scaled_dot_product_attention(
            grouped[None], keys[None, :, :length], values[None, :, :length], attn_mask=mask, scale=scale
        )[0]
        return y.reshape(key_heads, -1, rows, size).permute(2, 0, 1, 3).flatten(1)

    def route(self, logits: Tensor, to: Routing, renormalise: bool, round_weights: bool) -> None:
        """See `RowOps`."""
        weights, index = torch.topk(logits.float().softmax(-1), to.index.shape[-1], dim=-1)
        if renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        to.index.copy_(index)
        to.weights.copy_(weights.to(logits.dtype) if round_weights else weights)
        if to.seen is not None:
            to.seen.copy_(to.index)

    def advance(self, logits: Tensor, log: StepLog) -> None:
        """See `RowOps`."""
        number, token = int(log.state[2]), int(logits[0].float().argmax())
        log.tokens[number] = token
        log.routes[number] = log.chosen[:, 0]
        log.state.copy_(torch.tensor([token, int(log.state[1]) + 1, number + 1]))
