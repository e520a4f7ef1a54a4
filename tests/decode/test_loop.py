"""The loop with a target and a draft written as rules: what is emitted, computed, announced and counted."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from runtime.decode.governor import Measured, Situation
from runtime.decode.loop import LoopSettings, Route, SpeculativeLoop, StepwiseDraft, nothing
from runtime.decode.sampling import Chooser, SamplingSettings
from runtime.memory.location import ExpertKey
from runtime.memory.predict import make_predictor
from runtime.memory.stats import CacheStats
from runtime.model.rowwise import MAX_ROWS
from runtime.stats import DecodeStats

VOCAB = 7
Rule = Callable[[tuple[int, ...]], int]  # a text -> the next token


def rule(seed: int) -> Rule:
    """A next token that depends on the whole text before it, so that a wrong KV entry shows."""
    return lambda text: random.Random(f"{seed} {text}").randrange(VOCAB)


def mixed(target: Rule, other: Rule, agreement: float, seed: int) -> Rule:
    """A draft that follows the target at this share of positions."""

    def follow(text: tuple[int, ...]) -> int:
        return target(text) if random.Random(f"{seed} {text} agree").random() < agreement else other(text)

    return follow


def one_hot(token: int) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(token), VOCAB).float()


def target_route(position: int, token: int) -> Route:
    return [(layer, (position * 3 + token + layer) % 8) for layer in range(2)]


def draft_route(position: int, token: int) -> Route:
    return [(0, (position * 3 + token) % 8), (1, 9)]  # right in layer 0 and wrong in layer 1


@dataclass
class World:
    """Target, draft and expert cache in one; checks at every call that the KV before it is of the right text.

    Attributes:
        kv: writer and token of each position.
        drafted: the proposal after each text that the draft was asked about.
        announced: the last announcement.
    """

    target: Rule
    draft: Rule
    prompt: list[int]
    wanted: int
    fetch_rows: int | None = None
    kv: dict[int, tuple[str, int]] = field(default_factory=dict)
    drafted: dict[tuple[int, ...], int] = field(default_factory=dict)
    routes: dict[int, Route] = field(default_factory=dict)
    announced: tuple[list[Route], int | None, int] | None = None
    rows_run: int = 0
    steps: int = 0

    def prefill(self, tokens: Sequence[int]) -> None:
        assert list(tokens) == self.prompt[:-1] and not self.kv
        self.kv = {position: ("target", token) for position, token in enumerate(tokens)}

    def rows(
        self, tokens: Sequence[int], position: int, begun: Callable[[], None] = nothing
    ) -> tuple[Tensor, list[Route]]:
        begun()
        assert 1 <= len(tokens) <= MAX_ROWS
        assert position + len(tokens) <= len(self.prompt) + self.wanted - 1, "beyond the last token wanted"
        assert all(self.kv[place][0] == "target" for place in range(position)), "a prefix of the draft's"
        assert self.announced is not None
        upcoming, fetch_rows, pass_rows = self.announced
        assert (fetch_rows, pass_rows) == (self.fetch_rows, len(tokens))
        assert upcoming == [self.routes[position + row] for row in range(len(upcoming))], "another tail's routes"
        assert len(upcoming) >= len(tokens) - 1
        logits = []
        for row, token in enumerate(tokens):
            self.kv[position + row] = ("target", token)
            logits.append(one_hot(self.target(self.text(position + row))))
        self.rows_run += len(tokens)
        self.announced = None
        return torch.stack(logits), [target_route(position + row, token) for row, token in enumerate(tokens)]

    def step(self, token: int, position: int) -> tuple[Tensor, Route]:
        assert position <= len(self.prompt) + self.wanted - 2, "drafted beyond the last token wanted"
        self.kv[position] = ("draft", token)
        text = self.text(position)
        assert text not in self.drafted, "drafted twice"
        self.drafted[text] = self.draft(text)
        self.routes[position] = draft_route(position, token)
        self.steps += 1
        return one_hot(self.drafted[text]), self.routes[position]

    def text(self, position: int) -> tuple[int, ...]:
        """What the KV says the text is, up to a position."""
        return tuple(self.kv[place][1] for place in range(position + 1))

    def announce(
        self, upcoming: Sequence[Sequence[ExpertKey]], fetch_rows: int | None = None, *, pass_rows: int = 1
    ) -> None:
        self.announced = [list(row) for row in upcoming], fetch_rows, pass_rows

    complete = False
    resident = False

    def missing_bytes(self, keys: Sequence[ExpertKey]) -> int:
        assert len(set(keys)) == len(keys)
        return 0 if self.resident else len(keys)


@dataclass
class Script:
    """A governor that asks for these numbers of proposals, one after the other, and remembers what came of them."""

    numbers: Sequence[int]
    name: str = "script"
    chosen: list[int] = field(default_factory=list)
    seen: list[tuple[int, int]] = field(default_factory=list)

    @property
    def most(self) -> int:
        return max(self.numbers)

    def choose(self, situation: Situation) -> int:
        bytes_by_j = [situation.missing_bytes(j) for j in range(situation.most + 1)]
        assert bytes_by_j == sorted(bytes_by_j)
        self.chosen.append(min(self.numbers[len(self.chosen) % len(self.numbers)], situation.most))
        return self.chosen[-1]

    def depth(self, measured: Measured) -> int:
        return self.numbers[len(self.chosen) % len(self.numbers)]

    def observe(self, tried: int, accepted: int) -> None:
        self.seen.append((tried, accepted))


def greedy(target: Rule, prompt: list[int], count: int, stop: frozenset[int]) -> list[int]:
    """The target alone, without any loop of ours."""
    text = list(prompt)
    while len(text) < len(prompt) + count:
        text.append(target(tuple(text)))
        if text[-1] in stop:
            break
    return text[len(prompt) :]


def run(world: World, script: Script, window: int, stop: frozenset[int] = frozenset(), drafting: bool = True):  # type: ignore[no-untyped-def]
    stats = DecodeStats(CacheStats())
    chooser, predictor = Chooser(SamplingSettings()), make_predictor("draft")
    loop = SpeculativeLoop(
        world, StepwiseDraft(world.step) if drafting else None, world, chooser, predictor, script, stats
    )
    return loop.generate(world.prompt, LoopSettings(world.wanted, stop, window, world.fetch_rows)), stats


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    agreement=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    window=st.integers(0, 24),
    numbers=st.lists(st.integers(0, 24), min_size=1, max_size=5),
    stop=st.frozensets(st.integers(0, VOCAB - 1), max_size=2),
    wanted=st.integers(0, 40),
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4),
    fetch_rows=st.sampled_from([None, 0, 2]),
    complete=st.booleans(),
)
def test_any_draft_window_and_governor_give_the_targets_own_text(
    seed: int,
    agreement: float,
    window: int,
    numbers: list[int],
    stop: frozenset[int],
    wanted: int,
    prompt: list[int],
    fetch_rows: int | None,
    complete: bool,
) -> None:
    target = rule(seed)
    draft = mixed(target, rule(seed + 1), agreement, seed)
    world, script = World(target, draft, prompt, wanted, fetch_rows), Script(numbers)
    world.complete = complete
    tokens, stats = run(world, script, window, stop, drafting=window > 0)
    given_out = list(tokens)
    assert given_out == greedy(target, prompt, wanted, stop)

    # Every count again, from what the fakes saw.
    text = (*prompt, *given_out)
    known = [p for p in range(len(prompt) - 1, len(text) - 1) if text[: p + 1] in world.drafted]
    right = [p for p in known if world.drafted[text[: p + 1]] == text[p + 1]]
    assert (stats.new_tokens, stats.prompt_tokens) == (len(given_out), len(prompt) if wanted else 0)
    assert (stats.proposals_judged, stats.proposals_right) == (len(known), len(right))
    assert (stats.experts_compared, stats.experts_agreed) == (2 * len(known), sum(_agreed(text, p) for p in known))
    assert (stats.draft_steps, stats.verify_rows) == (world.steps, world.rows_run)
    assert stats.rounds == len(script.chosen) and [tried for tried, _ in script.seen] == script.chosen
    assert stats.proposals_verified == sum(script.chosen)
    assert stats.proposals_accepted == sum(accepted for _, accepted in script.seen)
    assert stats.accepted_by_round == _by_round(script.seen)
    if agreement == 1 and window and given_out:
        assert stats.as_json()["acceptance"] == (1.0 if known else None)
        assert all(accepted == tried for tried, accepted in script.seen)


@pytest.mark.parametrize(("resident", "complete", "steps"), [(False, False, 12), (True, False, 4), (True, True, 3)])
def test_drafts_no_further_than_it_verifies_where_nothing_is_missing(
    resident: bool, complete: bool, steps: int
) -> None:
    """One more, which the target's own next token is compared with, where a tail still says what to bring."""
    target = rule(1)
    world = World(target, target, [1], 12, None)
    world.resident, world.complete = resident, complete
    tokens, _ = run(world, Script([3]), window=12)
    next(tokens)
    assert world.steps == steps


def test_looks_at_no_more_rows_than_it_takes_to_draft_on() -> None:
    """Nobody starts copies meanwhile: the first row that lacks enough decides, not the whole pass."""
    target = rule(1)
    looked: list[int] = []

    class Looking(World):
        def missing_bytes(self, keys: Sequence[ExpertKey]) -> int:
            looked.append(len(keys))
            return super().missing_bytes(keys)

    world = Looking(target, target, [1], 12, None)
    script = Script([3])
    script.choose = lambda situation: 0  # type: ignore[method-assign]
    tokens, _ = run(world, script, window=12)
    next(tokens)
    assert world.steps == 12
    assert len(looked) == 2, "four proposals, then twice four more, each after a look at one row"


def _agreed(text: tuple[int, ...], position: int) -> int:
    token = text[position]
    return len(set(draft_route(position, token)) & set(target_route(position, token)))


def _by_round(seen: list[tuple[int, int]]) -> dict[int, Counter[int]]:
    counts: dict[int, Counter[int]] = {}
    for tried, accepted in seen:
        counts.setdefault(tried, Counter())[accepted] += 1
    return counts


@pytest.mark.parametrize("window", [1, 3, 4, 9, 24])
@pytest.mark.parametrize("place", range(10))
def test_text_ends_at_the_first_stop_id_wherever_it_falls_in_a_block(window: int, place: int) -> None:
    """A counting target: the stop id is the token number `place` of a block of right drafts (H16)."""

    def count(text: tuple[int, ...]) -> int:
        return 6 if len(text) == 2 + place else len(text) % 6

    world, script = World(count, count, [0, 1], 40), Script([window])
    tokens, stats = run(world, script, window, frozenset({6}))
    assert list(tokens) == [*(n % 6 for n in range(2, 2 + place)), 6]
    assert stats.new_tokens == place + 1
    assert max(world.kv) == 1 + place, "nothing was drafted or verified from the stop id on"


@pytest.mark.parametrize("wanted", range(12))
def test_limits_that_are_no_multiple_of_the_window(wanted: int) -> None:
    target = rule(5)
    world, script = World(target, target, [1, 2], wanted), Script([4])
    tokens, stats = run(world, script, 4)
    assert list(tokens) == greedy(target, [1, 2], wanted, frozenset())
    assert stats.new_tokens == wanted
    assert stats.rounds == -(-wanted // 5)
    assert stats.draft_steps == wanted - wanted // 5, "a whole block's last token is the target's own"
    assert stats.as_json()["acceptance"] == (1.0 if wanted else None)


def test_no_draft_counts_no_proposals_and_computes_row_by_row() -> None:
    world, script = World(rule(1), rule(2), [3], 9), Script([8])
    tokens, stats = run(world, script, 0, drafting=False)
    assert list(tokens) == greedy(rule(1), [3], 9, frozenset())
    figures = stats.as_json()
    assert (figures["acceptance"], figures["routing_agreement"]) == (None, None)
    assert (figures["rounds"], figures["verify_rows"], figures["tokens_per_round"]) == (9, 9, 1.0)


def test_tokens_come_as_soon_as_they_are_decided_and_only_those_taken_are_counted() -> None:
    """A caller that stops in the middle of a block leaves the rest uncounted."""
    target = rule(9)
    world, script = World(target, target, [1], 40), Script([5])
    tokens, stats = run(world, script, 8)
    expected = greedy(target, [1], 40, frozenset())
    assert [next(tokens) for _ in range(4)] == expected[:4]
    assert stats.rounds == 1
    tokens.close()
    assert stats.new_tokens == 4


def test_right_tail_outlives_a_round_and_is_drafted_once() -> None:
    target = rule(3)
    world, script = World(target, target, [1], 30), Script([0, 2])
    tokens, stats = run(world, script, 10)
    assert list(tokens) == greedy(target, [1], 30, frozenset())
    assert stats.draft_steps == 30
    assert stats.proposals_right == 30 and stats.proposals_accepted == 14


def test_wrong_draft_drops_the_tail() -> None:
    target = rule(3)

    def wrong(text: tuple[int, ...]) -> int:
        return (target(text) + 1) % VOCAB

    world, script = World(target, wrong, [1], 10), Script([3])
    tokens, stats = run(world, script, 4)
    assert list(tokens) == greedy(target, [1], 10, frozenset())
    assert (stats.rounds, stats.proposals_accepted, stats.proposals_right) == (10, 0, 0)
    assert stats.as_json()["acceptance"] == 0.0


class Watched(World):
    """Notes what the loop does, in order."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.log: list[str] = []

    def rows(
        self, tokens: Sequence[int], position: int, begun: Callable[[], None] = nothing
    ) -> tuple[Tensor, list[Route]]:
        self.log.append("pass")
        return super().rows(tokens, position, begun)

    def step(self, token: int, position: int) -> tuple[Tensor, Route]:
        self.log.append("step")
        return super().step(token, position)

    def announce(
        self, upcoming: Sequence[Sequence[ExpertKey]], fetch_rows: int | None = None, *, pass_rows: int = 1
    ) -> None:
        self.log.append(f"announce {len(upcoming)}")
        super().announce(upcoming, fetch_rows, pass_rows=pass_rows)


def test_a_device_has_begun_before_anything_is_announced_and_the_last_row_is_announced_once() -> None:
    target = rule(3)
    world = Watched(target, target, [1, 2], 4, None)
    tokens, _ = run(world, Script([2]), window=3)
    list(tokens)
    assert world.log[:7] == ["step", "announce 1", "step", "announce 2", "step", "pass", "announce 3"]
