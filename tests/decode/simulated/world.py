"""The host, and a whole simulation."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from runtime.decode.governor import Governor, Measured
from runtime.decode.loop import LoopSettings, Route, SpeculativeLoop, nothing
from runtime.decode.sampling import Chooser, Proposal, SamplingSettings, Scores
from runtime.gpu.target import ROWS
from runtime.memory.cache import ExpertCache
from runtime.memory.eviction import make_policy
from runtime.memory.location import ExpertKey
from runtime.memory.predict import make_predictor
from runtime.memory.stream import Hold
from runtime.memory.window import rows_to_fetch
from runtime.stats import DecodeStats
from tests.decode.simulated.clock import Clock, in_virtual_time
from tests.decode.simulated.constants import H200, Costs, Model
from tests.decode.simulated.device import Gpu, Link, union
from tests.decode.simulated.routing import BUILT, Likeness, Routing

_STEP_S = 1e-6  # of the clock where the host looks and nothing is on its way
_LOOKS = 50  # in vain, before a pass counts as stuck


@dataclass(frozen=True, slots=True)
class Run:
    """What is decoded, and how.

    Attributes:
        model: sizes.
        slots: for experts.
        record_bytes: of each.
        tokens: new ones.
        prompt: tokens before them.
        window: tokens of tail.
        fetch_rows: rows fetched ahead at most, as in profiles/h200.yaml.
        transfers: prefetches at a time, as there.
        eviction: policy of the cache.
        costs: of everything.
        likeness: of routing.
    """

    model: Model
    slots: int
    record_bytes: int
    tokens: int = 64
    prompt: int = 64
    window: int = 16
    fetch_rows: int = 8
    transfers: int = 3
    eviction: str = "lookahead"
    costs: Costs = H200
    likeness: Likeness = BUILT

    def routing(self, seed: int) -> Routing:
        """Of the text of a seed."""
        return Routing(self.model, self.prompt + self.tokens, seed, self.likeness)

    @property
    def fewest_slots(self) -> int:
        """Slots that a pass may need at once."""
        return min(ROWS * self.model.top_k, self.model.experts)


@dataclass(frozen=True, slots=True)
class Figures:
    """What decoding a text took, its prompt not counted.

    Attributes:
        ms: a token.
        gb: a token, over the link.
        tokens_per_round: of draft and verification.
        link: share of the time that those bytes take.
        draft_ms, verify_ms, wait_ms: a token, waiting for drafts, in passes, and of these for experts.
        steps: of the draft, a token.
        announcements: a token.
    """

    ms: float
    gb: float
    tokens_per_round: float
    link: float
    draft_ms: float
    verify_ms: float
    wait_ms: float
    steps: float
    announcements: float


class _Records:
    """Records that no one reads. A `RecordReader`."""

    def __init__(self, record_bytes: int) -> None:
        self.max_record_bytes = record_bytes

    def record_bytes(self, key: ExpertKey) -> int:
        return self.max_record_bytes

    def describe(self, key: ExpertKey) -> str:
        return str(key)

    def read_into(self, key: ExpertKey, buffer: Any, landed: Callable[[], None] | None = None) -> int:
        raise NotImplementedError("copies bring the records")


class _Places:
    """Slots without memory."""

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        self.num_slots, self.slot_bytes = num_slots, slot_bytes

    def tensor(self, slot: int) -> torch.Tensor:
        raise NotImplementedError("nothing lies there")

    def buffer(self, slot: int) -> None:
        return None


class World:
    """What the loop talks to: target, draft and experts, with a host that spends time on each.

    The host is one thread, as on a GPU without reader threads: it starts copies and sees them arrive while it waits.

    Attributes:
        clock: of everything.
        cache: of the experts.
        stats: of decoding.
        link: to the GPU.
        announcements: so far.
    """

    def __init__(self, run: Run, routing: Routing) -> None:
        self._model, self._costs, self._slots, self._routing = run.model, run.costs, run.slots, routing
        self._random = random.Random(routing.seed + 77)  # of the host's times
        self.clock = Clock()
        self.link = Link(self.clock, run.costs, run.record_bytes)
        self._gpu = Gpu(self.clock, run.costs, run.model.layers)
        records, places = _Records(run.record_bytes), _Places(run.slots, run.record_bytes)
        policy = make_policy(run.eviction)
        self.cache = ExpertCache(records, places, policy, run.transfers, self.link, self._gpu)
        self.stats = DecodeStats(self.cache.stats)
        self.announcements = 0

    # The host's time.

    def _spend_about(self, seconds: float) -> None:
        spread = self._costs.spread
        self.clock.spend(seconds * self._random.uniform(1 - spread, 1 + spread))

    def announcing(self) -> None:
        """Spend what planning an announcement takes."""
        self._spend_about(self._costs.announce_s)

    def _poll(self) -> None:
        """Look for a copy that has arrived, and again if it has; to note one takes time.

        Half of that goes by before the board has it. A look in vain takes none: the host looks all the time.
        """
        self._gpu.catch_up()
        arrived = self.link.next_landing <= self.clock.now
        if arrived:
            self.clock.spend(self._costs.poll_s / 2)
            self.link.see()
        self.cache.poll()
        if arrived:
            self.clock.spend(self._costs.poll_s / 2)
            if self.link.next_landing > self.clock.now:
                self.cache.poll()

    def _poll_until(self, moment: float) -> None:
        self._poll()
        while self.clock.now < moment:
            self.clock.until(min(moment, self.link.next_landing))
            if self.link.next_landing <= self.clock.now:
                self._poll()

    def _follow(self, come: Callable[[], bool], held: Hold | None) -> None:
        """Poll until the pass has come so far; what is held and not there counts as waited for."""
        waiting_since: float | None = None
        looks = 0
        self._gpu.catch_up()
        while not come():
            if held is not None and not held.complete:
                waiting_since = self.clock.now if waiting_since is None else waiting_since
            elif waiting_since is not None:
                self.cache.stats.wait_s += self.clock.now - waiting_since
                waiting_since = None
            self._poll()
            if come():
                break
            moment = min(self._gpu.next_event, self.link.next_landing)
            if moment < math.inf:
                self.clock.until(moment)
                self._gpu.catch_up()
                continue
            looks += 1
            if looks > _LOOKS:
                raise RuntimeError("a pass waits for what nobody brings")
            self.cache.poll()
            self.clock.spend(_STEP_S)
        if waiting_since is not None:
            self.cache.stats.wait_s += self.clock.now - waiting_since

    # Target.

    def prefill(self, tokens: Sequence[int]) -> None:
        """Bring the experts of a prompt, layer by layer; its products take no time."""
        most = max(1, self._slots - ROWS)
        routes = [self._routing.by_target(token, position) for position, token in enumerate(tokens)]
        for keys in union(routes, self._model.layers):
            for start in range(0, len(keys), most):
                with self.cache.hold(keys[start : start + most]) as hold:
                    while not hold.complete:
                        self.clock.until(self.link.next_landing)
                        self._poll()

    def rows(
        self, tokens: Sequence[int], position: int, begun: Callable[[], None] = nothing
    ) -> tuple[list[Scores], list[Route]]:
        """A pass: it is queued, announced, and followed layer by layer."""
        inputs = [(token, place) for place, token in enumerate(tokens, position)]
        self._spend_about(self._costs.start_s)
        routes = [self._routing.by_target(*one) for one in inputs]
        self._gpu.begin(union(routes, self._model.layers))
        begun()
        held: Hold | None = None
        for layer in range(self._model.layers):
            self._follow(partial(self._gpu.has_told, layer), held)
            if held is not None:
                held.close()
            held = self._ask(layer)
        self._follow(self._gpu.over, held)
        if held is not None:
            held.close()
        self._gpu.finish()
        self._spend_about(self._costs.finish_s)
        return [Scores(self._routing.after(*one), _no_values) for one in inputs], routes

    def _ask(self, layer: int) -> Hold:
        needed = self._gpu.told[layer]
        assert needed is not None
        self.clock.spend(self._costs.hold_s)
        self._gpu.catch_up()
        held = self.cache.hold(needed, kept=partial(self._gpu.meet, layer))
        if not held.complete:
            self.clock.spend(self._costs.hold_missing_s)
        return held

    # Draft.

    def propose(self, token: int, position: int, count: int, chooser: Chooser) -> Generator[tuple[Proposal, Route]]:
        """Steps are queued before this returns, and their logs read as they come."""
        self._spend_about(self._costs.queue_s)
        return self._read(token, position, self._gpu.queue_steps(count))

    def _read(self, token: int, position: int, ends: list[float]) -> Generator[tuple[Proposal, Route]]:
        for place, end in enumerate(ends, position):
            self._poll_until(end)
            self.clock.spend(self._costs.read_s)
            route = self._routing.by_draft(token, place)
            token = self._routing.proposed(token, place)
            yield Proposal(token), route

    # Experts.

    @property
    def complete(self) -> bool:
        """Whether every expert is in a slot."""
        return self.cache.num_resident == self._model.layers * self._model.experts

    def missing_bytes(self, keys: Sequence[ExpertKey]) -> int:
        """Bytes of those that are not; looking takes time."""
        self.clock.spend(self._costs.look_s)
        return self.cache.missing_bytes(keys)

    def announce(
        self, upcoming: Sequence[Sequence[ExpertKey]], fetch_rows: int | None = None, *, pass_rows: int = 1
    ) -> None:
        """See `ExpertCache.announce`."""
        self.announcements += 1
        self.cache.announce(upcoming, fetch_rows, pass_rows=pass_rows)


def decode(world: World, run: Run, governor: Governor) -> list[int]:
    """The text that the loop gives; `world` is as it left it."""
    limits = LoopSettings(
        max_new_tokens=run.tokens,
        stop_ids=frozenset(),
        prefetch_window=run.window,
        fetch_rows=rows_to_fetch(run.fetch_rows, run.slots / run.model.layers, run.model.experts, run.model.top_k),
        max_rows=ROWS,
    )
    loop = SpeculativeLoop(
        target=world,
        draft=world,
        experts=world,
        chooser=Chooser(SamplingSettings()),
        predictor=make_predictor("draft"),
        governor=governor,
        stats=world.stats,
        measured=Measured(ROWS),
    )
    with in_virtual_time(world.clock, world.announcing):
        return list(loop.generate(list(range(run.prompt)), limits))


def simulate(run: Run, governor: Governor, routing: Routing) -> Figures:
    """Decode a text and say what it took.

    Raises:
        ValueError: too few slots for a pass.
    """
    if run.slots < run.fewest_slots:
        raise ValueError(f"a pass needs {run.fewest_slots} slots, there are {run.slots}")
    world = World(run, routing)
    decode(world, run, governor)
    stats, tokens = world.stats, run.tokens
    seconds, num_bytes = world.clock.now - stats.prefill_s, stats.cache.read_bytes - stats.prefill_read_bytes
    return Figures(
        ms=1e3 * seconds / tokens,
        gb=num_bytes / tokens / 1e9,
        tokens_per_round=tokens / stats.rounds,
        link=num_bytes / run.costs.link_bytes_per_s / seconds,
        draft_ms=1e3 * stats.draft_s / tokens,
        verify_ms=1e3 * stats.verify_s / tokens,
        wait_ms=1e3 * (stats.cache.wait_s - stats.prefill_wait_s) / tokens,
        steps=stats.draft_steps / tokens,
        announcements=world.announcements / tokens,
    )


def _no_values() -> torch.Tensor:
    raise NotImplementedError("greedy choices need no logits")
