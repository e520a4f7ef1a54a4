"""Shards: safetensors files whose records lie at multiples of a page."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from moespeq_cli.pack.shards import ShardWriter, header, write_all
from runtime.artifacts.safetensors_file import read_header
from runtime.errors import ArtifactError


def payload(size: int, value: int) -> torch.Tensor:
    return torch.full((size,), value, dtype=torch.uint8)


def test_header_has_golden_bytes() -> None:
    data = header([("layers.3.experts.0", "U8", [4096], 4096), ("layers.3.experts.1", "U8", [8192], 8192)])
    text = (
        '{"__metadata__":{"format":"pt"},'
        '"layers.3.experts.0":{"dtype":"U8","shape":[4096],"data_offsets":[0,4096]},'
        '"layers.3.experts.1":{"dtype":"U8","shape":[8192],"data_offsets":[4096,12288]}}'
    )
    assert data == bytes.fromhex("f80f000000000000") + text.encode().ljust(4088)
    assert len(data) == 4096


def test_records_of_any_length_lie_at_pages_and_open_with_the_library(tmp_path: Path) -> None:
    sizes = {"a": 1, "b": 4096, "c": 4097, "d": 12000}
    path = tmp_path / "target-0000.safetensors"
    with ShardWriter(path, list(sizes), 12288, None) as writer:
        offsets = [writer.append(payload(size, i + 1)) for i, size in enumerate(sizes.values())]
        writer.finish([(name, -(-size // 4096) * 4096) for name, size in sizes.items()])
    assert offsets == [4096, 8192, 12288, 20480]
    with safe_open(path, "pt") as shard:
        for i, (name, size) in enumerate(sizes.items()):
            tensor = shard.get_tensor(name)
            assert (tensor[:size] == i + 1).all() and not tensor[size:].any() and len(tensor) % 4096 == 0
    assert [info.start for info in read_header(path, "").values()] == offsets


@pytest.mark.parametrize("count", [1, 40, 400])
def test_header_room_is_enough_for_the_longest_records(tmp_path: Path, count: int) -> None:
    names = [f"layers.{i}.experts.{i}" for i in range(count)]
    path = tmp_path / "s.safetensors"
    with ShardWriter(path, names, 8192, None) as writer:
        start = writer.append(payload(8192, 1))
        for _ in names[1:]:
            writer.append(payload(8192, 1))
        writer.finish([(name, 8192) for name in names])
    assert start % 4096 == 0
    assert len(read_header(path, "")) == count


def test_unfinished_shard_is_not_a_safetensors_file(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    with ShardWriter(path, ["a"], 4096, None) as writer:
        writer.append(payload(4096, 1))
    with pytest.raises(Exception, match=r"(?i)header"), safe_open(path, "pt"):
        pass


def test_resuming_cuts_off_what_came_after(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    with ShardWriter(path, ["a", "b"], 4096, None) as writer:
        writer.append(payload(10, 1))
        end = writer.end_bytes
        writer.append(payload(4096, 2))
    with ShardWriter(path, ["a", "b"], 4096, end) as writer:
        writer.append(payload(3, 9))
        writer.finish([("a", 4096), ("b", 4096)])
    assert path.read_bytes()[8192:] == bytes([9, 9, 9]) + bytes(4093)


def test_resuming_a_file_that_lost_bytes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    path.write_bytes(bytes(5000))
    with pytest.raises(ArtifactError, match="8192 bytes that were written before the stop; found 5000"):
        ShardWriter(path, ["a"], 4096, 8192)


def test_write_goes_on_where_the_system_took_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    whole = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: whole(fd, data[:7], offset))
    with (tmp_path / "f").open("wb") as file:
        write_all(file.fileno(), bytes(range(100)), 0)
    assert (tmp_path / "f").read_bytes() == bytes(range(100))
