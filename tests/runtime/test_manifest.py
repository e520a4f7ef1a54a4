"""Manifests: read as they stand, or refused saying what is wrong, and never another way."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import errno
import json
import math
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.artifacts.manifest import (
    FORMAT_VERSION,
    FileEntry,
    check_files,
    load_manifest,
    save_manifest,
    sha256_bytes,
    write_json,
)
from runtime.artifacts.profile import DraftFigures, ProfileManifest
from runtime.artifacts.quantized import Calibration, LayerFormat, QuantizedManifest
from runtime.errors import ArtifactError


@dataclass(frozen=True, slots=True)
class Inner:
    name: str
    scale: float
    pair: tuple[int, str]


@dataclass(frozen=True, slots=True)
class SampleManifest:
    """Every kind of field that manifests may have."""

    KIND: ClassVar[str] = "sample"

    digest: str
    count: int
    share: float
    flag: bool
    layers: tuple[int, ...]
    shares: list[float | None]
    inner: Inner
    inners: dict[str, Inner]
    files: dict[str, FileEntry]
    maybe: Inner | None = None
    settings: dict[str, str] = field(default_factory=dict)


INNER = Inner("x", 0.5, (1, "one"))
SAMPLES: list[Any] = [
    SampleManifest(
        "d", 3, 0.25, True, (0, 2), [1.5, None], INNER, {"a": INNER}, {"f": FileEntry(3, "0" * 64)}, INNER, {"b": "4"}
    ),
    QuantizedManifest(
        "d", "olmoe", 8, 64, 96, "BF16", False, "gptq", "batched", 4, 128, 0.01, True,
        {"1": LayerFormat(4, 128, ("down_proj",))}, Calibration("embedded", 2, 100, 64, 0, "e"), 24, 8, 1, 0.07,
        {"--bits": "4"}, {"config.json": FileEntry(2, "f")},
    ),
    ProfileManifest(
        "d", "olmoe", (0, 1), 8, 2, {"code": 10}, {"code": 1}, (1, 2, 4), 0, {"dtype": "bf16"},
        {"r": FileEntry(1, "a")}, DraftFigures("q", {"c": 0.9}, {"c": None}, {"c": (0.5, None)}, {}, {}, {"c": 10}),
    ),
]  # fmt: skip

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
NESTED = st.recursive(
    SCALARS,
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=5), values, max_size=3),
    max_leaves=6,
)
VALUES = st.sampled_from([None, True, 0, 1.5, "", 10**400, [], {}]) | NESTED


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every container and key inside a JSON value."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [place for key in keys for place in [(value, key), *places(value[key])]]


def body_of(manifest: Any) -> Any:
    """What save_manifest writes."""
    body = {"kind": manifest.KIND, "format_version": FORMAT_VERSION, **dataclasses.asdict(manifest)}
    return json.loads(json.dumps(body))


@st.composite
def mutated(draw: st.DrawFn) -> tuple[Any, Any]:
    """A manifest's class and its JSON with one to three things changed, added or taken away."""
    manifest = draw(st.sampled_from(SAMPLES))
    body = body_of(manifest)
    for _ in range(draw(st.integers(1, 3))):
        options = places(body)
        if not options:
            break
        container, key = draw(st.sampled_from(options))
        change = draw(st.sampled_from(["replace", "remove", "add", "copy"]))
        if change == "replace":
            container[key] = draw(VALUES)
        elif change == "remove":
            del container[key]
        elif change == "copy":
            container[key] = copy.deepcopy(draw(st.sampled_from([value[name] for value, name in options])))
        elif isinstance(container, dict):
            container[draw(st.text(max_size=5))] = draw(VALUES)
        else:
            container.insert(key, draw(VALUES))
    return type(manifest), body


def same(found: Any, wanted: Any) -> bool:
    """Equality of JSON values that tells True from 1 and takes NaN for NaN, and 2.0 for the 2 of a float field."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(same(found[name], wanted[name]) for name in found)
    if isinstance(found, list) and isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    if isinstance(found, float) and isinstance(wanted, float | int) and not isinstance(wanted, bool):
        return found == float(wanted) or (math.isnan(found) and math.isnan(wanted))
    return type(found) is type(wanted) and found == wanted


@settings(
    max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(mutated())
def test_a_changed_manifest_is_refused_or_read_as_it_stands(tmp_path: Path, case: tuple[Any, Any]) -> None:
    cls, body = case
    (tmp_path / "manifest.json").write_text(json.dumps(body))
    try:
        manifest = load_manifest(tmp_path, cls)
    except ArtifactError as error:
        assert len(str(error)) < 1000 and error.mend
        return
    defaults = {f.name for f in dataclasses.fields(cls) if f.default is not MISSING or f.default_factory is not MISSING}
    read = body_of(manifest)
    assert same({name: value for name, value in read.items() if name in body or name not in defaults}, body)


@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.sampled_from(SAMPLES), st.data())
def test_changed_bytes_are_refused_or_read(tmp_path: Path, manifest: Any, data: st.DataObject) -> None:
    save_manifest(tmp_path, manifest)
    raw = bytearray((tmp_path / "manifest.json").read_bytes())
    start = data.draw(st.integers(0, len(raw) - 1))
    raw[start : start + data.draw(st.integers(0, 40))] = data.draw(
        st.binary(max_size=4) | st.sampled_from([b"[" * 99999, b"9" * 5000])
    )
    (tmp_path / "manifest.json").write_bytes(raw)
    with contextlib.suppress(ArtifactError):
        assert isinstance(load_manifest(tmp_path, type(manifest)), type(manifest))


@pytest.mark.parametrize("manifest", SAMPLES, ids=lambda manifest: manifest.KIND)
def test_a_manifest_comes_back_as_it_was(manifest: Any, tmp_path: Path) -> None:
    save_manifest(tmp_path, manifest)
    assert load_manifest(tmp_path, type(manifest)) == manifest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "pack"}, "kind 'sample' .*found 'pack'"),
        ({"format_version": FORMAT_VERSION + 1}, f"format_version {FORMAT_VERSION} .*found {FORMAT_VERSION + 1}"),
        ({"format_version": True}, "format_version .*found True"),
        ({"count": 3.0}, r"manifest\.count to be int .*found float 3\.0"),
        ({"count": True}, r"manifest\.count to be int .*found bool"),
        ({"share": 10**400}, r"manifest\.share to be float .*found int 1000"),
        ({"extra": 1}, r"no field manifest\.extra"),
        ({"layers": [0, "1"]}, r"manifest\.layers\[1\] to be int .*found str '1'"),
        ({"inners": {"a": {"name": "", "scale": 1, "pair": [1]}}}, r"inners\.a\.pair to hold 2 items .*found 1"),
        ({"inners": {"a": {"name": "x", "scale": 1}}}, r"field manifest\.inners\.a\.pair"),
        ({"maybe": "x"}, r"manifest\.maybe"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps(body_of(SAMPLES[0]) | change))
    with pytest.raises(ArtifactError, match=message):
        load_manifest(tmp_path, SampleManifest)


def test_the_folder_of_another_stage_is_not_to_be_made_again(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps({"kind": "pack"}))
    with pytest.raises(ArtifactError, match="found 'pack'") as caught:
        load_manifest(tmp_path, QuantizedManifest)
    assert caught.value.mend == "pass the folder that `moespeq quantize` wrote"


def test_a_manifest_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_manifest(tmp_path, SAMPLES[0])

    def read_text(*_: object, **__: object) -> str:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "read_text", read_text)
    with pytest.raises(ArtifactError, match=r"manifest\.json.*Permission denied"):
        load_manifest(tmp_path, SampleManifest)


def test_json_that_found_no_room_leaves_the_old_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_json(tmp_path / "figures.json", {"old": 1})

    def fsync(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", fsync)
    with pytest.raises(OSError, match="No space left"):
        write_json(tmp_path / "figures.json", {"new": 2})
    assert [file.name for file in tmp_path.iterdir()] == ["figures.json"]
    assert json.loads((tmp_path / "figures.json").read_text()) == {"old": 1}


@pytest.mark.parametrize("name", ["../a", "/a", "", "a\0b", "a" * 300, "a/b"])
def test_files_that_cannot_be_are_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("abc")
    check_files(tmp_path, {"a": FileEntry(3, sha256_bytes(b"abc"))}, "sample", contents=True)
    with pytest.raises(ArtifactError):
        check_files(tmp_path, {name: FileEntry(3, "")}, "sample")
