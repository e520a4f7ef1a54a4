"""What sensitive layers buy: the draft with them beside the draft without, on the first calibration tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moespeq_cli.profile.measure import prefix
from moespeq_cli.profile.outputs import OutputTally
from runtime.artifacts.gptq_format import dequantize, unpack_linear
from runtime.artifacts.quantized import BIASES, LayerFormat, linear_name
from runtime.model.families import PROJECTIONS, LayerExperts
from runtime.model.stream import LayerStream, StreamedLayer

MAX_TOKENS = 4096
DRAFTS = ("chosen", "plain")  # with the sensitive layers' format, and with that of all others throughout
LOGIT_ROWS = 256


@dataclass(slots=True)
class Comparison:
    """Hidden states of both drafts, layer by layer.

    Attributes:
        states: by draft, one [T, H] a sequence.
    """

    states: dict[str, list[Tensor]]

    @classmethod
    def begin(cls, hidden: list[Tensor]) -> Comparison:
        """Before the first layer, where both drafts have the target's states."""
        count = prefix([len(states) for states in hidden], MAX_TOKENS)
        return cls({name: list(hidden[:count]) for name in DRAFTS})

    @property
    def num_sequences(self) -> int:
        """How many first sequences are compared."""
        return len(self.states[DRAFTS[0]])

    def forward(
        self,
        layer: StreamedLayer,
        chosen: Callable[[], LayerExperts] | None = None,
        plain: Callable[[], LayerExperts] | None = None,
    ) -> None:
        """Both drafts through a layer.

        Args:
            layer: the current one; its experts are replaced.
            chosen: makes the layer's dequantised experts; None in a dense layer.
            plain: those of the other draft; None where they are the same.
        """
        for name, make in zip(DRAFTS, (chosen, plain), strict=True):
            if make is not None:
                layer.experts = None  # one set at a time
                layer.experts = make()
            self.states[name] = layer.forward(self.states[name])

    def acceptance(self, stream: LayerStream, target: list[Tensor]) -> dict[str, Any]:
        """Both drafts' outputs against the target's, given its states after the last layer.

        Returns:
            The tokens compared and, by draft, `greedy` (share of positions with the same most likely token) and
            `overlap` (mean sum of min(p, q), the acceptance to expect when sampling at temperature 1).
        """
        found: dict[str, Any] = {"tokens": sum(len(states) for states in self.states[DRAFTS[0]])}
        for name in DRAFTS:
            tally = OutputTally()
            for ours, theirs in zip(target, self.states[name], strict=False):
                for start in range(0, len(ours), LOGIT_ROWS):
                    rows = slice(start, start + LOGIT_ROWS)
                    tally.add(stream.logits(ours[rows]), stream.logits(theirs[rows]))
            found[name] = {"greedy": tally.share(tally.same), "overlap": tally.share(tally.overlap)}
        return found


def dequantized_layer(
    tensors: dict[str, Tensor], layer_id: int, form: LayerFormat, num_experts: int, dtype: torch.dtype
) -> LayerExperts:
    """The experts that a layer's tensors, as the folder holds them, stand for."""
    stacks: dict[str, list[Tensor]] = {}
    for expert_id in range(num_experts):
        for projection in PROJECTIONS:
            name = linear_name(layer_id, expert_id, projection)
            if projection in form.kept:
                weight = tensors[f"{name}.weight"].to(dtype)
            else:
                parts = {part: tensors[f"{name}.{part}"] for part in ("qweight", "qzeros", "scales", "g_idx")}
                codes, scales, zeros = unpack_linear(parts, form.bits, form.group_size, name)
                weight = dequantize(codes, scales, zeros, form.group_size, dtype)
            stacks.setdefault(projection, []).append(weight)
            if f"{name}.bias" in tensors:
                stacks.setdefault(BIASES[projection], []).append(tensors[f"{name}.bias"])
    return LayerExperts(**{name: torch.stack(parts) for name, parts in stacks.items()})
