"""The place of the library's fused experts: the same signature, weights that may live anywhere.

transformers dispatches every fused experts module through a registry of implementations. Ours calls
`module.compute(hidden [T, H], top_k_index int64 [T, k], top_k_weights [T, k]) -> [T, H]`, which a stage sets; the
module's own parameters are dropped, so no expert is ever allocated by the library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runtime.errors import InputError

IMPLEMENTATION = "moespeq"
Compute = Callable[[Tensor, Tensor, Tensor], Tensor]
PARAMETERS = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")


def register() -> None:
    """Make `experts_implementation="moespeq"` known to transformers; calling it again changes nothing."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    if IMPLEMENTATION not in ALL_EXPERTS_FUNCTIONS:
        ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _dispatch)


def _dispatch(module: nn.Module, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    compute: Compute = module.compute  # type: ignore[assignment]
    return compute(hidden, top_k_index, top_k_weights)


def find_experts(layer: nn.Module) -> nn.Module | None:
    """The fused experts module of a decoder layer, or None where the layer is dense."""
    for module in layer.modules():
        if (
            "gate_up_proj" in module._parameters
            and "down_proj" in module._parameters
            and hasattr(module, "_apply_gate")
        ):
            return module
    return None


def empty(module: nn.Module) -> None:
    """Drop a fused module's parameters."""
    for name in PARAMETERS:
        if name in module._parameters:
            module._parameters[name] = None


class ExpertMath:
    """`down(gate(x))` of one family, its activation taken from the library's module.

    Weights are canonical: gate_up [2I, H] with the gate rows first, down [H, I].
    """

    def __init__(self, module: nn.Module) -> None:
        apply_gate: Any = getattr(module, "_apply_gate", None)
        if apply_gate is None:
            raise InputError(
                expected="an experts module with the library's gate function",
                found=type(module).__name__,
                mend="use a model family whose experts transformers fuses",
            )
        self._apply_gate: Callable[[Tensor], Tensor] = apply_gate
        self._interleaved = not getattr(module, "is_concatenated", True)

    def gate(self, gate_up: Tensor) -> Tensor:
        """Activation and product: [m, 2I], gate columns first, to [m, I]."""
        if self._interleaved:
            gate, up = gate_up.chunk(2, dim=-1)
            gate_up = torch.stack([gate, up], dim=-1).flatten(-2)
        return self._apply_gate(gate_up)

    def intermediate(self, x: Tensor, gate_up: Tensor, gate_up_bias: Tensor | None = None) -> Tensor:
        """The input of `down_proj`: [m, H] to [m, I]."""
        return self.gate(F.linear(x, gate_up, gate_up_bias))

    def forward(
        self,
        x: Tensor,
        gate_up: Tensor,
        down: Tensor,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
    ) -> Tensor:
        """One expert on its tokens: [m, H] to [m, H]."""
        return F.linear(self.intermediate(x, gate_up, gate_up_bias), down, down_bias)


def assignments(top_k_index: Tensor) -> dict[int, list[tuple[int, int]]]:
    """Sort tokens by expert: expert_id to its (token, place among the top k), tokens ascending."""
    places: dict[int, list[tuple[int, int]]] = {}
    for token, row in enumerate(top_k_index.tolist()):
        for place, expert_id in enumerate(row):
            places.setdefault(expert_id, []).append((token, place))
    return places


def combine(outputs: Tensor, top_k_weights: Tensor) -> Tensor:
    """Weighted sum over the top k in float32, always in the order of the router's choice.

    Args:
        outputs: [T, k, H], an expert's output for each choice of each token.
        top_k_weights: [T, k].

    Returns:
        [T, H] in the type of `outputs`. Products and sums are element by element, so a token's result does not depend
        on the other tokens, nor on the order in which experts arrived.
    """
    total: Tensor | None = None
    for place in range(outputs.shape[1]):
        term = outputs[:, place].float() * top_k_weights[:, place, None].float()
        total = term if total is None else total + term
    assert total is not None
    return total.to(outputs.dtype)


def rows_of(places: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """The tokens and the places among the top k of one expert's assignments, as int64 index tensors."""
    pairs = torch.tensor(places, dtype=torch.int64)
    return pairs[:, 0], pairs[:, 1]


def sorted_tokens(top_k_index: Tensor) -> dict[int, Tensor]:
    """Sort tokens by expert, with tensors: expert_id to its places in `top_k_index.flatten()`, ascending.

    A place is `token * top_k + choice`. The indices are looked at on the CPU, and the places lie where they do.
    """
    flat = top_k_index.flatten().cpu()
    places = torch.split(flat.argsort(stable=True).to(top_k_index.device), torch.bincount(flat).tolist())
    return {expert_id: part for expert_id, part in enumerate(places) if len(part)}
