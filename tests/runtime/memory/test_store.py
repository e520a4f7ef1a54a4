from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from runtime.errors import ArtifactError, StorageError
from runtime.memory import store as store_module
from runtime.memory.location import PAGE_BYTES
from runtime.memory.slots import SlotPool
from runtime.memory.store import RecordStore

from .records import RECORD_BYTES, write_shards

KEYS = [(layer, expert) for layer in (1, 3) for expert in range(3)]


def read_all(store: RecordStore, payloads: dict[tuple[int, int], bytes]) -> None:
    pool = SlotPool(1, store.max_record_bytes)
    for _ in range(2):
        for key, payload in payloads.items():
            assert store.read_into(key, pool.buffer(0)) == store.record_bytes(key)
            assert bytes(pool.buffer(0)[: len(payload)]) == payload


@pytest.mark.parametrize("direct", [True, False])
def test_reads_every_record(tmp_path: Path, direct: bool) -> None:
    locations, payloads = write_shards(tmp_path, KEYS)
    with RecordStore(locations, direct=direct) as store:
        assert direct or not store.direct  # a filesystem may refuse direct reads, never ask for them
        read_all(store, payloads)


def test_falls_back_when_the_filesystem_refuses_to_open_directly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locations, payloads = write_shards(tmp_path, KEYS)
    really_open = os.open

    def refuse(path: Path, flags: int, *args: int) -> int:
        if flags & store_module._O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return really_open(path, flags, *args)

    monkeypatch.setattr(os, "open", refuse)
    with RecordStore(locations) as store:
        assert not store.direct
        read_all(store, payloads)


def test_falls_back_when_a_direct_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locations, payloads = write_shards(tmp_path, KEYS)
    with RecordStore(locations) as store:
        if not store.direct:
            pytest.skip("no direct reads in the temporary folder")
        direct_fds = {shard._direct_fd for shard in store._shards.values()}
        really_read = os.preadv

        def refuse(fd: int, buffers: list[memoryview], offset: int) -> int:
            if fd in direct_fds:
                raise OSError(errno.EINVAL, "Invalid argument")
            return really_read(fd, buffers, offset)

        monkeypatch.setattr(os, "preadv", refuse)
        read_all(store, payloads)
        assert not store.direct


def test_reads_records_off_the_page_grid(tmp_path: Path) -> None:
    locations, payloads = write_shards(tmp_path, KEYS, num_shards=1)
    path = tmp_path / "moved.bin"
    path.write_bytes(b"x" * 100 + (tmp_path / "target-0000.safetensors").read_bytes())
    moved = {key: replace(place, path=path, offset_bytes=place.offset_bytes + 100) for key, place in locations.items()}
    with RecordStore(moved) as store:
        read_all(store, payloads)


@pytest.mark.parametrize("direct", [True, False])
def test_last_record_needs_no_padding_in_the_file(tmp_path: Path, direct: bool) -> None:
    locations, payloads = write_shards(tmp_path, KEYS[:1], num_shards=1)
    place = locations[KEYS[0]]
    os.truncate(place.path, place.offset_bytes + place.payload_bytes)
    with RecordStore(locations, direct=direct) as store:
        pool = SlotPool(1, RECORD_BYTES)
        assert store.read_into(KEYS[0], pool.buffer(0)) == place.payload_bytes
        assert bytes(pool.buffer(0)[: place.payload_bytes]) == payloads[KEYS[0]]


def test_names_file_and_sizes_of_a_cut_shard_before_any_read(tmp_path: Path) -> None:
    locations, _ = write_shards(tmp_path, KEYS, num_shards=1)
    path = tmp_path / "target-0000.safetensors"
    size = path.stat().st_size
    os.truncate(path, size - RECORD_BYTES)
    with pytest.raises(ArtifactError) as caught:
        RecordStore(locations)
    for part in (str(path), str(size - 1000), str(size - RECORD_BYTES)):
        assert part in str(caught.value)


@pytest.mark.parametrize("direct", [True, False])
def test_names_a_shard_that_is_cut_while_open(tmp_path: Path, direct: bool) -> None:
    locations, _ = write_shards(tmp_path, KEYS, num_shards=1)
    with RecordStore(locations, direct=direct) as store:
        place = locations[KEYS[-1]]
        os.truncate(place.path, place.offset_bytes + 1000)
        with pytest.raises(ArtifactError, match=r"layer 3, expert 2") as caught:
            store.read_into(KEYS[-1], SlotPool(1, RECORD_BYTES).buffer(0))
        assert str(place.offset_bytes + 1000) in caught.value.found


def test_names_file_key_and_checksums_of_a_flipped_byte(tmp_path: Path) -> None:
    locations, _ = write_shards(tmp_path, KEYS)
    place = locations[(3, 1)]
    blob = bytearray(place.path.read_bytes())
    blob[place.offset_bytes + 77] ^= 1
    place.path.write_bytes(blob)
    with RecordStore(locations) as store:
        buffer = SlotPool(1, RECORD_BYTES).buffer(0)
        store.read_into((3, 2), buffer)
        for _ in range(2):  # a record that failed is never trusted later
            with pytest.raises(ArtifactError, match=r"layer 3, expert 1") as caught:
                store.read_into((3, 1), buffer)
            assert str(place.path) in str(caught.value) and place.sha256 in str(caught.value)


def test_checks_the_checksum_once(tmp_path: Path) -> None:
    locations, payloads = write_shards(tmp_path, KEYS)
    with RecordStore(locations) as store:
        read_all(store, payloads)
        assert store._verified == set(KEYS)


def test_names_an_absent_shard_and_an_unknown_expert(tmp_path: Path) -> None:
    locations, _ = write_shards(tmp_path, KEYS)
    with RecordStore(locations) as store, pytest.raises(ArtifactError, match="layer 9, expert 9"):
        store.record_bytes((9, 9))
    (tmp_path / "target-0001.safetensors").unlink()
    with pytest.raises(ArtifactError, match="target-0001"):
        RecordStore(locations)


def test_turns_a_device_error_into_a_storage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locations, _ = write_shards(tmp_path, KEYS)

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with RecordStore(locations) as store:
        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(StorageError, match=r"layer 1, expert 0.*Input/output error"):
            store.read_into((1, 0), SlotPool(1, RECORD_BYTES).buffer(0))


def test_closes_its_files(tmp_path: Path) -> None:
    locations, _ = write_shards(tmp_path, KEYS)
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    store = RecordStore(locations)
    store.close()
    store.close()
    assert before == (len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0)
    with pytest.raises(StorageError):
        store.read_into((1, 0), SlotPool(1, PAGE_BYTES).buffer(0))
