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
    """Whether the victim among candidates that the window does not need is always the first.

    Where not, it is the one that is worth least, and of equals the first.
    """
    scale: int
    """Changes when what many experts are worth does; between changes `used` and `loaded` change that of their key."""

    def used(self, key: ExpertKey) -> None:
        """A `stream` call asked for the key, resident or not."""
        ...

    def loaded(self, key: ExpertKey, num_bytes: int, seconds: float) -> None:
        """A read of the key took that long."""
        ...

    def worth(self, key: ExpertKey) -> float:
        """What it is worth to keep an expert; the same for all where the victim is always the first."""
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
    scale = 0

    def used(self, key: ExpertKey) -> None:
        """The order of the candidates says it already."""

    def loaded(self, key: ExpertKey, num_bytes: int, seconds: float) -> None:
        """The order of the candidates says it already."""

    def worth(self, key: ExpertKey) -> float:
        """Nothing; the order decides."""
        return 0.0

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

    def worth(self, key: ExpertKey) -> float:
        """Its uses."""
        return self._uses.get(key, 0)

    def victim(self, candidates: Iterable[ExpertKey], next_use: Mapping[ExpertKey, int]) -> ExpertKey | None:
        """The candidate that is worth least."""
        return min(candidates, key=self.worth, default=None)


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
        self._heat: Mapping[ExpertKey, float] = self._uses if heat is None else heat
        self._num_bytes: dict[ExpertKey, float] = {}
        self._seconds: dict[ExpertKey, float] = {}
        self._weights = (alpha, beta, gamma)
        self._worth: dict[ExpertKey, float] = {}  # as far as asked for and still right
        self._largest = [max(self._heat.values(), default=0.0), 0.0, 0.0]
        self._rescale()

    def used(self, key: ExpertKey) -> None:
        """Count it; it is the heat where no table was given."""
        super().used(key)
        if self._heat is self._uses:
            self._worth.pop(key, None)
            if self._uses[key] > self._largest[0]:
                self._largest[0] = self._uses[key]
                self._rescale()

    def loaded(self, key: ExpertKey, num_bytes: int, seconds: float) -> None:
        """Keep the size, and the time smoothed over the last few reads."""
        self._note(1, self._num_bytes, key, num_bytes)
        self._note(2, self._seconds, key, 0.75 * self._seconds.get(key, seconds) + 0.25 * seconds)

    def _note(self, index: int, table: dict[ExpertKey, float], key: ExpertKey, value: float) -> None:
        before, largest = table.get(key), self._largest[index]
        table[key] = value
        self._worth.pop(key, None)
        if value > largest or (before == largest and value < largest):
            self._largest[index] = max(table.values())
            self._rescale()

    def _rescale(self) -> None:
        self._factors = [weight / (most or 1.0) for weight, most in zip(self._weights, self._largest, strict=True)]
        self._worth.clear()
        self.scale += 1

    def worth(self, key: ExpertKey) -> float:
        """The weighted sum."""
        known = self._worth.get(key)
        if known is None:
            alpha, beta, gamma = self._factors
            heat, num_bytes = self._heat.get(key, 0.0), self._num_bytes.get(key, 0.0)
            known = self._worth[key] = alpha * heat + beta * num_bytes + gamma * self._seconds.get(key, 0.0)
        return known


class LookaheadPolicy(LruPolicy):
    """Evicts what the window needs furthest away; before that, what it does not need, least recently used first.

    With a window that reaches far enough this is Belady's optimal replacement.
    """

    name = "lookahead"
    takes_first = True

    def victim(self, candidates: Iterable[ExpertKey], next_use: Mapping[ExpertKey, int]) -> ExpertKey | None:
        """The first candidate beyond the window, else the one whose next use is last."""
        furthest, chosen, position_of = -1, None, next_use.get
        for key in candidates:
            position = position_of(key)
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
