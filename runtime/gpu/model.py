"""The library's model on the device: dense weights, one KV cache, and passes over rows or a prompt's block."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from runtime.gpu import attention, rotary
from runtime.gpu.rows_decoder import RowExperts, RowsDecoder
from runtime.kernels.rows import RowOps
from runtime.model import loader
from runtime.model.experts import find_experts
from runtime.model.families import MoeSpec
from runtime.model.host import context_limit
from runtime.model.kv import SharedKv

LEAST_LENGTH = 256  # keys that a decoding pass looks at


class LayerExperts(Protocol):
    """Computes the routed experts of a layer inside a pass."""

    def compute(self, place: int, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The weighted sum of each token's experts.

        Args:
            place: the layer, counting those with experts from 0.
            hidden: bfloat16 [T, H].
            top_k_index: int64 [T, k].
            top_k_weights: [T, k].
        """


class DeviceModel:
    """Everything but the routed experts, on one device.

    Args:
        config_folder: holds config.json.
        spec: what the model is.
        read: gives a dense tensor by its disk name.
        names: the disk names.
        device: where it computes.
        capacity: tokens of the KV cache, reserved at the first pass.
        ops: compute decoding passes where they can; otherwise the library's modules do.

    Attributes:
        spec, device, capacity, ops: as given.

    Raises:
        InputError: transformers cannot build the model, or tensors are missing.
    """

    def __init__(
        self,
        config_folder: Path,
        spec: MoeSpec,
        read: Callable[[str], Tensor],
        names: Iterable[str],
        device: torch.device,
        capacity: int,
        ops: RowOps,
    ) -> None:
        attention.register()
        self.spec, self.device, self.capacity, self.ops = spec, device, capacity, ops
        self.model = loader.build(config_folder, torch.bfloat16, spec, attention.NAME)
        loader.load_dense(self.model, spec, lambda name: read(name).to(device), names)
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)
        rotary.install(self.model, capacity, device)
        self.attention = attention.install(self.model)
        self.kv = SharedKv(spec.num_layers, capacity)
        self._cache_name = loader.cache_argument(self.model.model) or "past_key_values"
        self._experts: LayerExperts | None = None
        layers = loader.decoder_layers(self.model)
        for place, layer_id in enumerate(spec.moe_layers):
            module = find_experts(layers[layer_id])
            assert module is not None, f"layer {layer_id} has no experts module"
            module.compute = self._computer(place)  # type: ignore[assignment]
        self._decoder = None
        if RowsDecoder.accepts(self.model, ops):
            self._decoder = RowsDecoder(self.model, spec.moe_layers, self.kv, ops)

    @property
    def config(self) -> Any:
        """The library's configuration object."""
        return self.model.config

    @property
    def shares(self) -> bool:
        """Whether decoding passes have shared experts that `RowOps` computes."""
        return self._decoder is not None and self._decoder.shares

    @property
    def max_context(self) -> int:
        """Positions that the model can be run for."""
        return context_limit(self.config.to_dict())

    @property
    def dense_bytes(self) -> int:
        """Memory of everything but the routed experts."""
        seen = {p.data_ptr(): p.numel() * p.element_size() for p in self.model.parameters()}
        return sum(seen.values())

    def let_go(self) -> None:
        """Forget who computed the experts last, and what that keeps."""
        self._experts = None
        self.kv.place_rows(None, 0)
        self.attention.block(0, 0)

    def unload(self) -> None:
        """Give the memory of weights and KV back; there are no passes after it."""
        self._decoder = None
        loader.drop_module(self.model)
        self.kv = SharedKv(self.spec.num_layers, 0)

    def length_for(self, end: int) -> int:
        """Keys that a pass up to position `end` - 1 looks at: few different numbers, as each is recorded apart."""
        length = LEAST_LENGTH
        while length < end:
            length *= 2
        return min(length, self.capacity)

    @torch.no_grad()
    def rows(self, ids: Tensor, positions: Tensor, length: int, experts: RowExperts) -> Tensor:
        """Queue a decoding pass.

        Args:
            ids, positions: int64 [rows] on the device, read while the pass runs; a row's KV is written at its
                position.
            length: from `length_for`, beyond all positions.
            experts: of every layer.

        Returns:
            Logits [rows, vocab_size].
        """
        self._experts = experts
        self.kv.place_rows(positions, length)
        self.attention.rows(positions, length)
        if self._decoder is not None:
            return self._decoder.logits(ids, positions, length, experts)
        logits: Tensor = self._forward(self.model, ids[None], positions[None]).logits[0]
        return logits

    @torch.no_grad()
    def block(self, ids: Tensor, start: int, experts: LayerExperts) -> None:
        """Queue a block of a prompt, int64 [T] on the device, from position `start` on: its KV is written."""
        self._experts = experts
        self.kv.place_rows(None, 0)
        self.kv.position = start
        self.attention.block(start, len(ids))
        self._forward(self.model.model, ids[None], torch.arange(start, start + len(ids), device=ids.device)[None])

    def _forward(self, module: Any, ids: Tensor, positions: Tensor) -> Any:
        return module(input_ids=ids, position_ids=positions, use_cache=True, **{self._cache_name: self.kv})

    def _computer(self, place: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        def compute(hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            assert self._experts is not None
            return self._experts.compute(place, hidden, top_k_index, top_k_weights)

        return compute
