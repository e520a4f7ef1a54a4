"""The linears of a model by what they do: the classes in which sensitivity is told."""

from __future__ import annotations

import re

HEAD = "lm_head"
CLASSES = {
    "router": "router",
    "attention_qkv": "attention, query key value",
    "attention_out": "attention, output",
    "shared_gate": "shared expert's gate",
    "shared_up": "shared expert, gate and up",
    "shared_down": "shared expert, down",
    "expert_up": "routed experts, gate and up",
    "expert_down": "routed experts, down",
    "dense_up": "dense feed-forward, gate and up",
    "dense_down": "dense feed-forward, down",
    HEAD: "head",
    "other": "other linears",
}
"""By name, in words, in the order of lists; "up" expands from the hidden size, "down" contracts to it."""
ROUTED = frozenset({"expert_up", "expert_down"})
"""The classes that are ever quantised."""

_PATTERNS = (
    ("attention_out", r"self_attn\.(o_proj|dense|out_proj)$"),
    ("attention_qkv", r"self_attn\."),
    ("shared_gate", r"shared_expert_gate$"),
    ("shared_down", r"shared_(experts?|mlp)\.(down_proj|output_linear)$"),
    ("shared_up", r"shared_(experts?|mlp)\."),
    ("expert_down", r"\.experts\.down_proj$"),
    ("expert_up", r"\.experts\.(gate|up)_proj$"),
    ("dense_down", r"mlp\.down_proj$"),
    ("dense_up", r"mlp\.(gate|up)_proj$"),
    ("router", r"(mlp|block_sparse_moe)\.(gate|router)(\.layer)?$"),
    (HEAD, rf"^{HEAD}$"),
)


def module_class(name: str) -> str:
    """The class of a linear by its name, as it is in the model without `.weight`; a key of CLASSES."""
    return next((kind for kind, pattern in _PATTERNS if re.search(pattern, name)), "other")


def layer_of(name: str) -> int | None:
    """The true number of the layer that a linear is in; None for the head."""
    match = re.match(r"layers\.(\d+)\.", name)
    return int(match[1]) if match else None
