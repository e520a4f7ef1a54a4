"""From what a user calls a model to the folder where it lies: a path, a cached repository, or the Hub."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from runtime.artifacts.folder import require_utf8
from runtime.errors import InputError, StorageError
from runtime.memory.sizes import format_size

WANTED = (  # of a repository: configuration, weights and tokenizer, none of the same weights in other forms
    "config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json", "tokenizer*",
    "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "chat_template*", "*.model", "*.tiktoken",
    "*.jinja", "LICENSE*",
)  # fmt: skip


def find_model(model: str | Path) -> Path:
    """The local folder of a model.

    Args:
        model: a folder, a repository of the Hub's cache (`models--a--b`), or an id such as `a/b`, which is downloaded
            into that cache unless it is there or HF_HUB_OFFLINE is set.

    Raises:
        InputError: nothing of that name, here or there.
        StorageError: no room for the download.
    """
    place = Path(model).expanduser()
    require_utf8(place)
    if place.is_dir():
        return _snapshot(place) if (place / "snapshots").is_dir() and not (place / "config.json").exists() else place
    if place.is_file():
        raise InputError(expected=f"a model folder at {place}", found="a file", mend="pass the folder that holds it")
    text = str(model)
    if text.count("/") == 1 and not text.startswith((".", "/", "~")):
        return _from_hub(text)
    raise InputError(
        expected=f"a model folder at {place}",
        found="no such folder",
        mend="pass the path of a local model with --model",
    )


def _snapshot(repository: Path) -> Path:
    """The revision of a cached repository that `main` names, or its only one."""
    reference = repository / "refs" / "main"
    commits = sorted(path.name for path in (repository / "snapshots").iterdir() if path.is_dir())
    chosen = reference.read_text(encoding="utf-8").strip() if reference.is_file() else ""
    if chosen not in commits:
        if len(commits) != 1:
            raise InputError(
                expected=f"one revision in {repository / 'snapshots'}, or refs/main naming one of them",
                found=f"{len(commits)} of them ({', '.join(commits[:3])})" if commits else "none",
                mend="pass the folder of one of them, or download the model again",
            )
        chosen = commits[0]
    return repository / "snapshots" / chosen


def _from_hub(name: str) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import DryRunError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    wanted = list(WANTED)
    try:
        if not constants.HF_HUB_OFFLINE:
            with contextlib.suppress(DryRunError):  # out of reach; the cache may have it
                files = snapshot_download(name, allow_patterns=wanted, dry_run=True)
                _require_room(name, sum(file.file_size or 0 for file in files if file.will_download))
        return Path(str(snapshot_download(name, allow_patterns=wanted)))
    except (LocalEntryNotFoundError, HFValidationError, HfHubHTTPError) as error:
        reached = isinstance(error, HfHubHTTPError)
        raise InputError(
            expected=f"a model folder {name}, or that id in the local Hugging Face cache or on the Hub",
            found=str(error).splitlines()[0][:200] if reached else "neither, and the Hub is out of reach",
            mend="check the name, and whether it needs `hf auth login`"
            if reached
            else f"download it first with `hf download {name}`, or pass the path of a local folder",
        ) from error


def _require_room(name: str, needed_bytes: int) -> None:
    from huggingface_hub import constants

    place = Path(constants.HF_HUB_CACHE)
    while not place.exists():
        place = place.parent
    free_bytes = shutil.disk_usage(place).free
    if free_bytes < needed_bytes:
        raise StorageError(
            expected=f"{format_size(needed_bytes)} free in {place} for {name}",
            found=format_size(free_bytes),
            mend="free some space, or set HF_HUB_CACHE to another place",
        )
