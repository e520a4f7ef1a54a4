"""Draft far, verify short.

State: a verified prefix, and a tail of drafted tokens with their KV and their routing. A round drafts until the tail
is long enough, verifies the first `j` of it together with the last verified token, keeps the longest right prefix, and
compares the target's own next token with the following drafted one: where they agree the rest of the tail stays valid.
The tail is what prefetch and eviction see; the short verification wastes no bytes on rows after a wrong token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from torch import Tensor

from runtime.decode.governor import Governor, Measured, Situation
from runtime.decode.sampling import Chooser, Logits, Proposal
from runtime.memory.location import ExpertKey
from runtime.memory.predict import Predictor
from runtime.model.rowwise import MAX_ROWS
from runtime.stats import DecodeStats

Route = list[ExpertKey]

_MORE_STEPS = 4  # of a tail that are asked for at once: each time the device has nothing to do until they are


def nothing() -> None:
    """What is done at a moment at which nothing is to be done."""


class Draft(Protocol):
    """Proposes tokens one after another."""

    def propose(self, token: int, position: int, count: int, chooser: Chooser) -> Generator[tuple[Proposal, Route]]:
        """Up to `count` proposals that follow `token` at `position`, each with the experts of the input before it.

        Each comes as soon as it is known; where a device computes them without the host it has begun when this returns.
        The caller may close the iterator early.
        """


class StepwiseDraft:
    """A draft that computes one step when it is asked for it.

    Args:
        step: gives the logits [vocab_size] after a token at a position, and the experts that it was routed to.
    """

    def __init__(self, step: Callable[[int, int], tuple[Tensor, Route]]) -> None:
        self._step = step

    def propose(self, token: int, position: int, count: int, chooser: Chooser) -> Generator[tuple[Proposal, Route]]:
        """See `Draft.propose`."""
        for place in range(position, position + count):
            logits, route = self._step(token, place)
            proposal = chooser.draft(logits, place + 1)
            token = proposal.token
            yield proposal, route


class Target(Protocol):
    """Decides: the exact model."""

    def prefill(self, tokens: Sequence[int]) -> None:
        """Write the KV of a sequence's first tokens."""

    def rows(
        self, tokens: Sequence[int], position: int, begun: Callable[[], None] = nothing
    ) -> tuple[Sequence[Logits], list[Route]]:
        """Logits and routing of 1 to `max_rows` tokens from `position` on.

        `begun` is called once, before any expert is asked for; a pass that waits for its experts
        on a device has begun by then.
        """


class Experts(Protocol):
    """The part of the expert cache that decoding talks to."""

    @property
    def complete(self) -> bool:
        """Whether every expert of the model is in a slot."""

    def announce(
        self, upcoming: Sequence[Sequence[ExpertKey]], fetch_rows: int | None = None, *, pass_rows: int = 1
    ) -> None:
        """Say which experts the coming rows need."""

    def missing_bytes(self, keys: Sequence[ExpertKey]) -> int:
        """Bytes of those experts that are not resident."""


@dataclass(slots=True)
class Tail:
    """Drafted tokens after the verified prefix.

    `routes[i]` belongs to the i-th input: input 0 is the last verified token, input i is `proposals[i - 1]`; so the
    newest proposal has no route yet, and both lists have the same length.
    """

    proposals: list[Proposal] = field(default_factory=list)
    routes: list[Route] = field(default_factory=list)

    def drop(self, count: int) -> None:
        """Forget the first `count` proposals; they are part of the prefix now."""
        del self.proposals[:count]
        del self.routes[:count]

    def clear(self) -> None:
        """Forget everything: the target chose another way."""
        self.proposals.clear()
        self.routes.clear()


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """Limits of one generation.

    Attributes:
        max_new_tokens: tokens to generate at most.
        stop_ids: token ids that end the text; the first one met is the last token kept.
        prefetch_window: tokens of tail; 0 drafts nothing.
        fetch_rows: rows of the announcement that are fetched ahead; None means all.
        max_rows: of one pass of the target; more are computed by several.
    """

    max_new_tokens: int
    stop_ids: frozenset[int]
    prefetch_window: int
    fetch_rows: int | None = None
    max_rows: int = MAX_ROWS


class SpeculativeLoop:
    """One sequence, token by token."""

    def __init__(
        self,
        target: Target,
        draft: Draft | None,
        experts: Experts,
        chooser: Chooser,
        predictor: Predictor,
        governor: Governor,
        stats: DecodeStats,
        measured: Measured | None = None,
    ) -> None:
        """`measured` goes on from earlier texts."""
        self._target, self._draft, self._experts = target, draft, experts
        self._chooser, self._predictor, self._governor = chooser, predictor, governor
        self._stats = stats
        self._measured = measured or Measured()
        self._unsaid = False  # whether the newest row of the tail is still to be announced

    def generate(self, prompt: Sequence[int], settings: LoopSettings) -> Generator[int]:
        """Yield new tokens, the stop id included, each as soon as the target has decided it.

        Args:
            prompt: at least one token id.
            settings: limits.
        """
        if settings.max_new_tokens < 1:
            return
        tokens, tail, emitted = list(prompt), Tail(), 0
        started, before = time.perf_counter(), replace(self._stats.cache)
        self._target.prefill(tokens[:-1])
        self._stats.prefill_done(len(tokens), time.perf_counter() - started, before)
        while emitted < settings.max_new_tokens:
            left = settings.max_new_tokens - emitted
            self._fill(tail, tokens, settings, left)
            for token in self._verify(tail, tokens, left, settings):
                tokens.append(token)
                emitted += 1
                self._stats.new_tokens += 1
                yield token
            if tokens[-1] in settings.stop_ids:
                return

    def _fill(self, tail: Tail, tokens: list[int], settings: LoopSettings, left: int) -> None:
        """Draft until the tail is full, ends the text, or reaches the last token wanted.

        Beyond what may be verified a tail only says which experts to bring. A step of it costs nothing while the next
        pass would have to wait for its own, but where a wrong token drops it.
        """
        if self._draft is None:
            return
        window, most = min(settings.prefetch_window, left), self._governor.most
        if self._chooser.settings.depends_on_proposals:  # nothing that a clock decides
            self._propose(tail, tokens, settings, window)
            return
        if self._experts.complete:  # a tail announces nothing then
            window = min(window, self._governor.depth(self._measured))
        self._propose(tail, tokens, settings, min(window, most + 1))
        while len(tail.proposals) < window and self._may_draft_on(tail, most):
            if not self._propose(tail, tokens, settings, min(window, len(tail.proposals) + _MORE_STEPS)):
                return

    def _may_draft_on(self, tail: Tail, most: int) -> bool:
        """Whether some steps hide more of the next pass's waiting than they are expected to lose.

        It looks at no more rows than it takes to know: nobody starts copies meanwhile.
        """
        missing_bytes, measured = _MissingBytes(self._experts, tail.routes), self._measured
        kept = measured.chances(len(tail.proposals))[-1]
        lost_bytes = (1 - kept) * _MORE_STEPS * measured.draft_s * self._stats.cache.bytes_per_s
        return kept > 0 and any(missing_bytes(j) > lost_bytes for j in range(min(most + 1, len(tail.routes))))

    def _propose(self, tail: Tail, tokens: list[int], settings: LoopSettings, length: int) -> bool:
        """Draft until the tail has this length; whether it has, or ends the text before."""
        assert self._draft is not None
        missing = length - len(tail.proposals)
        token = tail.proposals[-1].token if tail.proposals else tokens[-1]
        if tail.proposals and token in settings.stop_ids:
            return False
        if missing <= 0:
            return True
        proposed = self._draft.propose(token, len(tokens) - 1 + len(tail.proposals), missing, self._chooser)
        try:
            if self._unsaid:
                self._announce(tail, settings, pass_rows=1)
            started = time.perf_counter()
            for proposal, route in proposed:
                tail.proposals.append(proposal)
                tail.routes.append(route)
                seconds = time.perf_counter() - started
                self._measured.drafted(seconds)
                self._stats.draft_s += seconds
                self._stats.draft_steps += 1
                self._unsaid = True
                if proposal.token in settings.stop_ids:
                    return False
                if len(tail.proposals) < length:  # the last one is announced with what follows, a pass or more steps
                    self._announce(tail, settings, pass_rows=1)
                started = time.perf_counter()
        finally:
            proposed.close()
        return True

    def _announce(self, tail: Tail, settings: LoopSettings, pass_rows: int) -> None:
        self._unsaid = False
        self._experts.announce(self._predictor.upcoming(tail.routes), settings.fetch_rows, pass_rows=pass_rows)

    def _verify(self, tail: Tail, tokens: list[int], left: int, settings: LoopSettings) -> list[int]:
        """Run the target on the last verified token and the first j proposals; what it decides, at least one token.

        No row follows a stop id: drafting ends at one, and it is never among the inputs.
        """
        j = self._governor.choose(self._situation(tail, left, settings))
        inputs = [tokens[-1], *(proposal.token for proposal in tail.proposals[:j])]
        position, decided, agreed, drafted = len(tokens) - 1, list[int](), True, len(tail.proposals)
        for start in range(0, len(inputs), settings.max_rows):
            part = inputs[start : start + settings.max_rows]
            announce = partial(self._announce, tail, settings, pass_rows=len(part))
            logits, routes = self._timed_rows(part, position + start, announce)
            for row in range(len(part)):
                token, agreed = self._decide(tail, logits[row], routes[row], position + len(decided) + 1)
                decided.append(token)
                if not agreed:
                    break
            if not agreed:
                break
        right = len(decided) - (not agreed)
        accepted = min(right, j)
        if drafted:
            self._measured.judged(min(len(decided), drafted), right)
        else:
            self._measured.idle()
        self._governor.observe(j, accepted)
        self._stats.round_done(j, accepted)
        return decided

    def _situation(self, tail: Tail, left: int, settings: LoopSettings) -> Situation:
        most = len(tail.proposals)
        if most and tail.proposals[-1].token in settings.stop_ids:
            most -= 1  # nothing follows a stop id, so the row that would be computed from it serves nobody
        return Situation(
            most=min(most, left - 1),
            missing_bytes=_MissingBytes(self._experts, tail.routes),
            bytes_per_s=self._stats.cache.bytes_per_s,
            measured=self._measured,
        )

    def _timed_rows(
        self, part: list[int], position: int, begun: Callable[[], None]
    ) -> tuple[Sequence[Logits], list[Route]]:
        started, wait_s = time.perf_counter(), self._stats.cache.wait_s
        logits, routes = self._target.rows(part, position, begun)
        seconds = time.perf_counter() - started
        self._measured.computed(len(part), seconds - (self._stats.cache.wait_s - wait_s))
        self._stats.pass_done(len(part), seconds)
        return logits, routes

    def _decide(self, tail: Tail, logits: Logits, route: Route, position: int) -> tuple[int, bool]:
        """The token at a position, and whether it is the drafted one; the tail moves on or is dropped."""
        proposal = tail.proposals[0] if tail.proposals else None
        token = self._chooser.target(logits, position, proposal)
        agreed = proposal is not None and token == proposal.token
        self._predictor.observe(route)
        self._stats.row_done(route, tail.routes[0] if tail.routes else None, agreed)
        if agreed:
            tail.drop(1)
        else:
            tail.clear()
        return token, agreed


class _MissingBytes:
    """Bytes that the experts of rows 0 .. j still lack, by j: each row is looked at once."""

    def __init__(self, experts: Experts, routes: Sequence[Route]) -> None:
        self._experts, self._routes = experts, routes
        self._seen: set[ExpertKey] = set()
        self._sums: list[int] = [0]

    def __call__(self, j: int) -> int:
        for route in self._routes[len(self._sums) - 1 : j + 1]:
            new = [key for key in dict.fromkeys(route) if key not in self._seen]
            self._seen.update(new)
            self._sums.append(self._sums[-1] + self._experts.missing_bytes(new))
        return self._sums[min(j + 1, len(self._sums) - 1)]
