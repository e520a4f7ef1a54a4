"""Which experts a pass chose."""

from __future__ import annotations

from torch import Tensor

from runtime.memory.location import ExpertKey


class RouteLog:
    """The routing of the passes since it was last taken."""

    def __init__(self) -> None:
        self._layers: list[int] = []
        self._chosen: list[Tensor] = []

    def record(self, layer_id: int, top_k_index: Tensor) -> None:
        """A layer chose these experts, int64 [T, k]."""
        self._layers.append(layer_id)
        self._chosen.append(top_k_index)

    def take(self) -> list[list[ExpertKey]]:
        """The experts of each token of one pass, one list a token in layer order; forgets them."""
        rows: list[list[ExpertKey]] = []
        for layer_id, index in zip(self._layers, self._chosen, strict=True):
            for row, experts in enumerate(index.tolist()):
                if row == len(rows):
                    rows.append([])
                rows[row].extend((layer_id, expert_id) for expert_id in experts)
        self.forget()
        return rows

    def forget(self) -> None:
        """Drop what was recorded."""
        self._layers, self._chosen = [], []
