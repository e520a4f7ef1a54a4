"""Whether a model of the library is one that the stages can run: what they rely on, looked at before any work."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from runtime.errors import InputError
from runtime.model.experts import find_experts
from runtime.model.families import ATTENTION_KINDS, MoeSpec, state_refusal

EXPERTS_ARGUMENTS = 4  # self, hidden states, top-k index, top-k weights


def check_model(model: Any, spec: MoeSpec) -> None:
    """Refuse a model of which a stage would compute something else than the library does.

    Args:
        model: the library's causal language model, on any device, its experts still with their parameters.
        spec: what its checkpoint holds.

    Raises:
        InputError: naming the module or the setting that is not known here.
    """
    layers = getattr(getattr(model, "model", None), "layers", None)
    if layers is None or len(layers) != spec.num_layers:
        raise _unsupported(
            spec,
            f"a list of {spec.num_layers} decoder layers at model.layers",
            "none" if layers is None else f"{len(layers)} of them",
        )
    _check_state(model, spec)
    for layer_id, layer in enumerate(layers):
        where = f"layer {layer_id}"
        _check_attention(layer, where, spec)
        experts = find_experts(layer)
        if (experts is not None) != (layer_id in spec.moe_layers):
            kinds = ", ".join(f"{name} ({type(child).__name__})" for name, child in layer.named_children())
            raise _unsupported(
                spec,
                f"the library's fused experts (gate_up_proj and down_proj of one module) in {where}, for which the "
                "checkpoint has experts"
                if experts is None
                else f"no routed experts in {where}, for which the checkpoint has none",
                f"in it {kinds}",
            )
        if experts is not None:
            _check_experts(experts, where, spec)


def _check_state(model: Any, spec: MoeSpec) -> None:
    """A drafted token could not be taken back out of a recurrent state."""
    config = model.config
    kinds = {*(getattr(config, "layer_types", None) or ()), *(getattr(config, "layers_block_type", None) or ())}
    others = sorted(map(str, kinds - ATTENTION_KINDS))
    if others or getattr(model, "_is_stateful", False):
        raise state_refusal(spec.model_type, ", ".join(others) or "recurrent")


def _check_attention(layer: nn.Module, where: str, spec: MoeSpec) -> None:
    """One module right under the layer takes the KV cache, and none further down does by itself."""
    takers = [name for name, module in layer.named_modules() if name and _takes_cache(module)]
    if len(takers) != 1 or "." in takers[0]:
        raise _unsupported(
            spec, f"one attention module right under {where} that takes the KV cache", ", ".join(takers) or "none"
        )


def _takes_cache(module: nn.Module) -> bool:
    names = inspect.signature(module.forward).parameters
    return "past_key_values" in names or "cache" in names


def _check_experts(experts: Any, where: str, spec: MoeSpec) -> None:
    name = f"{type(experts).__name__} of {where}"
    interleaved = not getattr(experts, "is_concatenated", True)
    facts: list[tuple[str, object, object]] = [
        ("a gate beside the up projection", True, getattr(experts, "has_gate", True)),
        ("a norm after each expert", False, getattr(experts, "has_post_expert_norm", False)),
        ("biases", spec.has_bias, bool(getattr(experts, "has_bias", False))),
        ("interleaved gate and up", spec.disk_layout.kind == "interleaved", interleaved),
        ("arguments", EXPERTS_ARGUMENTS, len(inspect.signature(type(experts).forward).parameters)),
    ]
    rows, columns = (2 * spec.moe_intermediate_size, spec.hidden_size)
    shape = (columns, rows) if getattr(experts, "is_transposed", False) else (rows, columns)
    facts.append(("gate_up_proj of shape", [spec.num_experts, *shape], list(experts.gate_up_proj.shape)))
    for what, expected, found in facts:
        if expected != found:
            raise _unsupported(spec, f"{what}: {expected}, in {name}", str(found))


def _unsupported(spec: MoeSpec, expected: str, found: str) -> InputError:
    return InputError(
        expected=f"a family that is known or built from the library's fused experts: {expected}",
        found=f"{found}, in {spec.model_type}",
        mend="run this model with transformers; docs/models.md lists the families, and how one is added",
    )
