"""Victims found by rank are those that the plain rule picks among all."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.memory.eviction import make_policy
from runtime.memory.location import ExpertKey
from runtime.memory.residency import Residency
from runtime.memory.stats import CacheStats

NUM_SLOTS, ALPHA, BETA, GAMMA = 5, 0.5, 0.3, 0.2

steps = st.tuples(st.integers(0, 9), st.integers(1, 3), st.sampled_from([0.25, 0.5, 1.0, 3.0]), st.booleans())
heats = st.none() | st.dictionaries(st.integers(0, 9).map(lambda expert: (0, expert)), st.integers(0, 5))


class Plain:
    """The rule as it is told, worked out anew from tables for every victim."""

    def __init__(self, name: str, heat: Mapping[ExpertKey, float] | None) -> None:
        self.name, self.heat = name, heat
        self.uses: dict[ExpertKey, float] = {}
        self.sizes: dict[ExpertKey, float] = {}
        self.times: dict[ExpertKey, float] = {}
        self.slots: OrderedDict[ExpertKey, None] = OrderedDict()

    def worth(self) -> Callable[[ExpertKey], float]:
        if self.name == "lfu":
            return lambda key: self.uses.get(key, 0)
        tables = (self.uses if self.heat is None else self.heat, self.sizes, self.times)
        weights = zip((ALPHA, BETA, GAMMA), tables, strict=True)
        factors = [weight / (max(table.values(), default=0.0) or 1.0) for weight, table in weights]

        def score(key: ExpertKey) -> float:
            shares = [factor * table.get(key, 0.0) for factor, table in zip(factors, tables, strict=True)]
            return shares[0] + shares[1] + shares[2]

        return score

    def victim(self, may_go: Callable[[ExpertKey], bool]) -> ExpertKey | None:
        return min(filter(may_go, self.slots), key=self.worth(), default=None)


@pytest.mark.parametrize("name", ["lfu", "priority"])
@given(st.lists(steps, max_size=60), heats)
@settings(max_examples=200, deadline=None)
def test_ranked_victims_are_the_plain_rules(
    name: str, demands: list[tuple[int, int, float, bool]], heat: dict[ExpertKey, float] | None
) -> None:
    policy = make_policy(name, heat=heat, alpha=ALPHA, beta=BETA, gamma=GAMMA)
    residency, plain = Residency(NUM_SLOTS, policy, CacheStats()), Plain(name, heat)
    pinned: ExpertKey | None = None
    for expert, size, seconds, keep in demands:
        key = (0, expert)
        policy.used(key)
        plain.uses[key] = plain.uses.get(key, 0) + 1
        if key in residency.slots:
            residency.use(key)
            residency.unpin([key])
            plain.slots.move_to_end(key)
        else:
            if len(plain.slots) == NUM_SLOTS:
                victim = plain.victim(lambda other, kept=pinned: other != kept)  # type: ignore[misc]
                assert victim is not None
                del plain.slots[victim]
            slot = residency.claim()
            assert slot is not None
            plain.slots[key] = None
            policy.loaded(key, size, seconds)
            plain.sizes[key] = size
            plain.times[key] = 0.75 * plain.times.get(key, seconds) + 0.25 * seconds
            residency.settle(key, slot, None)
        assert list(residency.slots) == list(plain.slots)
        worth = plain.worth()
        assert all(policy.worth((0, other)) == worth((0, other)) for other in range(10))
        if keep:
            residency.unpin([pinned] if pinned is not None else [])
            residency.pin(key)
            pinned = key


class Refusing:
    """A board on which some are in use."""

    def __init__(self, in_use: set[ExpertKey]) -> None:
        self.in_use = in_use

    def put(self, key: ExpertKey, slot: int) -> None:
        """Nobody looks."""

    def withdraw(self, key: ExpertKey) -> bool:
        return key not in self.in_use


def test_the_next_one_goes_where_the_board_keeps_the_first() -> None:
    policy = make_policy("lfu")
    residency = Residency(3, policy, CacheStats(), Refusing({(0, 0)}))
    for expert, uses in ((0, 1), (1, 3), (2, 2)):
        slot = residency.claim()
        assert slot is not None
        for _ in range(uses):
            policy.used((0, expert))
        residency.settle((0, expert), slot, None)
    assert residency.claim() is not None and list(residency.slots) == [(0, 0), (0, 1)]
