"""Residents in the order in which they go, for policies that look at more than when they were used."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable

from runtime.memory.eviction import EvictionPolicy
from runtime.memory.location import ExpertKey


class Ranking:
    """Residents sorted by what they are worth, of equals the least recently used or loaded first.

    It finds the one that `policy.victim` would pick among all that may go, and looks only at those before it. A change
    of one expert costs a place in a list; a change of the policy's scale costs a sort at the next question.

    An interrupt between any two steps may leave residents out until they are put again, and leaves nothing else behind:
    whatever is in the order is a resident.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._scale = policy.scale
        self._order: list[tuple[float, int, ExpertKey]] = []
        self._entries: dict[ExpertKey, tuple[float, int, ExpertKey]] = {}
        self._clock = 0

    def put(self, key: ExpertKey) -> None:
        """A resident was loaded, or used just now."""
        self.drop(key)
        self._clock += 1
        entry = self._entries[key] = self._policy.worth(key), self._clock, key
        insort(self._order, entry)

    def drop(self, key: ExpertKey) -> None:
        """It is resident no more; one that was not changes nothing."""
        entry = self._entries.get(key)
        if entry is None:
            return
        index = bisect_left(self._order, entry)
        if self._order[index : index + 1] == [entry]:
            del self._order[index]
        self._entries.pop(key)

    def first(self, may_go: Callable[[ExpertKey], bool]) -> ExpertKey | None:
        """The one to evict; None where none may go."""
        if self._scale != self._policy.scale:
            scale, worth = self._policy.scale, self._policy.worth
            entries = {key: (worth(key), clock, key) for key, (_, clock, _) in self._entries.items()}
            order = sorted(entries.values())
            self._entries, self._order, self._scale = entries, order, scale
        return next((key for _, _, key in self._order if may_go(key)), None)
