"""Every tensor of a checkpoint by its name on disk: shape and part in the model, without values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Role(StrEnum):
    """What a tensor does; its values follow from it."""

    ones = "ones"
    zeros = "zeros"
    embedding = "embedding"
    head = "head"
    query = "query"
    key = "key"
    latent = "latent"  # DeepSeek's compressed keys and values, and its rotary key
    expand = "expand"  # from the latent to keys and values
    value = "value"
    attention_out = "attention_out"
    router = "router"
    gate = "gate"  # gate and up projections of any feed-forward part
    routed_down = "routed_down"
    shared_down = "shared_down"
    dense_down = "dense_down"
    shared_gate = "shared_gate"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor on disk; `layer_id` is -1 outside the layers."""

    name: str
    shape: tuple[int, ...]
    role: Role
    layer_id: int = -1

    @property
    def stored_bytes(self) -> int:
        """In BF16."""
        return 2 * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Architecture:
    """What the families have in common, under one set of names; `shared_size` is 0 without shared experts."""

    config: Any
    model_type: str
    hidden_size: int
    num_layers: int
    num_experts: int
    top_k: int
    moe_intermediate_size: int
    shared_size: int
    first_moe_layer: int
    num_heads: int
    num_kv_heads: int
    rope_size: int  # of a head's dimensions, those that are rotated
    value_size: int  # of one head

    @classmethod
    def of(cls, config: Any) -> Architecture:
        """Read a configuration of one of the four families."""
        kind = config.model_type
        deepseek, own_size = kind == "deepseek_v2", kind in ("deepseek_v2", "qwen2_moe")
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        experts = {"qwen2_moe": "num_experts", "deepseek_v2": "n_routed_experts"}.get(kind, "num_local_experts")
        return cls(
            config=config,
            model_type=kind,
            hidden_size=config.hidden_size,
            num_layers=config.num_hidden_layers,
            num_experts=getattr(config, experts),
            top_k=config.num_experts_per_tok,
            moe_intermediate_size=config.moe_intermediate_size if own_size else config.intermediate_size,
            shared_size=_shared_size(config),
            first_moe_layer=config.first_k_dense_replace if deepseek else 0,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            rope_size=config.qk_rope_head_dim if deepseek else head_size,
            value_size=config.v_head_dim if deepseek else head_size,
        )

    @property
    def is_latent(self) -> bool:
        """Whether keys and values are compressed (multi-head latent attention)."""
        return self.model_type == "deepseek_v2"

    @property
    def has_layer_norm(self) -> bool:
        """Whether norms subtract the mean and have biases."""
        return self.model_type == "phimoe"

    def tensors(self) -> Iterator[TensorSpec]:
        """All tensors: embedding, layers in order, final norm, head."""
        yield TensorSpec("model.embed_tokens.weight", (self.config.vocab_size, self.hidden_size), Role.embedding)
        for layer_id in range(self.num_layers):
            for name, shape, role in self._layer(layer_id):
                yield TensorSpec(f"model.layers.{layer_id}.{name}", shape, role, layer_id)
        for name, shape, role in self._norm("model.norm"):
            yield TensorSpec(name, shape, role)
        yield TensorSpec("lm_head.weight", (self.config.vocab_size, self.hidden_size), Role.head)
        if getattr(self.config, "lm_head_bias", False):
            yield TensorSpec("lm_head.bias", (self.config.vocab_size,), Role.zeros)

    def _layer(self, layer_id: int) -> Iterator[_Entry]:
        yield from self._norm("input_layernorm")
        yield from self._latent_attention() if self.is_latent else self._attention()
        yield from self._norm("post_attention_layernorm")
        if layer_id < self.first_moe_layer:
            yield from self._feed_forward("mlp", self.config.intermediate_size, Role.dense_down)
        else:
            yield from self._experts()

    def _norm(self, name: str) -> Iterator[_Entry]:
        yield f"{name}.weight", (self.hidden_size,), Role.ones
        if self.has_layer_norm:
            yield f"{name}.bias", (self.hidden_size,), Role.zeros

    def _attention(self) -> Iterator[_Entry]:
        rows, kv_rows = self.num_heads * self.value_size, self.num_kv_heads * self.value_size
        parts = (("q", rows, Role.query), ("k", kv_rows, Role.key), ("v", kv_rows, Role.value))
        output_bias = getattr(self.config, "attention_bias", False)
        for letter, size, role in parts:
            yield f"self_attn.{letter}_proj.weight", (size, self.hidden_size), role
            if output_bias or getattr(self.config, "qkv_bias", False):
                yield f"self_attn.{letter}_proj.bias", (size,), Role.zeros
        yield "self_attn.o_proj.weight", (self.hidden_size, rows), Role.attention_out
        if output_bias:
            yield "self_attn.o_proj.bias", (self.hidden_size,), Role.zeros

    def _latent_attention(self) -> Iterator[_Entry]:
        config, rank = self.config, self.config.kv_lora_rank
        query = config.qk_nope_head_dim + self.rope_size
        expanded = config.qk_nope_head_dim + self.value_size
        yield "self_attn.q_proj.weight", (self.num_heads * query, self.hidden_size), Role.query
        yield "self_attn.kv_a_proj_with_mqa.weight", (rank + self.rope_size, self.hidden_size), Role.latent
        yield "self_attn.kv_a_layernorm.weight", (rank,), Role.ones
        yield "self_attn.kv_b_proj.weight", (self.num_heads * expanded, rank), Role.expand
        yield "self_attn.o_proj.weight", (self.hidden_size, self.num_heads * self.value_size), Role.attention_out

    def _experts(self) -> Iterator[_Entry]:
        sparse = self.model_type in ("mixtral", "phimoe")
        block, names = ("block_sparse_moe", ("w1", "w3", "w2")) if sparse else ("mlp", _PROJECTIONS)
        yield f"{block}.gate.weight", (self.num_experts, self.hidden_size), Role.router
        for expert_id in range(self.num_experts):
            prefix = f"{block}.experts.{expert_id}"
            yield from self._feed_forward(prefix, self.moe_intermediate_size, Role.routed_down, names)
        if self.shared_size:
            shared = "mlp.shared_experts" if self.is_latent else "mlp.shared_expert"
            yield from self._feed_forward(shared, self.shared_size, Role.shared_down)
        if self.model_type == "qwen2_moe":
            yield "mlp.shared_expert_gate.weight", (1, self.hidden_size), Role.shared_gate

    def _feed_forward(
        self, prefix: str, size: int, down: Role, names: tuple[str, str, str] | None = None
    ) -> Iterator[_Entry]:
        gate_name, up_name, down_name = names or _PROJECTIONS
        yield f"{prefix}.{gate_name}.weight", (size, self.hidden_size), Role.gate
        yield f"{prefix}.{up_name}.weight", (size, self.hidden_size), Role.gate
        yield f"{prefix}.{down_name}.weight", (self.hidden_size, size), down


def _shared_size(config: Any) -> int:
    if config.model_type == "qwen2_moe":
        return int(config.shared_expert_intermediate_size)
    return int(config.n_shared_experts * config.moe_intermediate_size) if config.model_type == "deepseek_v2" else 0


_Entry = tuple[str, tuple[int, ...], Role]
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
