"""Exact experts in this machine's memory: all of them in one arena, or as many as fit with the rest on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from runtime.gpu.accelerator import Accelerator
from runtime.kernels.device import numa_node
from runtime.memory.cache import ExpertCache
from runtime.memory.eviction import make_policy
from runtime.memory.location import ExpertKey
from runtime.memory.numa import Nearness, nearness, prefer
from runtime.memory.slots import SlotPool
from runtime.memory.stats import CacheStats
from runtime.memory.store import RecordFacts, RecordReader, RecordStore
from runtime.memory.transfer import Landing

DISK_READS = 8
"""Records that are read from disk at a time, at least: one read alone leaves an NVMe drive idle most of the time."""

_REGISTER_PORTABLE = 1


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class HostTier(Protocol):
    """Where records come from before they are copied to the device.

    Attributes:
        pinned: whether copies read the memory directly; otherwise they pass through a staging buffer.
        stats: what was read from disk, and what was there; None where everything is here.
    """

    pinned: bool

    @property
    def stats(self) -> CacheStats | None: ...

    def nearness(self) -> Nearness:
        """Where its memory lies, as seen from the GPU."""
        ...

    def lend(self, key: ExpertKey, first: Callable[[], None]) -> AbstractContextManager[Tensor]:
        """A record, uint8 [slot_bytes], to be copied to the device inside; it may wait for the disk.

        Args:
            key: of the record, which the device has when the context ends without an error.
            first: called once the record is on its way, before the wait.
        """
        ...

    def take_back(self, key: ExpertKey, copy: Callable[[Tensor], None]) -> None:
        """The device is about to lose a record; where it should not be read from disk again, `copy` brings it here."""

    def announce(self, upcoming: Sequence[Sequence[ExpertKey]], pass_rows: int, fetch: bool) -> None:
        """Say what the coming rows need, and whether it may be read from disk ahead of need."""

    def close(self) -> None:
        """End its threads and give the memory back."""


class PinnedPool(SlotPool):
    """Slots of a mapping that the GPU's copy engines read, as exactly as many bytes as asked for.

    The pinned allocators of torch and CuPy round up to powers of two; a registered mapping does not. Its pages come
    from the GPU's NUMA node, where that can be chosen.

    Attributes:
        pinned: whether the driver took it; a limit on locked memory may forbid that.
        node: the GPU's NUMA node; None where it is unknown.
    """

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        super().__init__(num_slots, slot_bytes)
        self.pinned, self.node = False, numa_node()
        if torch.cuda.is_available():
            address = self.tensor(0).data_ptr()
            prefer(address, self.total_bytes, self.node)  # before the driver touches every page
            self.pinned = int(_runtime().cudaHostRegister(address, self.total_bytes, _REGISTER_PORTABLE)) == 0

    def nearness(self) -> Nearness:
        """Where its pages lie, of those that are there."""
        return nearness(self.tensor(0).data_ptr(), self.total_bytes, self.node)

    def release(self) -> None:
        """Unpin the memory and give it back; copies must have ended."""
        if self.pinned:
            _runtime().cudaHostUnregister(self.tensor(0).data_ptr())
            self.pinned = False
        super().release()


class Arena:
    """Every record of a model in memory."""

    stats = None

    def __init__(self, pool: PinnedPool, slots: Mapping[ExpertKey, int], owned: bool = True) -> None:
        self._pool, self._slots, self._owned = pool, slots, owned
        self.pinned = pool.pinned

    def borrowed(self) -> Arena:
        """The same records, for an engine that another one follows: closing it keeps them."""
        return Arena(self._pool, self._slots, owned=False)

    @classmethod
    def load(cls, store: RecordStore, keys: Sequence[ExpertKey], readers: int, done: Callable[[int], None]) -> Arena:
        """Read all records, checked against their sums.

        Args:
            store: of the pack.
            keys: all experts.
            readers: reads at a time.
            done: told the bytes of each record.

        Raises:
            ArtifactError, StorageError: a record cannot be read.
            PlanError: the machine refuses the memory.
        """
        pool = PinnedPool(len(keys), store.max_record_bytes)
        slots = {key: slot for slot, key in enumerate(keys)}
        threads = ThreadPoolExecutor(readers, thread_name_prefix="moespeq-load")
        try:
            reads = [threads.submit(store.read_into, key, pool.buffer(slot)) for key, slot in slots.items()]
            for read in reads:
                done(read.result())
        except BaseException:
            threads.shutdown(cancel_futures=True)
            pool.release()
            raise
        threads.shutdown()
        return cls(pool, slots)

    def nearness(self) -> Nearness:
        """See `HostTier`."""
        return self._pool.nearness()

    def record(self, key: ExpertKey) -> Tensor:
        """A record, uint8 [slot_bytes]."""
        return self._pool.tensor(self._slots[key])

    @contextmanager
    def lend(self, key: ExpertKey, first: Callable[[], None]) -> Iterator[Tensor]:
        """See `HostTier`."""
        first()
        yield self.record(key)

    def take_back(self, key: ExpertKey, copy: Callable[[Tensor], None]) -> None:
        """It is here."""

    def announce(self, upcoming: Sequence[Sequence[ExpertKey]], pass_rows: int, fetch: bool) -> None:
        """Everything is here."""

    def close(self) -> None:
        """See `HostTier`."""
        if self._owned:
            self._pool.release()


class ArenaCopies:
    """Copies from an arena to the device's slots, without a thread: the run's own starts them and sees them arrive."""

    def __init__(self, arena: Arena, store: RecordFacts, accelerator: Accelerator) -> None:
        self._arena, self._store, self._accelerator = arena, store, accelerator

    def start(self, key: ExpertKey, buffer: Tensor) -> Landing:
        """See `Copies`."""
        num_bytes = self._store.record_bytes(key)
        return self._accelerator.start_copy(buffer[:num_bytes], self._arena.record(key)[:num_bytes])


class HostCache:
    """As many records as memory was given for, beside those that the device has; the rest is read from disk.

    A record that the device has, too, is the first to give way. What the device lets go comes back by a copy, into the
    place of such a one: eviction alone could not make the two tiers hold different records. Of what is here alone, what
    is used soonest stays.

    Args:
        store: of the pack.
        num_slots: at least 1.
        parallel_reads: from disk at a time; no fewer than DISK_READS.
    """

    def __init__(self, store: RecordReader, num_slots: int, parallel_reads: int = 0) -> None:
        self._store = store
        self._pool = PinnedPool(num_slots, store.max_record_bytes)
        self.pinned = self._pool.pinned
        self.cache = ExpertCache(store, self._pool, make_policy("lookahead"), max(DISK_READS, parallel_reads))
        self.stats = self.cache.stats

    def nearness(self) -> Nearness:
        """See `HostTier`."""
        return self._pool.nearness()

    @contextmanager
    def lend(self, key: ExpertKey, first: Callable[[], None]) -> Iterator[Tensor]:
        """See `HostTier`."""
        with self.cache.hold([key]) as hold:
            first()
            yield self._pool.tensor(hold.wait()[key])
            self.cache.passed_on(key)

    def take_back(self, key: ExpertKey, copy: Callable[[Tensor], None]) -> None:
        """See `HostTier`."""
        num_bytes = self._store.record_bytes(key)

        def fill(slot: int) -> int:
            copy(self._pool.tensor(slot)[:num_bytes])
            return num_bytes

        self.cache.take_back(key, fill)

    def announce(self, upcoming: Sequence[Sequence[ExpertKey]], pass_rows: int, fetch: bool) -> None:
        """See `HostTier`; the disk is the slower way, so of all announced rows what the device lacks is read ahead."""
        self.cache.announce(upcoming, None if fetch else 0, pass_rows=pass_rows)

    def close(self) -> None:
        """See `HostTier`."""
        self.cache.close()
        self._pool.release()


class HostRecords:
    """The store that fills the device's slots: records of a host tier, copied.

    A slot is written only when nobody reads it any more, and what was in it is offered to the tier before.

    Args:
        store: knows sizes and names of records.
        tier: has them.
        accelerator: copies them.
    """

    def __init__(self, store: RecordFacts, tier: HostTier, accelerator: Accelerator) -> None:
        self._store, self._tier, self._accelerator = store, tier, accelerator
        self._contents: dict[int, ExpertKey] = {}  # by the slot's address, whole records only

    @property
    def max_record_bytes(self) -> int:
        """Bytes that a slot must have."""
        return self._store.max_record_bytes

    def record_bytes(self, key: ExpertKey) -> int:
        """Bytes that one copy moves."""
        return self._store.record_bytes(key)

    def read_into(self, key: ExpertKey, buffer: Tensor, landed: Callable[[], None] | None = None) -> int:
        """Copy a record into a slot of the device; returns when it is there."""
        num_bytes, address = self._store.record_bytes(key), buffer.data_ptr()

        def give_back() -> None:
            left = self._contents.pop(address, None)
            if left is not None:
                self._tier.take_back(left, lambda to: self._accelerator.copy_out(to, buffer[: len(to)], pinned))

        pinned = self._tier.pinned
        with self._tier.lend(key, give_back) as record:
            self._accelerator.copy_in(buffer[:num_bytes], record[:num_bytes], pinned)
            self._contents[address] = key
        return num_bytes

    def describe(self, key: ExpertKey) -> str:
        """File, layer and expert, for messages."""
        return self._store.describe(key)
