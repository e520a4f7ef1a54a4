"""A model whose dense part is resident and whose experts come from whichever backend is set."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from runtime.model import loader, rowwise
from runtime.model.experts import ExpertMath, find_experts
from runtime.model.families import MoeSpec
from runtime.model.kv import SharedKv

PREFILL_TOKENS = 512
"""Prompt tokens of one prefill pass: bounds the activations, and is the same whatever else is set."""


def context_limit(config: dict[str, Any]) -> int:
    """Positions that a model of this configuration can be run for."""
    limit = int(config.get("max_position_embeddings") or 2**31)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if "longrope" in (rope.get("rope_type"), rope.get("type")):
        original = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
        limit = min(limit, int(original or limit))
    return limit


class ExpertBackend(Protocol):
    """Computes the routed experts of one layer."""

    def compute(
        self, layer_id: int, math: ExpertMath, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, by_row: bool
    ) -> Tensor:
        """Weighted sum of each token's experts.

        Args:
            layer_id: true layer number.
            math: the family's expert.
            hidden: [T, H].
            top_k_index: int64 [T, k].
            top_k_weights: [T, k].
            by_row: compute every token alone, so that its bits do not depend on the others.

        Returns:
            [T, H].
        """


class Host:
    """The library's model with dense weights, one KV cache and exchangeable experts."""

    def __init__(
        self,
        config_folder: Path,
        spec: MoeSpec,
        dtype: torch.dtype,
        read: Callable[[str], Tensor],
        names: Iterable[str],
    ) -> None:
        """Build the model and load everything but the routed experts.

        Args:
            config_folder: holds config.json.
            spec: what the model is.
            dtype: of the arithmetic.
            read: gives a dense tensor by its disk name.
            names: the disk names.
        """
        self.spec = spec
        self.dtype = dtype
        self.model = loader.build(config_folder, dtype, spec)
        loader.load_dense(self.model, spec, read, names)
        self._mode = rowwise.RowMode()
        self._backend: ExpertBackend | None = None
        self.kv = SharedKv(spec.num_layers, 0)
        self._cache_name = loader.cache_argument(self.model.model) or "past_key_values"
        layers = loader.decoder_layers(self.model)
        self._fused: dict[int, Any] = {}
        for layer_id in spec.moe_layers:
            module = find_experts(layers[layer_id])
            assert module is not None, f"layer {layer_id} has no experts module"
            self._fused[layer_id] = module
        rowwise.install(self.model, lambda: self.kv, self._mode)
        for layer_id, module in self._fused.items():
            module.compute = self._computer(layer_id, ExpertMath(module))

    @property
    def config(self) -> Any:
        """The library's configuration object."""
        return self.model.config

    @property
    def max_context(self) -> int:
        """Positions that the model can be run for.

        Models with long RoPE use other frequencies for texts beyond their original context, for the whole text at once;
        tokens already in the KV cache would have to be computed again. So they end at the original context here.
        """
        return context_limit(self.config.to_dict())

    @property
    def dense_bytes(self) -> int:
        """Memory of everything but the routed experts."""
        seen = {p.data_ptr(): p.numel() * p.element_size() for p in self.model.parameters()}
        return sum(seen.values())

    def start(self, capacity: int) -> None:
        """Begin a sequence of at most `capacity` tokens."""
        self.kv = SharedKv(self.spec.num_layers, capacity)

    @torch.inference_mode()
    def prefill(self, tokens: Sequence[int], backend: ExpertBackend) -> None:
        """Write the KV of the first tokens of a sequence; the passes do not depend on any setting."""
        self._mode.active = False
        for start in range(0, len(tokens), PREFILL_TOKENS):
            self._forward(self.model.model, tokens[start : start + PREFILL_TOKENS], start, backend)

    @torch.inference_mode()
    def rows(self, tokens: Sequence[int], start: int, backend: ExpertBackend) -> Tensor:
        """Decode tokens at known positions.

        Args:
            tokens: 1 to `MAX_ROWS` ids, at positions start, start + 1, ...
            start: position of the first; the KV before it is read, the KV from it on is written.
            backend: whose experts.

        Returns:
            float32 [len(tokens), vocab_size] logits; a row has the same bits however many rows the pass has.
        """
        assert 1 <= len(tokens) <= rowwise.MAX_ROWS
        self._mode.active = True
        logits: Tensor = self._forward(self.model, tokens, start, backend).logits[0]
        return logits.float()

    def _forward(self, module: Any, tokens: Sequence[int], start: int, backend: ExpertBackend) -> Any:
        self._backend = backend
        self.kv.position = start
        ids = torch.tensor([list(tokens)], dtype=torch.int64)
        positions = torch.arange(start, start + len(tokens))[None]
        return module(input_ids=ids, position_ids=positions, use_cache=True, **{self._cache_name: self.kv})

    def _computer(self, layer_id: int, math: ExpertMath) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        def compute(hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            assert self._backend is not None
            return self._backend.compute(layer_id, math, hidden, top_k_index, top_k_weights, self._mode.active)

        return compute
