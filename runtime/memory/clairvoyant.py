"""The reads that a recorded routing cannot do without, and what each policy would have read.

A trace is the demands in order: each item is what one `stream` call asks for. Within a demand resident experts are
served before missing ones, as the cache does it. Nothing is prefetched here: a prefetch moves a read, it saves none.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from runtime.errors import InputError
from runtime.memory.eviction import EvictionPolicy
from runtime.memory.location import ExpertKey
from runtime.memory.window import Window

Trace = Sequence[Sequence[ExpertKey]]


@dataclass(frozen=True, slots=True)
class Replay:
    """What one policy does on a trace; each different key of a demand is one request."""

    requests: int
    misses: int
    read_bytes: int

    @property
    def hit_rate(self) -> float | None:
        """Share of requests without a read; None for an empty trace."""
        return 1 - self.misses / self.requests if self.requests else None


def belady(trace: Trace, num_slots: int, resident: Iterable[ExpertKey] = ()) -> int:
    """Reads that no policy, prefetching or not, can stay below on this trace with `num_slots` slots.

    After each demand it keeps the experts whose next use comes first (Belady, IBM Systems Journal 5(2), 1966), the
    one just read among them. Where demands have one expert each this is the exact minimum. Demands of several may be
    served in any order, and then the bound lets every expert go at once, even the last one read: below the minimum
    by 4 % at 1 slot, 1 % at 3 and 0.2 % at 5 (random traces of up to 4 experts a demand, against full search).

    Args:
        trace: the demands.
        num_slots: at least 1.
        resident: what is in slots at the start, at most num_slots.

    Raises:
        InputError: no slot, or more residents than slots.
    """
    demands = [list(dict.fromkeys(keys)) for keys in trace]
    cached = set(_start(num_slots, resident))
    next_uses, first_uses = _next_uses(demands)
    next_use = {key: first_uses.get(key, len(demands)) for key in cached}
    misses = 0
    for keys, uses in zip(demands, next_uses, strict=True):
        missing = [key for key in keys if key not in cached]
        misses += len(missing)
        next_use.update(zip(keys, uses, strict=True))
        cached.update(keys)
        if len(cached) > num_slots:
            order = sorted(cached, key=lambda key: next_use[key])
            if missing and len(keys) == 1:
                order.remove(keys[0])
                order.insert(0, keys[0])
            cached = set(order[:num_slots])
    return misses


def replay(
    trace: Trace,
    num_slots: int,
    policy: EvictionPolicy,
    *,
    resident: Iterable[ExpertKey] = (),
    record_bytes: Callable[[ExpertKey], int] | None = None,
    window: int = 0,
    foreseen: Trace | None = None,
    row_demands: int = 1,
) -> Replay:
    """What a fresh policy would read, without the model and without prefetching.

    Experts of the running demand give way only where nothing else is left.

    Args:
        trace: the demands.
        num_slots: at least 1.
        policy: a new object of `make_policy`.
        resident: what is in slots at the start, least recently used first.
        record_bytes: size of each expert's record; without it read_bytes is 0.
        window: rows, the running one included, that are announced before each row (for "lookahead").
        foreseen: what is announced in place of the trace itself, demand by demand: a guess, such as a draft's.
        row_demands: demands that make up a row, such as one for each layer.

    Raises:
        InputError: no slot, or more residents than slots.
    """
    slots: OrderedDict[ExpertKey, None] = OrderedDict.fromkeys(_start(num_slots, resident))
    announced = _rows(trace if foreseen is None else foreseen, row_demands) if window else []
    plan = Window()
    requests = misses = read_bytes = 0
    for index, demand in enumerate(trace):
        if window and index % row_demands == 0:
            row = index // row_demands
            plan.announce(announced[row : row + window], 0, 1)
        keys = dict.fromkeys(demand)
        requests += len(keys)
        for key in keys:
            policy.used(key)
            plan.consume(key)
        missing = [key for key in keys if key not in slots]
        for key in keys:
            if key in slots:
                slots.move_to_end(key)
        for key in missing:
            if len(slots) == num_slots:
                _evict(slots, keys, policy, plan.next_use)
            slots[key] = None
            num_bytes = record_bytes(key) if record_bytes else 0
            policy.loaded(key, num_bytes, float(num_bytes))
            read_bytes += num_bytes
        misses += len(missing)
    return Replay(requests, misses, read_bytes)


def _rows(trace: Trace, row_demands: int) -> list[list[ExpertKey]]:
    starts = range(0, len(trace), row_demands)
    return [[key for demand in trace[start : start + row_demands] for key in demand] for start in starts]


def _evict(
    slots: OrderedDict[ExpertKey, None],
    running: Mapping[ExpertKey, None],
    policy: EvictionPolicy,
    next_use: Mapping[ExpertKey, int],
) -> None:
    victim = policy.victim((key for key in slots if key not in running), next_use)
    if victim is None:
        victim = policy.victim(iter(slots), next_use)
    assert victim is not None  # all slots are taken, and there is at least one
    del slots[victim]


def _start(num_slots: int, resident: Iterable[ExpertKey]) -> list[ExpertKey]:
    keys = list(dict.fromkeys(resident))
    if num_slots < 1 or len(keys) > num_slots:
        raise InputError(
            expected="at least 1 slot, and no more residents than slots",
            found=f"{num_slots} slots and {len(keys)} residents",
            mend="raise num_slots",
        )
    return keys


def _next_uses(demands: Sequence[Sequence[ExpertKey]]) -> tuple[list[list[int]], dict[ExpertKey, int]]:
    """(for each key of each demand the index of the next demand that has it, the first demand of each key).

    len(demands) stands for never.
    """
    after: dict[ExpertKey, int] = {}
    rows: list[list[int]] = []
    for index in range(len(demands) - 1, -1, -1):
        rows.append([after.get(key, len(demands)) for key in demands[index]])
        after.update(dict.fromkeys(demands[index], index))
    return rows[::-1], after
