"""How many drafted tokens the next verification takes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Protocol

from runtime.decode.pass_cost import PassCost
from runtime.errors import InputError

GOVERNORS = ("fixed", "threshold", "roofline")
_SMOOTHING = 0.1  # weight of the newest measurement
_PRIOR_ACCEPTANCE = 0.9
_FORGETTING = 0.01  # a round without proposals takes what is known of them so much nearer to the prior


class Measured:
    """What a run has shown so far: seconds of a draft step and of a verification, acceptance by place in the pass.

    Args:
        rows_at_once: rows that the target computes in one part; see `PassCost`.
    """

    def __init__(self, rows_at_once: int = 1) -> None:
        self.draft_s = 0.0
        self._cost = PassCost(rows_at_once)
        self._acceptance: list[float] = []

    def drafted(self, seconds: float) -> None:
        """One draft step took so long."""
        self.draft_s = _smooth(self.draft_s, seconds)

    def computed(self, rows: int, seconds: float) -> None:
        """So many rows were computed in so long, waiting for experts not counted."""
        self._cost.computed(rows, seconds)

    def pass_s(self, rows: int) -> float:
        """Seconds to compute so many rows; before the first pass a draft step, of as many layers, stands for one."""
        return self._cost.seconds(rows) or self._cost.parts(rows) * self.draft_s

    def judged(self, tried: int, accepted: int) -> None:
        """Of `tried` proposals that met the target's choice, verified or compared, the first `accepted` were right."""
        while len(self._acceptance) < tried:
            self._acceptance.append(_PRIOR_ACCEPTANCE)
        for place in range(min(accepted + 1, tried)):
            hit = 1.0 if place < accepted else 0.0
            self._acceptance[place] += _SMOOTHING * (hit - self._acceptance[place])

    def idle(self) -> None:
        """A round had no proposals: what earlier ones showed holds a little less, so that they are tried again."""
        for place, known in enumerate(self._acceptance):
            self._acceptance[place] = known + _FORGETTING * (_PRIOR_ACCEPTANCE - known)

    def acceptance(self, place: int) -> float:
        """Probability that the proposal at this place is right where all before it were."""
        if place < len(self._acceptance):
            return self._acceptance[place]
        return self._acceptance[-1] if self._acceptance else _PRIOR_ACCEPTANCE

    def chances(self, most: int) -> list[float]:
        """Probability that the first j proposals are right, by j from 0 to `most`."""
        return list(accumulate(map(self.acceptance, range(most)), mul, initial=1.0))


def _smooth(old: float, new: float) -> float:
    return new if old == 0 else old + _SMOOTHING * (new - old)


@dataclass(frozen=True, slots=True)
class Situation:
    """What is known when a verification begins.

    Attributes:
        most: proposals that may be verified at most.
        missing_bytes: of the experts for rows 0 .. j, by j; the routing of the drafted rows is on record.
        bytes_per_s: of the link, as measured; 0 when nothing was read yet.
        measured: times and acceptance so far.
    """

    most: int
    missing_bytes: Callable[[int], int]
    bytes_per_s: float
    measured: Measured


class Governor(Protocol):
    """Picks the number of proposals to verify, `most` at most."""

    name: str
    most: int

    def choose(self, situation: Situation) -> int:
        """A number from 0 to `situation.most`."""

    def depth(self, measured: Measured) -> int:
        """Proposals worth drafting where every expert is in a slot: their routing brings nothing."""

    def observe(self, tried: int, accepted: int) -> None:
        """How the verification went."""


class Fixed:
    """Always the same number."""

    name = "fixed"

    def __init__(self, verify_window: int) -> None:
        self.most = verify_window

    def choose(self, situation: Situation) -> int:
        """The verify window, or what there is."""
        return min(self.most, situation.most)

    def depth(self, measured: Measured) -> int:
        """The verify window."""
        return self.most

    def observe(self, tried: int, accepted: int) -> None:
        """Nothing is learnt."""


class Threshold:
    """One more while the mean of the last ten acceptance rates is above 0.9, else one less; 1 to the window."""

    name = "threshold"

    def __init__(self, verify_window: int) -> None:
        self.most = max(verify_window, 1)
        self._window = 1
        self._rates: deque[float] = deque(maxlen=10)

    def choose(self, situation: Situation) -> int:
        """The current number, or what there is."""
        return min(self._window, situation.most)

    def depth(self, measured: Measured) -> int:
        """The current number."""
        return self._window

    def observe(self, tried: int, accepted: int) -> None:
        """Move the number by one."""
        if tried:
            self._rates.append(accepted / tried)
            step = 1 if sum(self._rates) / len(self._rates) > 0.9 else -1
            self._window = min(max(self._window + step, 1), self.most)


class Roofline:
    """The number with the most expected tokens a second, 0 included.

    Expected tokens are 1 plus the sum of the products of acceptance. The time is half way between two. One is the
    larger of the link's, by the bytes still missing, and of pass and draft steps used up together. The other has the
    steps in addition to the larger of link and pass: they come before or after the pass and do not shorten its waiting,
    though the link brings later rows' experts beside them.
    """

    name = "roofline"

    def __init__(self, verify_window: int) -> None:
        self.most = verify_window

    def choose(self, situation: Situation) -> int:
        """The best j by the estimate; the smaller one of equals.

        It looks at no more rows than it must: the host looks while the device stands still and no copy is started.
        """
        measured, most = situation.measured, min(self.most, situation.most)
        chances = measured.chances(most)
        best, best_rate, expected, most_tokens = 0, 0.0, 0.0, sum(chances)
        for j, chance in enumerate(chances):
            expected += chance
            link_s = situation.missing_bytes(j) / situation.bytes_per_s if situation.bytes_per_s else 0.0
            pass_s, steps_s = measured.pass_s(j + 1), expected * measured.draft_s
            seconds = (max(link_s, pass_s + steps_s) + max(link_s, pass_s) + steps_s) / 2
            rate = expected / max(seconds, 1e-9)
            if rate > best_rate * (1 + 1e-9):
                best, best_rate = j, rate
            if link_s * best_rate > most_tokens:  # bytes only grow: not even all tokens would be worth them
                break
        return best

    def depth(self, measured: Measured) -> int:
        """The number with the most expected tokens a second, 0 included, when each costs a step of the draft."""
        if measured.draft_s == 0:
            return self.most
        expected = accumulate(measured.chances(self.most))
        rates = [tokens / (measured.pass_s(j + 1) + j * measured.draft_s) for j, tokens in enumerate(expected)]
        return rates.index(max(rates))

    def observe(self, tried: int, accepted: int) -> None:
        """`Measured` keeps what it needs."""


def make_governor(name: str, verify_window: int) -> Governor:
    """A governor by name.

    Raises:
        InputError: an unknown name or a negative window.
    """
    makers: dict[str, Callable[[int], Governor]] = {"fixed": Fixed, "threshold": Threshold, "roofline": Roofline}
    if name not in makers:
        raise InputError(
            expected=f"a governor of {', '.join(GOVERNORS)}", found=repr(name), mend="pass one of them to --governor"
        )
    if verify_window < 0:
        raise InputError(
            expected="a --verify-window of 0 or more", found=str(verify_window), mend="0 verifies one row at a time"
        )
    return makers[name](verify_window)
