"""Every draft record as it was read: what target records lean on that carry only what the draft does not tell."""

from __future__ import annotations

from runtime.artifacts.pack import Pack
from runtime.artifacts.record import DraftRecord
from runtime.memory.location import ExpertKey
from runtime.memory.slots import SlotPool
from runtime.memory.store import RecordStore


class DraftRecords:
    """All draft records of a pack in memory.

    Attributes:
        num_bytes: memory that they take.
    """

    def __init__(self, pack: Pack, direct_io: bool = True) -> None:
        """Read them.

        Raises:
            ArtifactError: a record fails its checksum or its file is cut.
        """
        keys = pack.spec.expert_keys()
        pool = SlotPool(len(keys), pack.draft_slot_bytes)
        self._records: dict[ExpertKey, DraftRecord] = {}
        self.num_bytes = pool.total_bytes
        store = RecordStore(pack.draft_locations(), direct=direct_io)
        try:
            for slot, key in enumerate(keys):
                store.read_into(key, pool.buffer(slot))
                self._records[key] = DraftRecord(pack.draft_layout(key[0]), pool.tensor(slot))
        finally:
            store.close()

    def __getitem__(self, key: ExpertKey) -> DraftRecord:
        return self._records[key]
