"""The draft on the device: a step is one recorded pass that feeds the next, so that steps need no host between them."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from runtime.decode.sampling import Chooser, Proposal
from runtime.gpu.accelerator import Accelerator, Bring, Mark, Run
from runtime.gpu.bank import ResidentBank
from runtime.gpu.model import DeviceModel
from runtime.kernels.rows import Routing, StepLog
from runtime.memory.location import ExpertKey

Route = list[ExpertKey]


class DeviceDraft:
    """Proposes tokens with the INT4 experts, over the target's KV of the prefix.

    Token, position and number of the step lie on the device; a step reads them, logs its proposal and its routing under
    its number in the host's memory and sets them for the next. Shared experts are computed beside the routed ones.
    Greedy steps are all queued at once and their logs read as they come. Where tokens are drawn, the host draws them
    between steps.

    Args:
        accelerator: where it computes.
        model: the dense part.
        bank: the INT4 experts.
        most_steps: of one call.
    """

    ahead = True

    def __init__(self, accelerator: Accelerator, model: DeviceModel, bank: ResidentBank, most_steps: int) -> None:
        spec, device = model.spec, accelerator.device
        self._accelerator, self._model, self._bank = accelerator, model, bank
        self._layers, places = spec.moe_layers, len(spec.moe_layers)
        self._state_host = accelerator.host((3,), torch.int64)
        self._state_seen = accelerator.seen(self._state_host)
        self._state = torch.zeros(3, dtype=torch.int64, device=device)  # token, position, step
        self._chosen = torch.zeros(places, 1, spec.top_k, dtype=torch.int32, device=device)
        self._weights = torch.zeros(places, 1, spec.top_k, dtype=torch.float32, device=device)
        self._tokens = accelerator.host((most_steps,), torch.int64)
        self._routes = accelerator.host((most_steps, places, spec.top_k), torch.int32)
        seen = accelerator.seen(self._tokens), accelerator.seen(self._routes)
        self._log = StepLog(self._state, self._chosen, *seen)
        self._steps: dict[int, tuple[Run, list[Tensor]]] = {}

    def propose(self, token: int, position: int, count: int, chooser: Chooser) -> Generator[tuple[Proposal, Route]]:
        """See `Draft.propose`."""
        if chooser.settings.temperature == 0:
            return self._read(self._queue(token, position, count))
        return self._drawn(token, position, count, chooser)

    def _read(self, marks: Sequence[Mark]) -> Generator[tuple[Proposal, Route]]:
        """What queued steps log, as it comes."""
        for step, mark in enumerate(marks):
            mark.wait()
            yield Proposal(int(self._tokens[step])), self._route(step)

    def _drawn(self, token: int, position: int, count: int, chooser: Chooser) -> Generator[tuple[Proposal, Route]]:
        """Steps between which the host draws a token."""
        for ahead in range(count):
            (mark,) = self._queue(token, position + ahead, 1)
            mark.wait()
            logits = self._step(self._model.length_for(position + ahead + 1))[1][0]
            proposal = chooser.draft(logits[0].float().cpu(), position + ahead + 1)
            yield proposal, self._route(0)
            token = proposal.token

    def prepare(self, length: int) -> None:
        """Record the step that looks at so many keys, if it is not."""
        self._step(length)

    def close(self) -> None:
        """Give the memory of recorded steps back."""
        self._steps.clear()

    def compute(self, place: int, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """See `LayerExperts`."""
        self._chosen[place].copy_(top_k_index)
        self._weights[place].copy_(top_k_weights)
        return self.routed(place, hidden)

    def routing(self, place: int, rows: int) -> Routing:
        """See `RowExperts`."""
        return Routing(self._chosen[place], self._weights[place])

    def routed(self, place: int, hidden: Tensor) -> Tensor:
        """See `RowExperts`."""
        out = torch.empty_like(hidden)
        self._bank.run(place, hidden, self._chosen[place], self._weights[place], out)
        return out

    def _queue(self, token: int, position: int, count: int) -> list[Mark]:
        """Queue steps; a mark behind each."""
        self._state_host.copy_(torch.tensor([token, position, 0]))
        marks = []
        with self._accelerator.active():
            self._accelerator.fetch(self._state, self._state_seen)
            for step in range(count):
                run, _ = self._step(self._model.length_for(position + step + 1))
                run(None)
                marks.append(self._accelerator.mark())
        return marks

    def _step(self, length: int) -> tuple[Run, list[Tensor]]:
        """The step that looks at so many keys, recorded when it is first needed, and its logits."""
        if length not in self._steps:
            logits: list[Tensor] = []

            def forward(boundary: Bring) -> None:
                logits[:] = [self._model.rows(self._state[0:1], self._state[1:2], length, self)]
                self._model.ops.advance(logits[0].bfloat16(), self._log)  # as they are, but for a library's own head

            self._steps[length] = self._accelerator.record(forward, cut=False), logits
        return self._steps[length]

    def _route(self, step: int) -> Route:
        layers: Sequence[list[int]] = self._routes[step].tolist()
        return [(layer_id, e) for layer_id, experts in zip(self._layers, layers, strict=True) for e in experts]
