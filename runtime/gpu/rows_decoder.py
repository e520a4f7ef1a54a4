"""A decoding pass in few launches: the library's layers taken apart, and their dense parts computed by `RowOps`.

The library's own pass over a few rows is some sixty launches a layer, nearly all of them shorter than a launch takes.
Here products that read the same rows are one product, what follows a product elementwise is done where its sums are,
and norms, rotary positions with the KV, attention and routers are a launch each. Parts of other kinds (attention over
latents, other routers, the head) stay the library's modules; a model that is put together in another way is left to the
library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from runtime.kernels.rows import Routing, RowOps
from runtime.model.kv import SharedKv
from runtime.model.loader import cache_argument, decoder_layers

PLAIN = ("qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "phimoe", "deepseek_v2")
"""Model types whose layers are norm, attention, sum, norm, experts or linears, sum, and nothing else."""

_SOFTMAX = {"qwen2_moe": True, "qwen3_moe": True, "olmoe": True, "mixtral": False}
"""Model types whose router is a softmax and its top k, and whether the weights are rounded to BF16."""
_WINDOW_OF_ALL = ("mixtral", "olmoe")  # whose window stands in the configuration and is that of every layer


class RowExperts(Protocol):
    """Computes the routed experts of a layer inside a decoding pass.

    Attributes:
        ahead: whether they are queued before the shared ones, which then run beside them. Otherwise the shared ones
            come first, so that there is something to compute while experts are looked for.
    """

    ahead: bool

    def compute(self, place: int, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """See `LayerExperts`."""

    def routing(self, place: int, rows: int) -> Routing:
        """Where a router may write what it chose for a layer's rows; `routed` then computes them."""

    def routed(self, place: int, hidden: Tensor) -> Tensor:
        """The weighted sum of each row's experts, bfloat16 [rows, H], as `routing` says."""


@dataclass(frozen=True, slots=True)
class _Here:
    """The pass at hand."""

    positions: Tensor
    length: int
    tables: Any  # rotary
    experts: RowExperts


class _Norm:
    def __init__(self, module: Any, ops: RowOps) -> None:
        self._module = module
        self.eps = float(module.eps if isinstance(module, nn.LayerNorm) else module.variance_epsilon)
        self._ops = ops

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        bias = getattr(self._module, "bias", None)
        return self._ops.norm(x, self._module.weight, bias, self.eps, out)


class _HeadAttention:
    """Queries, keys and values of heads, with or without norms of their own."""

    def __init__(self, module: Any, kv: SharedKv, ops: RowOps, window: int | None) -> None:
        self._module, self._kv, self._ops, self._window = module, kv, ops, window
        parts = [module.q_proj, module.k_proj, module.v_proj]
        self._weight = _joined(parts, "weight")
        self._bias = _joined(parts, "bias") if module.q_proj.bias is not None else None
        self._widths = [len(part.weight) for part in parts]
        self._norms = [_Norm(getattr(module, name), ops) for name in ("q_norm", "k_norm") if hasattr(module, name)]

    def __call__(self, h: Tensor, x: Tensor, here: _Here) -> Tensor:
        ops, module = self._ops, self._module
        qkv = ops.linear(self._weight, self._bias, x)
        parts: tuple[Tensor, ...] = torch.split(qkv, self._widths, 1)
        for norm, part in zip(self._norms, parts, strict=False):
            norm(part, out=part)
        keys, values = self._kv.heads(module.layer_idx, self._widths[1] // module.head_dim, module.head_dim, x)
        cosine, sine = (table[0] for table in here.tables)
        q = ops.rotate(qkv, cosine, sine, here.positions, keys, values)
        y = ops.attend(q, keys, values, here.positions, here.length, module.scaling, self._window)
        return ops.add(module.o_proj.weight, module.o_proj.bias, y, h)


class _LibraryAttention:
    def __init__(self, module: Any, kv: SharedKv) -> None:
        self._module, self._named = module, {cache_argument(module) or "past_key_values": kv}

    def __call__(self, h: Tensor, x: Tensor, here: _Here) -> Tensor:
        y: Tensor = self._module(
            hidden_states=x[None], attention_mask=None, position_embeddings=here.tables, **self._named
        )[0]
        return h + y[0]


class _Linears:
    """A gated pair of linears and one more, of a dense layer or of shared experts."""

    def __init__(self, module: Any, ops: RowOps) -> None:
        self._down: Tensor = module.down_proj.weight
        self._gate_up = _joined([module.gate_proj, module.up_proj], "weight")
        self._ops = ops

    def __call__(self, h: Tensor, x: Tensor, here: _Here) -> Tensor:
        return self._ops.add(self._down, None, self.inner(x), h)

    def inner(self, x: Tensor, beside: bool = False) -> Tensor:
        return self._ops.swiglu(self._gate_up, x, beside)

    def join(self, h: Tensor, inner: Tensor, routed: Tensor, gate: Tensor | None) -> Tensor:
        return self._ops.join(self._down, inner, h, routed, gate)


class _Experts:
    """Router, routed experts, and shared ones where there are any."""

    def __init__(self, module: Any, place: int, ops: RowOps, router: bool | None, shared: _Linears | None) -> None:
        self._place, self._ops, self._round, self.shared = place, ops, router, shared
        self._gate: Any = module.gate if hasattr(module, "gate") else module.router
        self._num_experts = len(self._gate.weight)
        parts = [self._gate]
        self._has_gate = hasattr(module, "shared_expert_gate")
        if self._has_gate:
            parts.append(module.shared_expert_gate)
        self._weight = None if router is None else _joined(parts, "weight")

    def __call__(self, h: Tensor, x: Tensor, here: _Here) -> Tensor:
        if self._weight is None:
            _, weights, index = self._gate(x)
            inner, routed = self._both(x, here, lambda: here.experts.compute(self._place, x, index, weights))
            return self._sum(h, inner, routed, None)
        logits = self._ops.linear(self._weight, None, x)
        renormalise = getattr(self._gate, "norm_topk_prob", True)
        to = here.experts.routing(self._place, len(x))
        self._ops.route(logits[:, : self._num_experts], to, renormalise, bool(self._round))
        inner, routed = self._both(x, here, lambda: here.experts.routed(self._place, x))
        return self._sum(h, inner, routed, logits[:, self._num_experts :] if self._has_gate else None)

    def _both(self, x: Tensor, here: _Here, experts: Callable[[], Tensor]) -> tuple[Tensor | None, Tensor]:
        """What the shared experts' first product gives, and the routed ones."""
        if self.shared is None:
            return None, experts()
        if here.experts.ahead:
            routed = experts()
            return self.shared.inner(x, beside=True), routed
        inner = self.shared.inner(x)
        return inner, experts()

    def _sum(self, h: Tensor, inner: Tensor | None, routed: Tensor, gate: Tensor | None) -> Tensor:
        if self.shared is None or inner is None:
            return h + routed
        return self.shared.join(h, inner, routed, gate)


@dataclass(frozen=True, slots=True)
class _Layer:
    before: _Norm
    attention: Callable[[Tensor, Tensor, _Here], Tensor]
    between: _Norm
    mlp: Callable[[Tensor, Tensor, _Here], Tensor]


class RowsDecoder:
    """Passes of a model over a few rows.

    Args:
        model: of the library; weights that are read together move into one tensor, of which the modules' own become
            views.
        moe_layers: true numbers of the layers with experts.
        kv: the cache.
        ops: what computes.

    Attributes:
        shares: whether any layer has shared experts.
    """

    def __init__(self, model: Any, moe_layers: Sequence[int], kv: SharedKv, ops: RowOps) -> None:
        self._model = model
        places = {layer_id: place for place, layer_id in enumerate(moe_layers)}
        self._layers = [
            _Layer(
                _Norm(layer.input_layernorm, ops),
                _attention(layer.self_attn, model.config, kv, ops),
                _Norm(layer.post_attention_layernorm, ops),
                _mlp(layer.mlp, places.get(layer_id), model.config, ops),
            )
            for layer_id, layer in enumerate(decoder_layers(model))
        ]
        self._norm = _Norm(model.model.norm, ops)
        self.shares = any(isinstance(layer.mlp, _Experts) and layer.mlp.shared is not None for layer in self._layers)

    @staticmethod
    def accepts(model: Any, ops: RowOps) -> bool:
        """Whether a model's layers are put together as this class does it, in sizes that the operations take."""
        config = model.config
        if config.model_type not in PLAIN or getattr(config, "clip_qkv", None) is not None:
            return False
        layers: list[Any] = decoder_layers(model)
        norms = [n for layer in layers for n in (layer.input_layernorm, layer.post_attention_layernorm)]
        norms.append(model.model.norm)
        shared = [part for layer in layers if (part := _shared_of(layer.mlp)) is not None]
        dense = [layer.mlp for layer in layers if not hasattr(layer.mlp, "experts")]
        weights = [part.weight for one in (*shared, *dense) for part in (one.gate_proj, one.up_proj, one.down_proj)]
        biased = any(
            part.bias is not None for one in (*shared, *dense) for part in one.children() if hasattr(part, "bias")
        )
        gated = [layer.mlp for layer in layers if hasattr(layer.mlp, "shared_expert_gate")]  # by the router's product
        silu = config.hidden_act in ("silu", "swish") or not (shared or dense)
        even = all(ops.fits_norm(len(norm.weight)) and _whole(norm) for norm in norms)
        routed = all(_router(mlp, config, ops) is not None for mlp in gated)
        return silu and even and routed and not biased and all(map(ops.fits_linear, weights))

    def logits(self, ids: Tensor, positions: Tensor, length: int, experts: RowExperts) -> Tensor:
        """Queue a pass.

        Args:
            ids, positions: int64 [rows] on the device, read while the pass runs.
            length: beyond all positions.
            experts: of every layer.

        Returns:
            Logits [rows, vocab_size].
        """
        inner = self._model.model
        h = inner.embed_tokens(ids)
        here = _Here(positions, length, inner.rotary_emb(h[None], position_ids=positions[None]), experts)
        for layer in self._layers:
            h = layer.attention(h, layer.before(h), here)
            h = layer.mlp(h, layer.between(h), here)
        head: Tensor = self._model.lm_head(self._norm(h))
        return head


def _whole(norm: Any) -> bool:
    return not isinstance(norm, nn.LayerNorm) or norm.bias is not None


def _attention(module: Any, config: Any, kv: SharedKv, ops: RowOps) -> Any:
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    if config.model_type == "deepseek_v2" or not all(ops.fits_linear(getattr(module, name).weight) for name in names):
        return _LibraryAttention(module, kv)
    norms = [getattr(module, name) for name in ("q_norm", "k_norm") if hasattr(module, name)]
    size = module.head_dim
    groups = len(module.q_proj.weight) // len(module.k_proj.weight)
    if not ops.fits_attention(size, groups) or not all(ops.fits_norm(len(norm.weight)) for norm in norms):
        return _LibraryAttention(module, kv)
    window = getattr(module, "sliding_window", None)
    if config.model_type in _WINDOW_OF_ALL:
        window = getattr(config, "sliding_window", None)
    return _HeadAttention(module, kv, ops, window)


def _mlp(module: Any, place: int | None, config: Any, ops: RowOps) -> Any:
    if place is None:
        return _Linears(module, ops)
    shared = _shared_of(module)
    linears = None if shared is None else _Linears(shared, ops)
    return _Experts(module, place, ops, _router(module, config, ops), linears)


def _router(module: Any, config: Any, ops: RowOps) -> bool | None:
    """Whether the router's weights are rounded to BF16; None where the library's module routes."""
    rounded = _SOFTMAX.get(config.model_type)
    if rounded is None:
        return None
    weight: Tensor = module.gate.weight
    fits = ops.fits_router(len(weight), module.gate.top_k) and ops.fits_linear(weight)
    return rounded if fits else None


def _shared_of(module: Any) -> Any:
    return getattr(module, "shared_expert", None) or getattr(module, "shared_experts", None)


def _joined(modules: Sequence[Any], name: str) -> Tensor:
    """Parameters one below the other in one tensor, of which they become views."""
    parts: list[Tensor] = [getattr(module, name).detach() for module in modules]
    if len(parts) == 1:
        return parts[0]
    whole = torch.cat(parts)
    for module, view in zip(modules, torch.split(whole, [len(part) for part in parts]), strict=True):
        setattr(module, name, nn.Parameter(view, requires_grad=False))
    return whole
