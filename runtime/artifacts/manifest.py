"""The contract between stages: folders finished by a `manifest.json` that is written last."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from runtime.errors import ArtifactError, InputError

FORMAT_VERSION = 1  # of every kind whose manifest does not name another as its VERSION
MANIFEST = "manifest.json"
PROGRESS = "progress.json"

M = TypeVar("M")


@dataclasses.dataclass(frozen=True, slots=True)
class FileEntry:
    """Size and digest of one file of an artifact."""

    size_bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> FileEntry:
        """Measure a file that is complete."""
        return cls(path.stat().st_size, sha256_file(path))


def sha256_bytes(data: bytes | bytearray | memoryview) -> str:
    """Hexadecimal SHA-256 of a buffer."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    """Hexadecimal SHA-256 of a file, read in pieces."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def write_json(path: Path, value: object) -> None:
    """Write JSON by rename, so that a reader sees the old file or the whole new one."""
    with by_rename(path) as part, part.open("w", encoding="utf-8") as handle:
        json.dump(value, handle, indent=2, sort_keys=True, ensure_ascii=False)
        handle.write("\n")
        handle.flush()
        os.fsync(handle.fileno())


@contextlib.contextmanager
def by_rename(path: Path) -> Iterator[Path]:
    """A file to write, which then takes the place of `path`; nothing of it is left where the system refuses."""
    part = path.with_name(path.name + ".part")
    try:
        yield part
        os.replace(part, path)
    except OSError:
        with contextlib.suppress(OSError):  # the first error is the one to tell
            part.unlink(missing_ok=True)
        raise


def read_json(path: Path, what: str, mend: str = "make it again by its command with --force") -> Any:
    """Parse a JSON file.

    Raises:
        ArtifactError: the file is absent, unreadable or not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ArtifactError(expected=f"{what} at {path}", found="no such file", mend=mend) from None
    except OSError as error:
        raise ArtifactError(expected=f"{what} at {path}", found=str(error.strerror), mend=mend) from error
    except (ValueError, RecursionError) as error:
        raise ArtifactError(expected=f"{what} at {path} to be JSON", found=f"{error}", mend=mend) from None


def save_manifest(folder: Path, manifest: Any) -> None:
    """Finish an artifact: write the manifest after all of its data."""
    cls = type(manifest)
    body = {"kind": cls.KIND, "format_version": format_version(cls), **dataclasses.asdict(manifest)}
    write_json(folder / MANIFEST, body)


def format_version(cls: type) -> int:
    """The version of a kind of manifest that this program reads and writes."""
    return int(getattr(cls, "VERSION", FORMAT_VERSION))


def is_finished(folder: Path) -> bool:
    """Whether a folder holds a manifest, the mark of a complete artifact."""
    return (folder / MANIFEST).is_file()


def load_manifest(folder: Path, cls: type[M]) -> M:
    """Read a manifest and check it against its dataclass.

    Raises:
        ArtifactError: no finished manifest, another kind or version, a field that is missing, unknown or mistyped.
    """
    kind = cls.KIND  # type: ignore[attr-defined]
    mend = f"make the {kind} artifact again with `moespeq {_command(kind)} --force`"
    path = folder / MANIFEST
    if not path.is_file():
        found = "a folder without a finished manifest"
        if not folder.is_dir():
            found = "a file" if folder.is_file() else "no such folder"
        mend = f"make it with `moespeq {_command(kind)}`, or pass the folder where it is"
        if (folder / PROGRESS).is_file():
            found = "an unfinished one (progress.json but no manifest.json)"
            mend = f"repeat the `moespeq {_command(kind)}` that was stopped; it goes on where it was"
        raise ArtifactError(expected=f"a {kind} artifact in {folder}", found=found, mend=mend)
    body = read_json(path, f"the {kind} manifest")
    if not isinstance(body, dict) or body.get("kind") != kind:
        other = body.get("kind") if isinstance(body, dict) else type(body).__name__
        if isinstance(other, str) and other in _COMMANDS:
            mend = f"pass the folder that `moespeq {_command(kind)}` wrote"
        raise ArtifactError(expected=f"a manifest of kind {kind!r} in {path}", found=f"{other!r:.80}", mend=mend)
    version = body.get("format_version")
    wanted = format_version(cls)
    if type(version) is not int or version != wanted:
        raise ArtifactError(expected=f"format_version {wanted} in {path}", found=f"{version!r:.80}", mend=mend)
    fields = {name: value for name, value in body.items() if name not in ("kind", "format_version")}
    try:
        return typing.cast(M, parse(cls, fields, "manifest"))
    except _Mismatch as mismatch:
        raise ArtifactError(expected=f"{mismatch.expected} in {path}", found=mismatch.found, mend=mend) from None


_COMMANDS = {"quantized": "quantize", "profile": "profile", "pack": "pack"}  # by the kind of what it writes


def _command(kind: str) -> str:
    """What makes artifacts of a kind."""
    return _COMMANDS.get(kind, kind)


class _Mismatch(Exception):
    def __init__(self, expected: str, found: str) -> None:
        super().__init__(expected, found)
        self.expected = expected
        self.found = found


def parse(kind: Any, value: Any, where: str) -> Any:
    """Rebuild a value of an annotated type from what JSON holds; nothing is coerced but tuples from lists."""
    origin = typing.get_origin(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, dict):
            raise _Mismatch(f"{where} to be an object", type(value).__name__)
        hints = typing.get_type_hints(kind)
        names = {field.name: field for field in dataclasses.fields(kind)}
        for name in value:
            if name not in names:
                raise _Mismatch(f"no field {where}.{name}", "one")
        done = {}
        for name, field in names.items():
            if name in value:
                done[name] = parse(hints[name], value[name], f"{where}.{name}")
            elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                raise _Mismatch(f"field {where}.{name}", "none")
        return kind(**done)
    if origin in (typing.Union, types.UnionType):
        for option in typing.get_args(kind):
            with contextlib.suppress(_Mismatch):
                return parse(option, value, where)
        raise _Mismatch(f"{where} to be {kind}", type(value).__name__)
    if origin in (list, tuple):
        if not isinstance(value, list):
            raise _Mismatch(f"{where} to be a list", type(value).__name__)
        arguments = typing.get_args(kind)
        if origin is tuple and Ellipsis not in arguments:
            if len(arguments) != len(value):
                raise _Mismatch(f"{where} to hold {len(arguments)} items", str(len(value)))
            return tuple(parse(a, v, f"{where}[{i}]") for i, (a, v) in enumerate(zip(arguments, value, strict=True)))
        return origin(parse(arguments[0], v, f"{where}[{i}]") for i, v in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise _Mismatch(f"{where} to be an object", type(value).__name__)
        key, item = typing.get_args(kind)
        if key is not str:
            raise TypeError(f"{where}: JSON objects have string keys")
        return {k: parse(item, v, f"{where}.{k}") for k, v in value.items()}
    if kind is Any:
        return value
    if kind is float and type(value) is int and abs(value) <= sys.float_info.max:
        return float(value)
    if kind is type(None):
        kind = types.NoneType
    if type(value) is not kind:
        raise _Mismatch(f"{where} to be {getattr(kind, '__name__', kind)}", f"{type(value).__name__} {value!r:.60}")
    return value


def check_files(folder: Path, files: dict[str, FileEntry], kind: str, contents: bool = False) -> None:
    """Compare the files of an artifact with its manifest: sizes, and with `contents` the digests.

    Raises:
        ArtifactError: naming the first file that is absent, of another size, or changed.
    """
    mend = f"make the {kind} artifact again with `moespeq {_command(kind)} --force`"
    for name, entry in files.items():
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ArtifactError(expected=f"file names inside {folder}", found=repr(name), mend=mend)
        path = folder / name
        try:
            size = path.stat().st_size if path.is_file() else None
        except OSError:  # such as for a name that is too long
            size = None
        if size != entry.size_bytes:
            found = "no such file" if size is None else f"{size} bytes"
            raise ArtifactError(expected=f"{path} of {entry.size_bytes} bytes", found=found, mend=mend)
        if contents and (digest := sha256_file(path)) != entry.sha256:
            raise ArtifactError(expected=f"{path} with sha256 {entry.sha256}", found=f"sha256 {digest}", mend=mend)


@dataclasses.dataclass(frozen=True, slots=True)
class _Progress:
    settings: dict[str, Any]
    done: dict[str, dict[str, Any]]


class Journal:
    """Which steps of a long stage are done, so that a stopped one goes on where it was."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        """Start or resume.

        Raises:
            ArtifactError: the folder holds work begun with other settings, or no readable record of it.
        """
        self.path = folder / PROGRESS
        self.settings = json.loads(json.dumps(settings))
        self.done: dict[str, dict[str, Any]] = {}
        if self.path.is_file():
            progress = self._read()
            before = progress.settings
            for name in sorted({*before, *self.settings}):
                if before.get(name) != self.settings.get(name):
                    raise ArtifactError(
                        expected=f"{name} = {before.get(name)!r:.80}, with which the work in {folder} was begun",
                        found=f"{self.settings.get(name)!r:.80}",
                        mend="repeat the command with the same settings, or start over with --force",
                    )
            self.done = progress.done
        else:
            self._write()

    def mark(self, step: str, record: dict[str, Any]) -> None:
        """Record a step whose files are complete on disk."""
        self.done[step] = record
        self._write()

    def finish(self) -> None:
        """Forget the progress; the manifest now stands for the work."""
        self.path.unlink(missing_ok=True)

    def _read(self) -> _Progress:
        mend = "start over with --force"
        try:
            return typing.cast(_Progress, parse(_Progress, read_json(self.path, "a progress file", mend), "progress"))
        except _Mismatch as mismatch:
            raise ArtifactError(
                expected=f"{mismatch.expected} in {self.path}", found=mismatch.found, mend=mend
            ) from None

    def _write(self) -> None:
        write_json(self.path, {"settings": self.settings, "done": self.done})


def require_same_model(kind: str, folder: Path, artifact_digest: str, model_digest: str) -> None:
    """Refuse an artifact that was made from another model.

    Raises:
        InputError: the digests differ.
    """
    if artifact_digest != model_digest:
        raise InputError(
            expected=f"a {kind} artifact of this model (digest {model_digest[:16]})",
            found=f"one of another model (digest {artifact_digest[:16]}) in {folder}",
            mend=f"pass the model it was made from, or run `moespeq {_command(kind)}` for this one",
        )
