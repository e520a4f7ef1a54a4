"""Draft records as read: for the draft, and for target records that carry only what the draft does not tell."""

from __future__ import annotations

from collections.abc import Iterator

from runtime.artifacts.pack import Pack
from runtime.artifacts.record import DraftRecord
from runtime.memory.location import ExpertKey
from runtime.memory.slots import SlotPool
from runtime.memory.store import RecordStore


def read_drafts(pack: Pack, num_slots: int, direct_io: bool = True) -> Iterator[tuple[ExpertKey, DraftRecord]]:
    """All draft records of a pack in order; each keeps its memory until `num_slots` more were read.

    Raises:
        ArtifactError: a record fails its checksum or its file is cut.
    """
    pool = SlotPool(num_slots, pack.draft_slot_bytes)
    store = RecordStore(pack.draft_locations(), direct=direct_io)
    try:
        for number, key in enumerate(pack.spec.expert_keys()):
            slot = number % num_slots
            store.read_into(key, pool.buffer(slot))
            yield key, DraftRecord(pack.draft_layout(key[0]), pool.tensor(slot))
    finally:
        store.close()


class DraftRecords(dict[ExpertKey, DraftRecord]):
    """All draft records of a pack in memory.

    Attributes:
        num_bytes: memory that they take.
    """

    def __init__(self, pack: Pack, direct_io: bool = True) -> None:
        """Read them.

        Raises:
            ArtifactError: a record fails its checksum or its file is cut.
        """
        super().__init__(read_drafts(pack, pack.spec.num_records, direct_io))
        self.num_bytes = pack.spec.num_records * pack.draft_slot_bytes
