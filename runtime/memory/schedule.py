"""Which missing experts to fetch ahead, and in whose place."""

from __future__ import annotations

from collections.abc import Collection
from heapq import heapify, heappop, heappush
from itertools import chain, islice, repeat
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
    elsewhere: Collection[ExpertKey] = (),
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
        elsewhere: what is not needed from here, as whoever would ask for it has it; what of it is in slots counts in
            num_free.
    """
    steps, announced, wanted, limit = window.fetch_steps, window.next_use, window.fetch, MOST_FETCHES
    present = {*slots, *on_their_way, *elsewhere}
    misses: dict[ExpertKey, int] = {}
    for start, keys, _ in steps:
        for position, key in [(position, key) for position, key in enumerate(keys, start) if key not in present]:
            misses.setdefault(key, position)
        if len(misses) >= limit and len(wanted & misses.keys()) >= limit:
            break
    if not misses:
        return []
    spare = (other for other in chain(slots, on_their_way) if other not in announced and other not in elsewhere)
    unneeded: list[ExpertKey] | None = None
    if policy.takes_first:
        count = max(len(misses) - num_free, 0)
        unneeded = list(islice(spare, count))  # all there are, if fewer
        if len(unneeded) == count:
            victims = chain(repeat(None, num_free), unneeded)
            found = zip(misses.items(), victims, strict=False)
            return [Fetch(key, position, victim) for (key, position), victim in found if key in wanted][:limit]
    idle: dict[ExpertKey, None] = {}  # used up in the play; once there is no free slot, all that are not needed
    ranked: list[tuple[float, int, ExpertKey]] = []  # those of idle, made when there is no free slot
    last = 0
    used: dict[ExpertKey, int] = {}  # by the play, up to the end of which step
    next_use: dict[ExpertKey, int] = {}  # of what is there, and furthest: made when nothing idle is left
    furthest: list[tuple[int, ExpertKey]] | None = None
    uses, use_from = window.uses, window.use_from
    looked = False
    fetches: list[Fetch] = []
    missed: set[ExpertKey] = set()
    for start, keys, step_end in steps:
        for position, key in enumerate(keys, start):
            if key in elsewhere:
                continue
            if key not in present:
                victim, needed = None, None
                if not num_free and not looked:
                    looked = True
                    idle = dict.fromkeys(spare if unneeded is None else unneeded) | idle
                    ranked = [(policy.worth(other), last, other) for last, other in enumerate(idle)]
                    heapify(ranked)
                    last = len(ranked)
                if num_free:
                    num_free -= 1
                elif idle:
                    victim = heappop(ranked)[-1]
                    del idle[victim]
                else:
                    if furthest is None:
                        there = (other for other in chain(slots, on_their_way) if other not in elsewhere)
                        unused = (other for other in there if other in announced and other not in used)
                        next_use = {other: announced[other] for other in unused}
                        again = ((other, use_from(other, end)) for other, end in used.items())
                        next_use |= {other: later for other, later in again if later is not None}
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
                if key not in missed and key in wanted and (needed is None or needed >= step_end):
                    fetches.append(Fetch(key, position, victim))
                    if len(fetches) == limit:
                        return fetches
                missed.add(key)
                present.add(key)
            used[key] = step_end
            if uses[key][-1] < step_end:
                next_use.pop(key, None)
                if looked and key not in idle:
                    heappush(ranked, (policy.worth(key), last, key))
                    last += 1
                idle[key] = None
            elif furthest is not None:
                later = use_from(key, step_end)
                assert later is not None
                next_use[key] = later
                heappush(furthest, (-later, key))
    return fetches
