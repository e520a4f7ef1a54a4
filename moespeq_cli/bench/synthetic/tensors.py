"""The values of a built model, tensor by tensor, each from its own random numbers."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from moespeq_cli.bench.synthetic.architecture import Architecture, Role, TensorSpec
from moespeq_cli.bench.synthetic.models import SPECIAL_IDS, TEXT_IDS
from moespeq_cli.bench.synthetic.scales import (
    ANCHOR,
    CONTENT,
    GATED_RMS,
    ROUTER_SPREAD,
    SIGMOID_RMS,
    STRENGTH,
    Scales,
    plan_scales,
    positional_pairs,
    rotary_frequencies,
    score_scale,
)

SUCCESSOR = 5.2  # mean score of the token that follows in the cycle; the others' spread by 1
SHARPNESS = 3.0  # all scores are multiplied by this, for distributions as a trained model's
UNWANTED = -8.0  # score of ids without a text
DRAWN = 1 << 22  # random numbers at a time in float32; a multiple of 16, so that parts are what one draw gives
ANCHORS = 2  # the first channels: +ANCHOR and -ANCHOR in every token, so that the mean stays 0


def build_tensors(
    config: Any, seed: int = 0, device: torch.device | str = "cpu", text_ids: int = TEXT_IDS
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a checkpoint, in the order of the model.

    Equal arguments give equal tensors on one kind of device; each tensor has random numbers of its own, so it does not
    matter which of them are kept.

    Args:
        config: from `make_config`.
        seed: of the random numbers.
        device: where the tensors are made and stay.
        text_ids: ids below this are ever predicted (special ones apart).

    Yields:
        Name on disk and BF16 tensor.
    """
    maker = TensorMaker(Architecture.of(config), seed, torch.device(device), text_ids)
    for spec in maker.architecture.tensors():
        yield spec.name, maker.make(spec)


class TensorMaker:
    """Makes any tensor of one model, alone and in any order."""

    def __init__(self, architecture: Architecture, seed: int, device: torch.device, text_ids: int = TEXT_IDS) -> None:
        self.architecture = architecture
        self.scales: Scales = plan_scales(architecture)
        self._seed, self._device = seed, device
        self._text_ids = min(text_ids, architecture.config.vocab_size)
        self._pairs = positional_pairs(rotary_frequencies(architecture))
        self._key_heads = 1 if architecture.is_latent else architecture.num_kv_heads
        self._makers: dict[Role, Callable[[TensorSpec], Tensor]] = {
            Role.ones: lambda spec: torch.ones(spec.shape, dtype=torch.bfloat16, device=device),
            Role.zeros: lambda spec: torch.zeros(spec.shape, dtype=torch.bfloat16, device=device),
            Role.embedding: self._embedding,
            Role.head: self._head,
            Role.query: self._query,
            Role.key: self._key,
            Role.latent: self._latent,
            Role.expand: self._expand,
            Role.value: self._value,
            Role.attention_out: self._attention_out,
            Role.router: self._router,
            Role.gate: self._gate,
            Role.routed_down: self._down,
            Role.shared_down: self._down,
            Role.dense_down: self._down,
            Role.shared_gate: self._gate,
        }

    def make(self, spec: TensorSpec) -> Tensor:
        """One tensor, BF16, on the device."""
        return self._makers[spec.role](spec)

    def _generator(self, name: str, device: torch.device | None = None) -> torch.Generator:
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        return torch.Generator(device or self._device).manual_seed(int.from_bytes(digest[:7], "little"))

    def _normal(self, spec: TensorSpec, std: float) -> Tensor:
        values = torch.empty(spec.shape, dtype=torch.bfloat16, device=self._device)
        generator = self._generator(spec.name)
        if self._device.type != "cpu":
            return values.normal_(0.0, std, generator=generator)
        flat = values.view(-1)
        for start in range(0, len(flat), DRAWN):  # older torch ends BF16 draws on a CPU at 3.3 standard deviations
            part = flat[start : start + DRAWN]
            part.copy_(torch.empty(len(part)).normal_(0.0, std, generator=generator))
        return values

    def _reading(self, spec: TensorSpec, std: float) -> Tensor:
        """A projection that does not see the anchors."""
        values = self._normal(spec, std)
        values[:, :ANCHORS] = 0
        return values

    def _writing(self, spec: TensorSpec, std: float) -> Tensor:
        """A projection that leaves the anchors alone."""
        values = self._normal(spec, std)
        values[:ANCHORS] = 0
        return values

    def _unit(self, live: float) -> float:
        """Standard deviation of weights that give standard normal outputs from a norm's output."""
        return 1 / (math.sqrt(self.architecture.hidden_size - ANCHORS) * live)

    def _embedding(self, spec: TensorSpec) -> Tensor:
        values = self._normal(spec, 1.0)
        values[:, 0], values[:, 1] = ANCHOR, -ANCHOR
        return values

    def _query(self, spec: TensorSpec) -> Tensor:
        layer = self.scales.layers[spec.layer_id]
        values = self._reading(spec, CONTENT * self._unit(layer.live_attention))
        heads = self.architecture.num_heads
        phases = self._phases(spec.layer_id, self._key_heads)
        phases = phases.repeat_interleave(heads // self._key_heads, 0)
        self._point(values.view(heads, -1, spec.shape[1]), phases, layer.before_attention)
        return values

    def _key(self, spec: TensorSpec) -> Tensor:
        layer = self.scales.layers[spec.layer_id]
        values = self._reading(spec, CONTENT * self._unit(layer.live_attention))
        phases = self._phases(spec.layer_id, self._key_heads)
        self._point(values.view(self._key_heads, -1, spec.shape[1]), phases, layer.before_attention)
        return values

    def _latent(self, spec: TensorSpec) -> Tensor:
        layer = self.scales.layers[spec.layer_id]
        values = self._reading(spec, self._unit(layer.live_attention))
        rope = values[-self.architecture.rope_size :]
        rope *= CONTENT
        self._point(rope[None], self._phases(spec.layer_id, 1), layer.before_attention)
        return values

    def _expand(self, spec: TensorSpec) -> Tensor:
        values = self._normal(spec, spec.shape[1] ** -0.5)
        keys = values.view(self.architecture.num_heads, -1, spec.shape[1])[:, : -self.architecture.value_size]
        keys *= CONTENT
        return values

    def _phases(self, layer_id: int, heads: int) -> Tensor:
        generator = self._generator(f"phases {layer_id}")
        return 2 * math.pi * torch.rand(heads, len(self._pairs), generator=generator, device=self._device)

    def _point(self, heads: Tensor, phases: Tensor, rms: float) -> None:
        """Let the anchors add a constant query or key: between equal ones the score depends on the distance alone.

        Args:
            heads: [heads, head size, hidden_size], a view; the rotated dimensions are the last `rope_size`.
            phases: [heads, rope_size / 2].
            rms: what the norm before divides the anchors by.
        """
        size = self.architecture.rope_size
        pairs = self._pairs.to(self._device)
        amplitude = math.sqrt(STRENGTH / (int(pairs.sum()) * score_scale(self.architecture)))
        constant = amplitude * pairs * torch.stack([phases.cos(), phases.sin()])  # [2, heads, pairs]
        order = constant.permute(1, 2, 0) if self.architecture.is_latent else constant.permute(1, 0, 2)
        column = order.flatten(1) * rms / (ANCHORS * ANCHOR)
        heads[:, -size:, 0], heads[:, -size:, 1] = column.to(heads.dtype), -column.to(heads.dtype)

    def _value(self, spec: TensorSpec) -> Tensor:
        return self._reading(spec, self._unit(self.scales.layers[spec.layer_id].live_attention))

    def _attention_out(self, spec: TensorSpec) -> Tensor:
        layer = self.scales.layers[spec.layer_id]
        return self._writing(spec, layer.attention / (layer.attended * math.sqrt(spec.shape[1])))

    def _router(self, spec: TensorSpec) -> Tensor:
        layer = self.scales.layers[spec.layer_id]
        count, width = spec.shape[0], spec.shape[1] - ANCHORS
        square = torch.randn(width, min(count, width), generator=self._generator(spec.name), device=self._device)
        rows = torch.linalg.qr(square).Q.T * (ROUTER_SPREAD / layer.live_experts)
        values = torch.zeros(spec.shape, dtype=torch.bfloat16, device=self._device)
        values[:, ANCHORS:] = rows.to(torch.bfloat16)
        return values

    def _gate(self, spec: TensorSpec) -> Tensor:
        return self._reading(spec, self._unit(self.scales.layers[spec.layer_id].live_experts))

    def _down(self, spec: TensorSpec) -> Tensor:
        layer = self.scales.layers[spec.layer_id]
        if spec.role is Role.routed_down:
            wanted = layer.routed / self.scales.routing_weights
        else:
            gated = spec.role is Role.shared_down and self.architecture.model_type == "qwen2_moe"
            wanted = layer.shared / (SIGMOID_RMS if gated else 1.0)
        return self._writing(spec, wanted / (GATED_RMS * math.sqrt(spec.shape[1])))

    def _head(self, spec: TensorSpec) -> Tensor:
        """Scores `SHARPNESS * (SUCCESSOR * how much of the embedding before it is left + Gaussian noise)`."""
        final, width = self.scales.final, self.architecture.hidden_size
        values = self._normal(spec, SHARPNESS / math.sqrt(width))
        before = self._predecessors()
        embedding = self._embedding(TensorSpec("model.embed_tokens.weight", spec.shape, Role.embedding))
        strength = SHARPNESS * SUCCESSOR * final / width
        values[:, :ANCHORS] = 0
        known = before >= 0
        values[known, ANCHORS:] += (strength * embedding[before[known], ANCHORS:].float()).to(torch.bfloat16)
        values[~known, 0] = SHARPNESS * UNWANTED * final / (ANCHORS * ANCHOR)
        values[~known, 1] = -values[~known, 0]
        return values

    def _predecessors(self) -> Tensor:
        """For each id the one before it in one random cycle through all ids with a text, int64; -1 for others."""
        ids = [i for i in range(self._text_ids) if i not in SPECIAL_IDS]
        places = torch.randperm(len(ids), generator=self._generator("cycle", torch.device("cpu")))
        order = torch.tensor(ids)[places]
        before = torch.full((self.architecture.config.vocab_size,), -1)
        before[order] = order.roll(1)
        return before.to(self._device)
