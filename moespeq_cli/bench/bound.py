"""The fewest reads that a recorded run could have made."""

from __future__ import annotations

from itertools import groupby

from runtime.artifacts.pack import Pack
from runtime.memory.clairvoyant import Trace, belady
from runtime.memory.stats import CacheStats


def passes(trace: Trace) -> Trace:
    """Demands as the cache was asked: the rows of one pass ask for a layer's experts together.

    An engine's trace has them apart, within a layer one row after the other. In a model with a single MoE layer passes
    cannot be told from each other; then all become one, which needs fewer reads still.
    """
    return [[key for row in rows for key in row] for _, rows in groupby(filter(None, trace), lambda row: row[0][0])]


def check_reads(trace: Trace, num_slots: int, stats: CacheStats) -> int:
    """The fewest reads for a run's own demands.

    Args:
        trace: every demand of the run, from an empty cache on.
        num_slots: of the cache.
        stats: of the cache, after the run.

    Raises:
        RuntimeError: the run counted fewer reads.
    """
    fewest, found = belady(passes(trace), num_slots), stats.demand_reads + stats.prefetch_reads
    if found < fewest:
        raise RuntimeError(
            f"{found} reads counted where no cache of {num_slots} slots needs fewer than {fewest}: "
            f"reads or demands are counted wrongly"
        )
    return fewest


def record_bytes(pack: Pack) -> int:
    """Bytes of a pack's smallest read; in a raw pack all are equal."""
    return min(place.padded_bytes for place in pack.target_locations().values())
