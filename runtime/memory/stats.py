"""What the expert cache did, in counts, bytes and seconds."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields


@dataclass(slots=True)
class CacheStats:
    """Running totals of one cache. Every key of a `stream` call is one hit, one miss or one late.

    Attributes:
        hits: keys that were resident when asked for.
        late: keys that were on their way when asked for: by a prefetch, an earlier call or a return.
        misses: all other keys asked for; each costs a demand read, unless its record is returned just then.
        demand_bytes, prefetch_bytes: bytes read from the store, by cause, padding included.
        demand_reads, prefetch_reads: records read, by cause.
        prefetched_used: prefetched records that a `stream` then asked for (late ones too).
        prefetched_unused: prefetched records evicted before any use.
        prefetched_unused_bytes: their bytes.
        failed_prefetches: prefetch reads that raised; a `stream` of such a key reads again and raises.
        returned: records that whoever reads from the cache gave back to it, which saves a read.
        returned_bytes: their bytes.
        evictions: records that gave up their slot.
        wait_s: seconds that `stream` stood still for records.
        link_busy_s: seconds with at least one read on the link, up to the last read that ended; checksums not counted.
        link_idle_s: seconds with nothing on the link though something was to be read, without a slot yet or a reader;
            pauses between two texts not counted.
        read_s: seconds of all reads on the link added up, parallel ones too.
        paced_bytes_per_s: of the newest copies that are known to have followed one another without a pause; 0 where
            none are. See `Pace`.
    """

    hits: int = 0
    misses: int = 0
    late: int = 0
    demand_bytes: int = 0
    prefetch_bytes: int = 0
    demand_reads: int = 0
    prefetch_reads: int = 0
    prefetched_used: int = 0
    prefetched_unused: int = 0
    prefetched_unused_bytes: int = 0
    failed_prefetches: int = 0
    returned: int = 0
    returned_bytes: int = 0
    evictions: int = 0
    wait_s: float = 0.0
    link_busy_s: float = 0.0
    link_idle_s: float = 0.0
    read_s: float = 0.0
    paced_bytes_per_s: float = 0.0

    @property
    def requests(self) -> int:
        """Keys that `stream` calls asked for."""
        return self.hits + self.misses + self.late

    @property
    def read_bytes(self) -> int:
        """Bytes read from the store for any cause."""
        return self.demand_bytes + self.prefetch_bytes

    @property
    def bytes_per_s(self) -> float:
        """What the link moves while it is at work; 0 before the first read.

        As copies that followed one another show it, where there are such: by the time that the link was busy a copy
        counts as under way until somebody looks, however long the link has stood still by then.
        """
        if self.paced_bytes_per_s:
            return self.paced_bytes_per_s
        return self.read_bytes / self.link_busy_s if self.link_busy_s else 0.0

    @property
    def hit_rate(self) -> float | None:
        """Share of requests that were resident; None before the first."""
        return self.hits / self.requests if self.requests else None

    def snapshot(self) -> dict[str, int | float | None]:
        """All fields and the sums, ready for JSON."""
        totals: dict[str, int | float | None] = asdict(self)
        return totals | {"requests": self.requests, "read_bytes": self.read_bytes, "hit_rate": self.hit_rate}

    def forget(self) -> None:
        """Begin again at 0."""
        for field in fields(self):
            setattr(self, field.name, field.default)

    def count_read(self, cause: str, num_bytes: int) -> None:
        """Add one record that came by "demand", "prefetch" or "return"."""
        if cause == "demand":
            self.demand_reads += 1
            self.demand_bytes += num_bytes
        elif cause == "return":
            self.returned += 1
            self.returned_bytes += num_bytes
        else:
            self.prefetch_reads += 1
            self.prefetch_bytes += num_bytes
