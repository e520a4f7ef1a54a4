"""The link and the GPU."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from runtime.memory.location import ExpertKey
from tests.decode.simulated.clock import Clock
from tests.decode.simulated.constants import Costs


@dataclass(slots=True)
class Copy:
    """A copy on the link. A `Landing`."""

    clock: Clock
    lands: float
    num_bytes: int

    def done(self) -> bool:
        """Whether it has arrived."""
        return self.clock.now >= self.lands

    def wait(self) -> None:
        """Go on to when it has."""
        self.clock.until(self.lands)


class Link:
    """Serves one copy after the other, in the order of their start. `Copies`.

    Attributes:
        num_bytes: of all copies that were started.
        busy_s: that they take.
    """

    def __init__(self, clock: Clock, costs: Costs, record_bytes: int) -> None:
        self._clock, self._costs, self._record_bytes = clock, costs, record_bytes
        self._free = 0.0
        self._unseen: deque[float] = deque()  # when copies land for whose noting the host has not spent time
        self.num_bytes, self.busy_s = 0, 0.0

    def start(self, key: ExpertKey, buffer: Any) -> Copy:
        """Queue the copy of a record."""
        seconds = self._record_bytes / self._costs.link_bytes_per_s
        self._free = max(self._clock.now, self._free) + self._costs.copy_gap_s + seconds
        self.num_bytes += self._record_bytes
        self.busy_s += seconds
        self._unseen.append(self._free)
        return Copy(self._clock, self._free, self._record_bytes)

    @property
    def next_landing(self) -> float:
        """When the first copy lands, or has landed, that `see` was not called for; infinite where none is."""
        return self._unseen[0] if self._unseen else math.inf

    def see(self) -> None:
        """The host notes that copy."""
        self._unseen.popleft()


class Gpu:
    """Draft steps and passes, one after the other, and the board that passes look at. A `Board`.

    A pass goes on without the host: `catch_up` runs it up to now, or to a layer that waits for experts. Whatever
    changes the board calls it first.

    Attributes:
        told: the experts that each layer of the pass needs, from when its router has chosen.
        end: of the pass, once it is known.
    """

    def __init__(self, clock: Clock, costs: Costs, layers: int) -> None:
        self._clock, self._costs = clock, costs
        self._free = 0.0
        self._on_board: set[ExpertKey] = set()
        self._needs: list[list[ExpertKey]] = []
        self._layer: int | None = None  # that the pass is at
        self._event = 0.0  # when that layer's router has chosen, or its experts are done, if none is missing
        self._missing: set[ExpertKey] = set()  # that the layer waits for
        self._late = 0  # experts that its second launch computes
        self._met: int | None = None  # the last layer whose experts are held, -1 before the first; None between passes
        self.told: list[list[ExpertKey] | None] = [None] * layers
        self.end: float | None = None

    def queue_steps(self, count: int) -> list[float]:
        """Queue draft steps; when each ends."""
        begin = max(self._clock.now, self._free)
        ends = []
        for _ in range(count):
            begin += self._costs.step_s
            ends.append(begin)
        self._free = begin
        return ends

    def begin(self, needs: list[list[ExpertKey]]) -> None:
        """Queue a pass that needs these experts, by layer."""
        self._needs, self.told, self.end = needs, [None] * len(needs), None
        self._layer, self._met = 0, -1
        self._event = max(self._clock.now, self._free) + self._costs.dense_s

    def meet(self, layer: int) -> None:
        """The experts of a layer are held, or on their way and asked for."""
        self._met = layer

    def finish(self) -> None:
        """The host knows that the pass is over."""
        self._met = None

    def has_told(self, layer: int) -> bool:
        """Whether a layer's router has chosen."""
        return self.told[layer] is not None

    def over(self) -> bool:
        """Whether the pass is."""
        return self.end is not None and self._clock.now >= self.end

    @property
    def next_event(self) -> float:
        """When the pass next does anything that the host can see; infinite while it waits for experts."""
        if self._layer is None:
            return math.inf if self.end is None else self.end
        return math.inf if self._missing else self._event

    def catch_up(self) -> None:
        """Run the pass up to now."""
        while self._layer is not None and not self._missing and self._event <= self._clock.now:
            if self.told[self._layer] is None:
                self._open_gate(self._layer)
            else:
                self._leave(self._layer)

    def _open_gate(self, layer: int) -> None:
        needed = self._needs[layer]
        self.told[layer] = needed
        self._missing = {key for key in needed if key not in self._on_board}
        self._late = len(self._missing)
        self._event += self._costs.experts_s + self._costs.expert_s * (len(needed) - self._late)

    def _leave(self, layer: int) -> None:
        if layer + 1 < len(self._needs):
            self._layer = layer + 1
            self._event += self._costs.dense_s
        else:
            self._layer = None
            self._free = self.end = self._event + self._costs.head_s

    def put(self, key: ExpertKey, slot: int) -> None:
        """An expert has come."""
        self.catch_up()
        self._on_board.add(key)
        if key in self._missing:
            self._missing.discard(key)
            if not self._missing:
                late_s = self._costs.late_s + self._costs.expert_s * self._late
                self._event = max(self._clock.now, self._event) + late_s

    def withdraw(self, key: ExpertKey) -> bool:
        """Take an expert off the board; False, and it stays, if the pass may be using it."""
        self.catch_up()
        layer = key[0]
        if self._met is not None and layer > self._met and self.told[layer] is not None:
            return False
        self._on_board.discard(key)
        return True


def union(routes: Sequence[Sequence[ExpertKey]], layers: int) -> list[list[ExpertKey]]:
    """The experts that rows need together, by layer, each once."""
    needs: list[dict[ExpertKey, None]] = [{} for _ in range(layers)]
    for route in routes:
        for key in route:
            needs[key[0]][key] = None
    return [list(keys) for keys in needs]
