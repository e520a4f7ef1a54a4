"""The compiled decoder on damaged records, watched by checks of memory, and machines without a compiler."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from runtime import native
from runtime.artifacts import residual_decoder
from runtime.artifacts.encodings import ENCODINGS
from runtime.artifacts.record import DraftRecord, RecordLayout, target_layout
from runtime.artifacts.residual import WORK_BYTES, ResidualEncoding
from runtime.artifacts.residual_native import SOURCE, record_places
from runtime.errors import ArtifactError
from tests.pack.test_residual import case, make_draft, make_weights, same

ROOT = Path(__file__).parents[2]
CASES = Path(__file__).with_name("decode_cases.c")
FNV = (14695981039346656037, 1099511628211)
Damage = Callable[[bytearray, random.Random], bytes]


@pytest.fixture
def cc() -> str:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        if os.environ.get("MOESPEQ_REQUIRE_CXX"):
            pytest.fail("no C compiler")
        pytest.skip("no C compiler")
    return compiler


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty cache, and a process that has not looked for its decoder yet."""
    monkeypatch.setenv("MOESPEQ_CACHE_DIR", str(tmp_path / "cache"))
    residual_decoder._find_decoder.cache_clear()
    yield tmp_path / "cache" / "native"
    residual_decoder._find_decoder.cache_clear()


def flip(data: bytearray, rng: random.Random) -> bytes:
    for _ in range(rng.randint(1, 3)):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def flip_head(data: bytearray, rng: random.Random) -> bytes:
    data[rng.randrange(200)] = rng.randrange(256)
    return bytes(data)


def cut(data: bytearray, rng: random.Random) -> bytes:
    return bytes(data[: rng.randrange(len(data))])


def longer(data: bytearray, rng: random.Random) -> bytes:
    return bytes(data) + rng.randbytes(rng.randrange(1, 40))


def lying_table(data: bytearray, rng: random.Random) -> bytes:
    """A block's table with counts of any size."""
    starts = memoryview(data)[:64].cast("I")
    at = 16 * starts[rng.randrange(4)] + 2048 * rng.randint(1, 3) + 2 * rng.randrange(8)
    if at + 2 <= len(data):
        data[at : at + 2] = rng.choice([b"\xff\xff", b"\0\0", rng.randbytes(2)])
    return bytes(data)


def noise(data: bytearray, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    data[at : at + 64] = rng.randbytes(len(data[at : at + 64]))
    return bytes(data)


def reference(data: bytes, layout: RecordLayout, draft: DraftRecord) -> bytes | None:
    """The raw record by the reader in NumPy, or None if it refuses."""
    buffer = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)
    try:
        return bytes(layout.fill(ResidualEncoding().decode(buffer, len(data), layout, draft)).numpy())
    except ArtifactError as error:
        assert "a residual record with" in str(error)
        return None


def test_no_damage_leads_outside_the_buffers_and_only_whole_records_are_taken(cc: str, tmp_path: Path) -> None:
    facts, formats = case(264, 34, (4, 22), (8, 17))
    draft, layout = make_draft(facts, formats, 7, wild=False), target_layout(facts)
    payload = ResidualEncoding().encode(make_weights(facts, draft, 8, 0.02), layout, draft)
    places = record_places(layout, draft.layout)
    assert payload is not None and places is not None
    whole, rng = bytes(payload.numpy()), random.Random(3)
    damages: tuple[Damage, ...] = (flip, flip_head, cut, longer, lying_table, noise)
    records = [whole] * 3 + [damage(bytearray(whole), rng) for damage in damages for _ in range(40)] + [b""]
    coded = bytes(draft.data[: draft.layout.payload_bytes].numpy())
    sizes = b"".join(n.to_bytes(8, "little") for n in (len(coded), layout.payload_bytes, len(records)))
    listed = b"".join(len(record).to_bytes(8, "little") + record for record in records)
    (tmp_path / "cases").write_bytes(bytes(places.shape) + sizes + coded + listed)
    checks = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-Wall", "-Wextra", "-Werror")
    command = [cc, "-O1", "-g", "-std=c11", *checks, f"-I{SOURCE.parent}", str(CASES), "-o", str(tmp_path / "run")]
    subprocess.run(command, check=True, capture_output=True)
    done = subprocess.run([tmp_path / "run", tmp_path / "cases"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    taken = 0
    for record, line in zip(records, done.stdout.splitlines(), strict=True):
        refused, found = line.split()
        wanted = reference(record, layout, draft)
        assert (refused == "1") == (wanted is None)
        if wanted is not None:
            value = FNV[0]
            for byte in wanted:
                value = (value ^ byte) * FNV[1] & (1 << 64) - 1
            assert found == f"{value:016x}"
            taken += 1
    assert 3 <= taken < len(records) / 2


def test_a_record_split_over_threads_is_the_same(fresh: Path, cc: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.artifacts.residual_native.SPLIT_WEIGHTS", 1)
    facts, formats = case(384, 40, (4, 128), (4, 20), has_bias=True)
    draft, layout = make_draft(facts, formats, 1, wild=False), target_layout(facts)
    weights = make_weights(facts, draft, 2, 0.02)
    payload = ResidualEncoding().encode(weights, layout, draft)
    decoder = residual_decoder.compiled_decoder()
    assert payload is not None and decoder is not None
    before = torch.get_num_threads()
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        room = torch.zeros(layout.payload_bytes, dtype=torch.uint8)
        try:
            assert decoder.decode(payload, payload.numel(), layout, draft, room)
            assert not decoder.decode(payload, payload.numel() - 16, layout, draft, room.clone())
        finally:
            torch.set_num_threads(before)
        assert same(layout.views(room), weights)


def test_without_a_compiler_numpy_decodes_the_same_and_says_why(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    facts, formats = case(128, 16, (4, 32), (4, 16))
    draft, layout = make_draft(facts, formats, 1, wild=False), target_layout(facts)
    weights = make_weights(facts, draft, 2, 0.02)
    payload = ResidualEncoding().encode(weights, layout, draft)
    assert payload is not None
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no C compiler: none of cc, gcc, clang" in str(residual_decoder.why_slow())
    assert residual_decoder.compiled_decoder() is None
    assert same(ENCODINGS["residual"].decode(payload, payload.numel(), layout, draft), weights)
    assert residual_decoder.work_bytes(layout) == WORK_BYTES * 3 * 128 * 16
    residual_decoder._find_decoder.cache_clear()
    monkeypatch.setenv("MOESPEQ_NATIVE", "0")
    assert residual_decoder.why_slow() == "MOESPEQ_NATIVE is 0"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'first: fault' >&2; exit 1", "does not compile residual_decode.c: first: fault"),
        ("exit 0", None),
        (None, "did not run"),
    ],
    ids=["fails", "makes nothing", "absent"],
)
def test_a_compiler_that_does_not_work_is_named(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str | None, reason: str | None
) -> None:
    compiler = tmp_path / "mycc"
    if script is not None:
        compiler.write_text(f"#!/bin/sh\n{script}\n")
        compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    said = str(residual_decoder.why_slow())
    assert str(compiler) in said and (reason or "cannot be loaded") in said


def test_a_library_is_compiled_once_kept_whole_and_checked(fresh: Path, cc: str, tmp_path: Path) -> None:
    checks: list[object] = []

    def check(library: object) -> bool:
        checks.append(library)
        return True

    source = tmp_path / "one.c"
    source.write_text("int one(void) { return 1; }\n")
    load = "import sys, pathlib; from runtime import native; native.load(pathlib.Path(sys.argv[1]), lambda _: True)"
    subprocess.run([sys.executable, "-c", load, source], check=True, cwd=ROOT)
    (kept,) = fresh.iterdir()
    kept.write_bytes(b"torn")
    assert native.load(source, check).one() == 1 and len(checks) == 1
    assert kept.read_bytes() != b"torn"
    assert native.load(source, check).one() == 1 and len(checks) == 1
    source.write_text("int one(void) { return 2; }\n")
    with pytest.raises(native.NotCompiled, match=r"made of one\.c computes something else"):
        native.load(source, lambda _: False)
    assert native.load(source, check).one() == 2
    assert len(list(fresh.iterdir())) == 2


def test_a_cache_that_cannot_be_written_costs_a_compilation_each_time(
    cc: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("MOESPEQ_CACHE_DIR", str(tmp_path / "cache"))
    source = tmp_path / "one.c"
    source.write_text("int one(void) { return 1; }\n")
    assert native.load(source, lambda _: True).one() == 1
