"""Which resident expert gives up its slot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from runtime.errors import InputError
from runtime.memory.location import ExpertKey

POLICIES = ("lru", "lfu", "priority", "lookahead")


class EvictionPolicy(Protocol):
    """One cache's rule. The cache calls it under its lock, so it needs none of its own.

    The cache alone decides who may go at all: pinned experts never, and for a prefetch only those that the announced
    rows need strictly later than the newcomer. The policy picks among these.
    """

    name: str
    takes_first: bool
    """Whether the victim among candidates that the window does not need is always the first."""

    def used(self, key: ExpertKey) -> None:
        """A `stream` call asked for the key, resident or not."""
        ...

    def loaded(self, key: ExpertKey, num_bytes: int, seconds: float) -> None:
        """A read of the key took that long."""
        ...

    def victim(self, candidates: Iterable[ExpertKey], next_use: Mapping[ExpertKey, int]) -> ExpertKey | None:
        """The candidate to evict, None when there is none.

        Args:
            candidates: those that may go, least recently used first.
            next_use: position of each announced key's next use; absent means not within the window.
        """
        ...


class LruPolicy:
    """Evicts what was used or loaded longest ago."""

    name = "lru"
    takes_first = True

    def used(self, key: ExpertKey) -> None:
        """The order of the candidates says it already."""

    def loaded(self, key: ExpertKey, num_bytes: int, seconds: float) -> None:
        """The order of the candidates says it already."""

    def victim(self, candidates: Iterable[ExpertKey], next_use: Mapping[ExpertKey, int]) -> ExpertKey | None:
        """The first candidate."""
        return next(iter(candidates), None)


class LfuPolicy(LruPolicy):
    """Evicts what was asked for least often since the start; among equals the least recently used."""

    name = "lfu"
    takes_first = False

    def __init__(self) -> None:
        self._uses: dict[ExpertKey, int] = {}

    def used(self, key: ExpertKey) -> None:
        """Count it; counts outlive an eviction."""
        self._uses[key] = self._uses.get(key, 0) + 1

    def victim(self, candidates: Iterable[ExpertKey], next_use: Mapping[ExpertKey, int]) -> ExpertKey | None:
        """The candidate with the fewest uses."""
        uses = self._uses
        return min(candidates, key=lambda key: uses.get(key, 0), default=None)


class PriorityPolicy(LfuPolicy):
    """Evicts the lowest alpha * heat + beta * size + gamma * transfer time, each as a share of its largest value.

    Heat is a table that was given, or else the uses so far; sizes and times come from the reads so far.
    """

    name = "priority"

    def __init__(
        self,
        heat: Mapping[ExpertKey, float] | None = None,
        alpha: float = 0.6,
        beta: float = 0.3,
        gamma: float = 0.1,
    ) -> None:
        super().__init__()
        self._heat = heat
        self._weights = (alpha, beta, gamma)
        self._num_bytes: dict[ExpertKey, float] = {}
        self._seconds: dict[ExpertKey, float] = {}

    def loaded(self, key: ExpertKey, num_bytes: int, seconds: float) -> None:
        """Keep the size, and the time smoothed over the last few reads."""
        self._num_bytes[key] = num_bytes
        self._seconds[key] = 0.75 * self._seconds.get(key, seconds) + 0.25 * seconds

    def victim(self, candidates: Iterable[ExpertKey], next_use: Mapping[ExpertKey, int]) -> ExpertKey | None:
        """The candidate with the lowest score."""
        heat, sizes, times = self._uses if self._heat is None else self._heat, self._num_bytes, self._seconds
        alpha, beta, gamma = (
            weight / (max(table.values(), default=0.0) or 1.0)
            for weight, table in zip(self._weights, (heat, sizes, times), strict=True)
        )
        return min(  # for every expert that may go, whenever one must: written out, as the run waits for it
            candidates,
            key=lambda key: alpha * heat.get(key, 0.0) + beta * sizes.get(key, 0.0) + gamma * times.get(key, 0.0),
            default=None,
        )


class LookaheadPolicy(LruPolicy):
    """Evicts what the window needs furthest away; before that, what it does not need, least recently used first.

    With a window that reaches far enough this is Belady's optimal replacement.
    """

    name = "lookahead"
    takes_first = True

    def victim(self, candidates: Iterable[ExpertKey], next_use: Mapping[ExpertKey, int]) -> ExpertKey | None:
        """The first candidate beyond the window, else the one whose next use is last."""
        furthest, chosen = -1, None
        for key in candidates:
            position = next_use.get(key)
            if position is None:
                return key
            if position > furthest:
                furthest, chosen = position, key
        return chosen


def make_policy(
    name: str,
    *,
    heat: Mapping[ExpertKey, float] | None = None,
    alpha: float = 0.6,
    beta: float = 0.3,
    gamma: float = 0.1,
) -> EvictionPolicy:
    """A new policy of this name, one a cache.

    Args:
        name: one of POLICIES.
        heat: for "priority", how often each expert is used, in any unit (a routing profile's counts).
        alpha, beta, gamma: for "priority", the weights of heat, size and transfer time.

    Raises:
        InputError: unknown name.
    """
    if name == "lru":
        return LruPolicy()
    if name == "lfu":
        return LfuPolicy()
    if name == "priority":
        return PriorityPolicy(heat, alpha, beta, gamma)
    if name == "lookahead":
        return LookaheadPolicy()
    raise InputError(
        expected=f"an eviction policy of {', '.join(POLICIES)}",
        found=repr(name),
        mend="pass one of these names (--eviction)",
    )
