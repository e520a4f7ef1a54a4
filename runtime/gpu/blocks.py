"""The exact model over a prompt: block by block, a layer's experts in waves."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from runtime.gpu.accelerator import Mark
from runtime.gpu.slots import SlotTable
from runtime.gpu.target import Exact, batches
from runtime.memory.stream import Hold


class BlockTarget:
    """Writes the KV of prompts, block by block; a layer's experts come in waves and go as soon as they are used."""

    def __init__(self, exact: Exact) -> None:
        spec = exact.model.spec
        self._accelerator, self._model, self._cache = exact.accelerator, exact.model, exact.cache
        self._experts, self._trace = exact.experts, exact.trace
        self._layers = spec.moe_layers
        self._table = SlotTable(exact.accelerator, spec.moe_layers, spec.num_experts)
        self._open: list[tuple[Hold, Mark]] = []

    def block(self, tokens: Sequence[int], start: int) -> None:
        """Write the KV of some tokens from a position on.

        Raises:
            ArtifactError, StorageError: a record cannot be read.
        """
        try:
            with self._accelerator.active():
                self._model.block(torch.tensor(list(tokens), device=self._accelerator.device), start, self)
                self._experts.settle()
        finally:
            for hold, _ in self._open:
                hold.close()
            self._open.clear()

    def compute(self, place: int, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """See `LayerExperts`."""
        layer_id = self._layers[place]
        chosen, weights = top_k_index.int().contiguous(), top_k_weights.float().contiguous()
        keys = [(layer_id, expert_id) for expert_id in torch.unique(chosen).tolist()]
        if self._trace is not None:
            self._trace.append(keys)
        waves = batches(keys, max(1, self._experts.pool.num_slots // 2))  # while one computes, the next one comes
        out = torch.empty_like(hidden)
        pairs = None
        if len(waves) > 1:
            pairs = torch.empty(*chosen.shape, hidden.shape[-1], dtype=torch.float32, device=hidden.device)
        for number, wave in enumerate(waves):
            self._make_room(len(wave))
            hold = self._cache.hold(wave)
            try:
                slots = hold.wait()
                self._experts.admit(slots)
                self._table.write(place, slots)
                self._table.upload(place)
                self._experts.run(
                    place,
                    self._table.device[place],
                    hidden,
                    chosen,
                    weights,
                    out,
                    pairs=pairs,
                    resume=number > 0,
                )
            finally:
                mark = self._accelerator.mark()
                self._open.append((hold, mark))
            if len(waves) > 1:
                mark.wait()  # the next wave writes the same row of the table
        return out

    def _make_room(self, count: int) -> None:
        """Let go what is computed, all but the newest wave where there are slots for both."""
        keep = 1 if 2 * count <= self._experts.pool.num_slots else 0
        while len(self._open) > keep:
            hold, mark = self._open.pop(0)
            mark.wait()
            hold.close()
