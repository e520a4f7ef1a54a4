"""Options that several commands share, and where their artifacts lie."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[
    str | None,
    typer.Option("--model", help="Folder of the model, a Hugging Face checkpoint", show_default="the embedded one"),
]
Artifacts = Annotated[
    Path,
    typer.Option(
        "--artifacts", envvar="MOESPEQ_ARTIFACTS", help="Folder in which the stages find each other's results"
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout instead of a path")]
Force = Annotated[bool, typer.Option("--force", help="Replace a result that is already there")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print what it would take of memory, disk and time, and write nothing")
]
DEFAULT_ARTIFACTS = Path("artifacts")
MOST_SAMPLES = 100_000  # sequences; more would be made and cut for hours before a plan could be shown


def model_folder(model: str | None) -> str:
    """The model that a command works on: the one given, or the embedded one."""
    if model is not None:
        return model
    from moespeq_cli.demo import checkpoint_path

    return str(checkpoint_path())
