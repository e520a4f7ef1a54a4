"""The target's experts: exact weights that pass through the expert cache."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from runtime.artifacts.pack import Pack
from runtime.decode.draft_records import DraftRecords
from runtime.decode.route import RouteLog
from runtime.memory.cache import ExpertCache
from runtime.memory.location import ExpertKey
from runtime.model.experts import ExpertMath, assignments, combine, rows_of


class TargetExperts:
    """Computes with the experts of the cache as they arrive.

    Every (token, choice) has its own place in the output and the weighted sum runs in the router's order, so the result
    does not depend on which experts were resident, nor on how many fit at once.

    Attributes:
        routes: experts chosen since they were last taken.
        decode_s: seconds spent on turning records into weights, prompts included.
    """

    def __init__(
        self,
        pack: Pack,
        cache: ExpertCache,
        dtype: torch.dtype,
        drafts: DraftRecords | None = None,
        trace: list[list[ExpertKey]] | None = None,
    ) -> None:
        """`drafts` are needed where target records lean on them. `trace` is given every demand: a block's experts
        together, a row's alone, layer by layer.
        """
        self._drafts = drafts
        self._room = None if drafts is None else torch.empty(pack.target_layout.payload_bytes, dtype=torch.uint8)
        self._trace = trace
        self._pack = pack
        self._cache = cache
        self._dtype = dtype
        self.routes = RouteLog()
        self.decode_s = 0.0

    def compute(
        self, layer_id: int, math: ExpertMath, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, by_row: bool
    ) -> Tensor:
        """See `ExpertBackend.compute`."""
        self.routes.record(layer_id, top_k_index)
        outputs = hidden.new_empty(*top_k_index.shape, hidden.shape[-1])
        places = assignments(top_k_index)
        keys = [(layer_id, expert_id) for expert_id in places]
        if self._trace is not None:
            rows = top_k_index.tolist() if by_row else [places]
            self._trace.extend([(layer_id, expert_id) for expert_id in row] for row in rows)
        with self._cache.stream(keys) as stream:
            for key, buffer in stream:
                weights = self._weights(key, buffer)
                if by_row:
                    for token, choice in places[key[1]]:
                        row = hidden[token : token + 1].clone()
                        outputs[token, choice] = math.forward(row, **weights)[0]
                else:
                    tokens, choice_ids = rows_of(places[key[1]])
                    outputs[tokens, choice_ids] = math.forward(hidden[tokens], **weights)
        return combine(outputs, top_k_weights)

    def _weights(self, key: ExpertKey, buffer: Tensor) -> dict[str, Tensor]:
        draft = None if self._drafts is None else self._drafts[key]
        started = time.perf_counter()
        exact = self._pack.decode_target(key, buffer, draft, self._room)
        weights = {name: tensor.to(self._dtype) for name, tensor in exact.items()}
        self.decode_s += time.perf_counter() - started
        return weights
