"""Which missing experts to fetch ahead, and in whose place."""

from __future__ import annotations

from collections.abc import Collection, Container
from heapq import heapify, heappop, heappush
from itertools import chain, islice
from typing import NamedTuple

from runtime.memory.eviction import EvictionPolicy
from runtime.memory.location import ExpertKey
from runtime.memory.window import Window

MOST_FETCHES = 128
"""Of one schedule: more than a link moves until, as a rule, the next one replaces it."""


class Fetch(NamedTuple):
    """A read that may go ahead of its need.

    Attributes:
        key: the missing expert.
        position: of its use in the window.
        victim: the expert that gives way, once it has no use left before that position; None for a free slot.
    """

    key: ExpertKey
    position: int
    victim: ExpertKey | None


def schedule(
    window: Window,
    slots: Collection[ExpertKey],
    on_their_way: Collection[ExpertKey],
    num_free: int,
    policy: EvictionPolicy,
    elsewhere: Container[ExpertKey] = (),
) -> list[Fetch]:
    """The fetches of the window, soonest need first.

    Plays the window forward as if nothing were prefetched and every miss evicted what is needed furthest away. Each
    miss then has a victim, and fetching early into the place of a victim that waits for nothing else moves the read in
    time and adds none. Taking the place of anything that is merely needed later does add reads: on a trace of 96
    experts, 24 a row, in 36 slots, 745 in place of 463 when fetching two rows ahead, and nearly LRU's 834 when
    fetching all.

    It runs between draft steps, so it plays only where there are more misses than free slots and residents that the
    window does not need, before which a play takes no other victims; and a play ends with its first MOST_FETCHES.

    Args:
        window: the announced rows; misses are looked for in its fetch_steps.
        slots: what is resident, least recently used first.
        on_their_way: what is being read.
        num_free: slots beside these.
        policy: picks among the residents that the window does not need.
        elsewhere: what is not needed from here, as whoever would ask for it has it; none of it in slots.
    """
    steps = window.fetch_steps
    present = {key for step in steps for key in step.keys if key in slots or key in on_their_way or key in elsewhere}
    if all(present.issuperset(step.keys) for step in steps):
        return []
    if policy.takes_first:
        misses: dict[ExpertKey, int] = {}
        for start, keys, _ in steps:
            for position, key in enumerate(keys, start):
                if key not in present:
                    misses.setdefault(key, position)
        count = max(len(misses) - num_free, 0)
        unneeded = (other for other in chain(slots, on_their_way) if other not in window.next_use)
        victims = [None] * num_free + list(islice(unneeded, count))
        if len(victims) >= len(misses):
            found = zip(misses.items(), victims, strict=False)
            return [Fetch(key, position, victim) for (key, position), victim in found if key in window.fetch]
    idle: dict[ExpertKey, None] = {}  # used up in the play; once there is no free slot, all that are not needed
    next_use: dict[ExpertKey, int] = {}  # of what the play has used; the window's holds for the others
    used: set[ExpertKey] = set()
    furthest: list[tuple[int, ExpertKey]] | None = None  # made when nothing idle is left
    looked = False
    fetches: list[Fetch] = []
    missed: set[ExpertKey] = set()
    for start, keys, step_end in window.fetch_steps:
        for position, key in enumerate(keys, start):
            if key in elsewhere:
                continue
            if key not in present:
                victim, needed = None, None
                if not num_free and not looked:
                    looked = True
                    unneeded = (other for other in chain(slots, on_their_way) if other not in window.next_use)
                    idle = dict.fromkeys(unneeded) | idle
                if num_free:
                    num_free -= 1
                elif idle:
                    victim = policy.victim(idle, {})
                    assert victim is not None
                    del idle[victim]
                else:
                    if furthest is None:
                        unused = (other for other in chain(slots, on_their_way) if other not in used)
                        next_use |= {other: window.next_use[other] for other in unused if other in window.next_use}
                        furthest = [(-later, other) for other, later in next_use.items()]
                        heapify(furthest)
                    while furthest and next_use.get(furthest[0][1]) != -furthest[0][0]:
                        heappop(furthest)  # used since it was pushed
                    if not furthest:
                        return fetches  # all slots belong to demands on their way
                    victim = heappop(furthest)[1]
                    needed = next_use.pop(victim)
                if victim is not None:
                    present.discard(victim)
                # What the same step needs stays: to fetch into its place would trade one wait for another.
                if key not in missed and key in window.fetch and (needed is None or needed >= step_end):
                    fetches.append(Fetch(key, position, victim))
                    if len(fetches) == MOST_FETCHES:
                        return fetches
                missed.add(key)
                present.add(key)
            used.add(key)
            later = window.use_from(key, step_end)
            if later is None:
                next_use.pop(key, None)
                idle[key] = None
            else:
                next_use[key] = later
                if furthest is not None:
                    heappush(furthest, (-later, key))
    return fetches
