"""The exact model: decoding passes of a fixed number of rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor

from runtime.decode.loop import nothing
from runtime.decode.sampling import Scores
from runtime.gpu.accelerator import Accelerator, Bring, Mark, Run
from runtime.gpu.board import SlotBoard
from runtime.gpu.experts import SlotExperts
from runtime.gpu.model import DeviceModel
from runtime.gpu.slots import SlotTable
from runtime.kernels.gate import GateOps
from runtime.kernels.rows import Routing
from runtime.memory.cache import ExpertCache
from runtime.memory.location import ExpertKey
from runtime.memory.stream import Hold

ROWS = 8
"""Rows of every decoding pass, with or without speculation: products of one shape give a row the same bits whatever the
other rows are. Rows that nobody asked for repeat the first one, and with it its experts."""

_PAUSE_S = 20e-6  # between two looks of the host at a pass, where other threads bring experts


class Way(Enum):
    """How a pass comes to the experts of a layer.

    Attributes:
        whole: all experts of the model are in slots; a pass is one piece.
        gated: a pass is one piece with a gate at each layer: there it tells the host what its router chose, computes
            what is there, waits for the rest, and computes that. The host follows behind.
        cut: a pass stops before the experts of each layer, and the host queues the next part when they are there. For
            fewer slots than a layer needs, which then come in waves, and where nothing is recorded.
    """

    whole = "whole"
    gated = "gated"
    cut = "cut"


@dataclass(slots=True)
class _Pass:
    """A recorded pass: what it reads and writes, by layer, and its results."""

    way: Way
    run: Run | None = None
    calls: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # place -> hidden, out
    logits: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Exact:
    """What the exact model computes with.

    Attributes:
        accelerator: where it computes.
        model: the dense part.
        cache: the exact experts.
        experts: compute layers from its slots.
        trace: is given every demand: a row's experts of a layer, or a block's.
        gates: let a pass wait for experts on the device.
        board: what they look at; None where passes have no gates.
    """

    accelerator: Accelerator
    model: DeviceModel
    cache: ExpertCache
    experts: SlotExperts
    trace: list[list[ExpertKey]] | None = None
    gates: GateOps | None = None
    board: SlotBoard | None = None


class RowsTarget:
    """Decodes up to `ROWS` tokens at a time.

    At each layer the host reads what the router chose and asks the cache for it; see `Way`. While some experts are on
    their way, those that are there are computed already.
    """

    ahead = False

    def __init__(self, exact: Exact) -> None:
        accelerator, spec, device = exact.accelerator, exact.model.spec, exact.accelerator.device
        self._accelerator, self._model, self._cache = accelerator, exact.model, exact.cache
        self._experts, self._trace = exact.experts, exact.trace
        self._gates, self._board = exact.gates, exact.board
        self._layers, places = spec.moe_layers, len(spec.moe_layers)
        self._inputs_host = accelerator.host((2, ROWS), torch.int64)
        self._inputs_seen = accelerator.seen(self._inputs_host)
        self._inputs = torch.zeros(2, ROWS, dtype=torch.int64, device=device)
        self._chosen_host = accelerator.host((places, ROWS, spec.top_k), torch.int32)
        self._chosen_seen = accelerator.seen(self._chosen_host)
        self._chosen = torch.zeros(places, ROWS, spec.top_k, dtype=torch.int32, device=device)
        self._weights = torch.zeros(places, ROWS, spec.top_k, dtype=torch.float32, device=device)
        self._pairs = torch.zeros(ROWS, spec.top_k, spec.hidden_size, dtype=torch.float32, device=device)
        self._top_host = accelerator.host((ROWS,), torch.int64)
        self._table = SlotTable(accelerator, spec.moe_layers, spec.num_experts)
        self._gate_slots = torch.full((2, places, spec.num_experts), -1, dtype=torch.int32, device=device)
        self._passes: dict[tuple[int, Way], _Pass] = {}
        self._boundary: Bring = lambda place: None
        self._here = _Pass(Way.cut)
        self._live = 0
        self._held: Hold | None = None
        if self._board is not None:
            self._try_gates(self._board)
        self._whole = False  # whether the table holds every expert

    def rows(
        self, tokens: Sequence[int], position: int, begun: Callable[[], None] = nothing
    ) -> tuple[list[Scores], list[list[ExpertKey]]]:
        """Logits and experts of 1 to ROWS tokens from a position on; their KV is written. `begun`: see `Target`.

        Raises:
            ArtifactError, StorageError: a record cannot be read.
        """
        self._live = len(tokens)
        filled = [*tokens, *[tokens[0]] * (ROWS - len(tokens))]
        places = [*range(position, position + len(tokens)), *[position] * (ROWS - len(tokens))]
        self._inputs_host.copy_(torch.tensor([filled, places]))
        way = self._way()
        here = self._pass(self._model.length_for(position + len(tokens)), way)
        assert here.run is not None
        try:
            with self._accelerator.active():
                if way is Way.gated:
                    self._follow(here.run, begun)
                else:
                    if way is Way.cut:  # which asks for experts while it runs
                        begun()
                    here.run(lambda place: self._bring(place, here))
                    if way is Way.whole:
                        begun()
                self._experts.settle()
        finally:
            self._let_go()
        routes = self._routes(way)
        if way is Way.whole:
            self._cache.stats.hits += len({key for row in routes for key in row})
        self._note(routes)
        assert here.logits is not None
        tops, logits = self._top_host.tolist(), here.logits
        return [Scores(tops[row], _values(logits, row)) for row in range(len(tokens))], routes

    def prepare(self, length: int) -> None:
        """Record the pass that looks at so many keys, if it is not."""
        self._pass(length, self._way())

    def end_pass(self) -> None:
        """Give up a pass with gates that is under way: nothing is brought to it any more. Returns when it is over."""
        if self._board is not None and self._board.under_way:
            self._board.stop()
            self._accelerator.mark().wait()
            self._experts.forget_listed()  # its slots may have been given away
            self._board.end()

    def close(self) -> None:
        """Give the memory of recorded passes back."""
        self.end_pass()
        self._passes.clear()
        self._here, self._boundary = _Pass(Way.cut), lambda place: None

    def compute(self, place: int, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """See `LayerExperts`."""
        self._chosen[place].copy_(top_k_index)
        self._weights[place].copy_(top_k_weights)
        if self._here.way is not Way.gated:
            self._chosen_host[place].copy_(self._chosen[place], non_blocking=True)
        return self._routed(place, hidden, told=False)

    def routing(self, place: int, rows: int) -> Routing:
        """See `RowExperts`."""
        told = self._chosen_seen if self._here.way is not Way.gated or self._board is None else self._board.told_seen
        return Routing(self._chosen[place], self._weights[place], told[place])

    def routed(self, place: int, hidden: Tensor) -> Tensor:
        """See `RowExperts`."""
        return self._routed(place, hidden, told=True)

    def _routed(self, place: int, hidden: Tensor, told: bool) -> Tensor:
        """The experts of a layer; `told` says whether the router's kernel has told the host what it chose."""
        out = torch.empty_like(hidden)
        self._here.calls[place] = hidden, out
        if self._here.way is Way.gated:
            self._pass_gate(place, hidden, out, told)
            return out
        self._boundary(place)
        if not self._whole:
            self._table.upload(place)
        self._launch(place, hidden, out)
        return out

    def _pass_gate(self, place: int, hidden: Tensor, out: Tensor, told: bool) -> None:
        """Queue a layer's experts: those that are there, then, when they have come, the others."""
        gates, board, chosen, experts = self._gates, self._board, self._chosen[place], self._experts
        assert gates is not None and board is not None
        here, late = self._gate_slots[:, place]
        call = (hidden, chosen, self._weights[place], out)
        gates.open(chosen, None if told else board.told_seen[place], board.seen[place], here)
        experts.run(place, here, *call, pairs=self._pairs)
        gates.wait(chosen, board.seen[place], board.stop_seen, here, late, experts.fresh_of(place))
        experts.admit_listed(place)
        experts.run(place, late, *call, pairs=self._pairs, resume=True)

    def _try_gates(self, board: SlotBoard) -> None:
        """Queue both gates once, with nothing to wait for: what loads them must not stand behind a closed one."""
        assert self._gates is not None
        board.stop()
        with self._accelerator.active():
            index, (here, late) = torch.zeros_like(self._chosen[0]), self._gate_slots[:, 0]
            self._gates.open(index, board.told_seen[0], board.seen[0], here)
            self._gates.wait(index, board.seen[0], board.stop_seen, here, late, self._experts.fresh_of(0))
            self._accelerator.mark().wait()

    def _launch(self, place: int, hidden: Tensor, out: Tensor) -> None:
        self._experts.run(
            place,
            self._table.device[place],
            hidden,
            self._chosen[place],
            self._weights[place],
            out,
            pairs=None if self._whole else self._pairs,
            resume=not self._whole,
        )

    def _pass(self, length: int, way: Way) -> _Pass:
        """The pass that looks at so many keys, recorded when it is first needed."""
        key = length, way
        if key not in self._passes:
            here = _Pass(way)

            def forward(boundary: Bring) -> None:
                self._here, self._boundary = here, boundary
                self._accelerator.fetch(self._inputs, self._inputs_seen)
                here.logits = self._model.rows(self._inputs[0], self._inputs[1], length, self).float()
                self._top_host.copy_(here.logits.argmax(-1), non_blocking=True)
                if way is Way.gated:
                    self._experts.note_listed()

            here.run = self._accelerator.record(forward, cut=way is Way.cut, gated=way is Way.gated)
            self._passes[key] = here
        return self._passes[key]

    def _way(self) -> Way:
        if self._all_here():
            return Way.whole
        return Way.cut if self._board is None else Way.gated

    def _follow(self, run: Run, begun: Callable[[], None]) -> None:
        """Queue a pass with gates and bring it what it asks for, layer by layer, until it is over."""
        board = self._board
        assert board is not None
        self.end_pass()
        board.begin()
        try:
            if self._accelerator.meanwhile is not None:  # otherwise other threads may give their slots away meanwhile
                fresh = board.admit()
                self._experts.admit(fresh)
                board.refresh(fresh)
            run(None)
            end = self._accelerator.mark()
            begun()
            for place, layer_id in enumerate(self._layers):
                self._wait_until(partial(board.has_told, place), end)
                self._leave()
                # Of all rows: the gate waits for whatever one of them names, if it were not what the first one does.
                keys = [(layer_id, expert_id) for expert_id in board.told(place)]
                # Met before a slot is looked for: those that the layer does not need may be all there is to take.
                self._held = self._cache.hold(keys, kept=partial(board.meet, place))
            self._wait_until(end.done, end)
            self._leave()
            board.end()
        finally:
            self.end_pass()

    def _leave(self) -> None:
        """The pass has a layer behind it: what it has admitted there counts as admitted, and may leave."""
        assert self._board is not None
        if self._held is not None:
            fresh = self._board.fresh_among(self._held.here())
            self._experts.admitted(fresh)
            self._board.refresh(fresh)
        self._let_go()

    def _wait_until(self, come: Callable[[], bool], end: Mark) -> None:
        """Start copies and see them arrive until something has come.

        Raises:
            ArtifactError, StorageError: an expert that the pass waits for cannot be read.
        """
        held, started, looks = self._held, None, 0
        while not come():
            if held is not None:
                held.check()  # an expert that will not come is not awaited any more, but by the pass
            if held is not None and not held.complete:
                started = started or time.perf_counter()
            elif started is not None:
                self._cache.stats.wait_s += time.perf_counter() - started
                started = None
            looks += 1
            if looks % 1024 == 0 and end.done() and not come():  # which raises what the device has to say, if anything
                raise RuntimeError("a pass ended without its layers")
            if self._accelerator.meanwhile is not None:
                self._accelerator.meanwhile()
            else:
                time.sleep(_PAUSE_S)  # for the threads that read
        if started is not None:
            self._cache.stats.wait_s += time.perf_counter() - started

    def _all_here(self) -> bool:
        """Whether every expert of the model is in a slot; then the table says so once and for all."""
        if self._whole:
            return True
        spec = self._model.spec
        if self._cache.num_resident < spec.num_records:
            return False
        keys, slots = spec.expert_keys(), self._cache.resident_slots()
        with self._accelerator.active():
            self._experts.admit(slots)
            for place, layer_id in enumerate(self._layers):
                self._table.write(place, {key: slots[key] for key in keys if key[0] == layer_id})
                self._table.upload(place)
            self._experts.settle()
        self._whole = True
        return True

    def _bring(self, place: int, here: _Pass) -> None:
        """Make the experts of a layer ready; all before it is done."""
        self._let_go()
        layer_id = self._layers[place]
        chosen = self._chosen_host[place, : self._live].flatten().tolist()
        keys = list(dict.fromkeys((layer_id, expert_id) for expert_id in chosen))
        *waves, last = batches(keys, self._experts.pool.num_slots)
        for wave in waves:  # more experts than slots: parts of them after one another
            with self._cache.hold(wave) as hold:
                self._part(place, hold.wait(), here)
        self._held = self._cache.hold(last)
        if not self._held.complete and (slots := self._held.here()):
            self._part(place, slots, here)
        self._write(place, self._held.wait())

    def _write(self, place: int, slots: dict[ExpertKey, int]) -> None:
        self._experts.admit(slots)
        self._table.write(place, slots)

    def _part(self, place: int, slots: dict[ExpertKey, int], here: _Pass) -> None:
        """Compute what is here of a layer, and wait for it; its sums stay in `pairs`."""
        self._write(place, slots)
        self._table.upload(place)
        self._launch(place, *here.calls[place])
        self._accelerator.mark().wait()

    def _let_go(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None

    def _routes(self, way: Way) -> list[list[ExpertKey]]:
        rows: list[list[ExpertKey]] = [[] for _ in range(self._live)]
        if way is Way.gated:
            assert self._board is not None
            chosen = self._board.routing(self._live)
        else:
            chosen = self._chosen_host[:, : self._live].tolist()
        for layer_id, layer in zip(self._layers, chosen, strict=True):
            for row, experts in zip(rows, layer, strict=True):
                row.extend((layer_id, expert_id) for expert_id in experts)
        return rows

    def _note(self, routes: list[list[ExpertKey]]) -> None:
        if self._trace is not None:
            top_k = self._model.spec.top_k
            for place in range(len(self._layers)):
                self._trace.extend(row[place * top_k : (place + 1) * top_k] for row in routes)


def batches(keys: list[ExpertKey], size: int) -> list[list[ExpertKey]]:
    """Keys in order, so many at a time."""
    return [keys[first : first + size] for first in range(0, len(keys), size)]


def _values(logits: Tensor, row: int) -> Any:
    return lambda: logits[row].cpu()
