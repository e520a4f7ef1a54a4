"""Ways of decoding side by side: one text of them all, and what its routing is like."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from moespeq_cli.bench.offload import Mode, Outcome, Sweep
from runtime.memory.clairvoyant import belady
from runtime.memory.location import ExpertKey
from runtime.model.families import MoeSpec


class Comparison:
    """Ways measured one after another, each of which must give the text of the first."""

    def __init__(self) -> None:
        self._reference: Outcome | None = None
        self._spec: MoeSpec | None = None
        self._fewest: dict[int, int] = {}  # reads of a clairvoyant cache of so many slots
        self._ways = 0

    def run(
        self, sweep: Sweep, memories: Sequence[str], ways: Sequence[Mode], done: Callable[[dict[str, Any]], None]
    ) -> list[dict[str, Any]]:
        """Every way at every amount of memory; `done` is told each row as it is measured.

        Raises:
            InputError: an amount of memory that is less than the draft and one slot; nothing is measured then.
            RuntimeError: a way gave other tokens than the first one; nothing is reported then.
        """
        for memory in memories:
            for mode in ways:
                sweep.settings(mode, memory)
        rows = []
        for memory in memories:
            for mode in ways:
                rows.append(self._measure(sweep, mode, memory))
                done(rows[-1])
        return rows

    def _measure(self, sweep: Sweep, mode: Mode, memory: str) -> dict[str, Any]:
        found = sweep.run(mode, memory)
        if self._reference is None:
            self._reference, self._spec = found, sweep.spec
        same = found.tokens == self._reference.tokens
        if mode.same_text and not same:
            raise RuntimeError(f"{mode.name} at {memory} changed the text: nothing is reported")
        self._ways += same
        num_slots = found.figures["num_slots"]
        if num_slots not in self._fewest:
            self._fewest[num_slots] = belady(self._reference.trace, num_slots)
        read_bytes = self._fewest[num_slots] * sweep.least_record_bytes(mode.encoding)
        bound = {"clairvoyant_bytes_per_token": read_bytes / found.figures["new_tokens"]}
        return found.figures | bound | {"same_text": same}

    def as_json(self) -> dict[str, Any]:
        """How much text was compared, and what its routing is like; nothing before the first way."""
        if self._reference is None or self._spec is None:
            return {"ways": 0, "prompts": 0, "tokens": 0, "routing": {}}
        tokens = self._reference.tokens
        rows = routing(self._reference.rows, len(self._spec.moe_layers), self._spec.num_experts)
        return {"ways": self._ways, "prompts": len(tokens), "tokens": sum(map(len, tokens)), "routing": rows}


def routing(rows: Sequence[Sequence[ExpertKey]], num_layers: int, num_experts: int) -> dict[str, float]:
    """Entropy of the experts' use, as a share of its maximum, and what neighbouring rows share; means of the layers."""
    entropies = []
    layers = sorted({layer_id for row in rows for layer_id, _ in row})
    for layer_id in layers:
        uses = Counter(key for row in rows for key in row if key[0] == layer_id)
        total = sum(uses.values())
        entropies.append(-sum(n / total * math.log(n / total) for n in uses.values()) / math.log(num_experts))
    shared = [len(set(a) & set(b)) / len(a) for a, b in itertools.pairwise(rows)]
    return {
        "rows": len(rows),
        "entropy": sum(entropies) / num_layers,
        "neighbours": sum(shared) / len(shared) if shared else 0.0,
    }
