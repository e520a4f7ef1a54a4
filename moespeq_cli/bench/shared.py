"""What the commands of `moespeq bench` share: options, and reading and writing for them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

Output = Annotated[Path | None, typer.Option("--json", help="Write the raw figures to this file")]
Packs = Annotated[Path | None, typer.Option("--pack", help="Pack to measure", show_default="pack in --artifacts")]
Compare = Annotated[
    list[str] | None,
    typer.Option("--compare", help="NAME=PACK, another pack of the embedded model; repeat it for more"),
]
Cores = Annotated[int, typer.Option("--threads", min=0, help="Threads of the arithmetic; 0 chooses")]


def open_embedded(pack: Path | None, artifacts: Path) -> tuple[Any, Any, frozenset[int]]:
    """A pack of the embedded model, its tokenizer, and the tokens that end a text.

    Raises:
        ArtifactError: no such pack, or one of another model.
    """
    from moespeq_cli.options import model_folder
    from moespeq_cli.run.ready import open_pack
    from moespeq_cli.run.session import declared_stop_ids
    from runtime.artifacts.checkpoint import Checkpoint
    from runtime.artifacts.manifest import require_same_model
    from runtime.model.tokenizer import load_tokenizer

    opened = open_pack(pack, artifacts, None)
    embedded = Checkpoint.open(model_folder(None)).digest
    require_same_model("pack", opened.folder, opened.manifest.model_digest, embedded)
    tokenizer = load_tokenizer(opened.config_folder)
    return opened, tokenizer, declared_stop_ids(opened, tokenizer)


def named_packs(compare: list[str] | None) -> dict[str, Any]:
    """The packs of `--compare`, by name."""
    from moespeq_cli.options import model_folder
    from runtime.artifacts.checkpoint import Checkpoint
    from runtime.artifacts.manifest import require_same_model
    from runtime.artifacts.pack import Pack
    from runtime.errors import InputError

    packs, embedded = {}, Checkpoint.open(model_folder(None)).digest
    for item in compare or []:
        name, _, folder = item.partition("=")
        if not name or not folder:
            raise InputError(expected="--compare as NAME=PACK", found=repr(item), mend="name the pack and its folder")
        packs[name] = Pack.open(folder)
        require_same_model("pack", packs[name].folder, packs[name].manifest.model_digest, embedded)
    return packs


def fresh_settings(threads: int, verify_window: int | None = None) -> Any:
    """Settings of a run whose cache starts empty; a verification length is held fixed."""
    from runtime.config import make_settings

    fixed = {} if verify_window is None else {"governor": "fixed", "verify_window": verify_window}
    return make_settings(None, {"threads": threads, "context": 512, "warm": False} | fixed)


def numbers(option: str, text: str) -> list[int]:
    """The numbers of an option; none where it is empty."""
    from runtime.errors import InputError

    try:
        return [int(part) for part in text.split(",")] if text.strip() else []
    except ValueError:
        raise InputError(
            expected=f"{option} as whole numbers, comma-separated", found=repr(text), mend="write 1,2,4"
        ) from None


def require_file(output: Path | None) -> None:
    """Fail before long work where its figures could not be written."""
    from runtime.artifacts.folder import require_writable
    from runtime.errors import InputError

    if output is not None:
        if output.is_dir():
            raise InputError(expected="a file for --json", found=f"the folder {output}", mend="name a file in it")
        require_writable("the figures", output)


def finish(output: Path | None, result: dict[str, Any]) -> None:
    """Write figures, and what they were measured on, where that was asked for."""
    from moespeq_cli.bench.environment import environment
    from runtime.artifacts.folder import write_guard
    from runtime.artifacts.manifest import write_json

    if output is not None:
        with write_guard("the figures", output.parent):
            output.parent.mkdir(parents=True, exist_ok=True)
            write_json(output, {"environment": environment()} | result)
