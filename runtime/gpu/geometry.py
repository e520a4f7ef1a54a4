"""What the kernels need to know of a model's experts."""

from __future__ import annotations

import torch

from runtime.errors import InputError
from runtime.kernels.reference import activate_torch
from runtime.kernels.shape import Activation, ExpertShape
from runtime.model.experts import ExpertMath
from runtime.model.families import MoeSpec

_PROBES = 256


def activation_of(math: ExpertMath) -> Activation:
    """Which of the kernels' activations a family's experts have, found by computing it.

    Raises:
        InputError: none of them.
    """
    generator = torch.Generator().manual_seed(0)
    gate, up = 6 * torch.randn(2, _PROBES, generator=generator)  # gpt-oss's clamps at 7 are met too
    wanted = math.gate(torch.cat([gate, up])[None])[0]
    for activation in Activation:
        if torch.allclose(activate_torch(gate, up, activation), wanted, rtol=1e-5, atol=1e-6):
            return activation
    raise InputError(
        expected=f"experts with an activation of {', '.join(Activation)} for a run on a GPU",
        found="another one",
        mend="run this model with --device cpu",
    )


def expert_shape(spec: MoeSpec, activation: Activation) -> ExpertShape:
    """The geometry of a model's layers of experts.

    Raises:
        ShapeError: the kernels cannot compute it.
    """
    return ExpertShape(
        spec.num_experts, spec.top_k, spec.hidden_size, spec.moe_intermediate_size, activation, spec.has_bias
    )
