"""`moespeq inspect`: what an artifact, a model folder or a deployment profile is, for the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from moespeq_cli import console
from moespeq_cli.options import DEFAULT_ARTIFACTS, Artifacts, Json


def inspect(
    path: Annotated[
        Path,
        typer.Argument(
            help="An artifact's folder, a model's folder, a YAML deployment profile or the name of one, such as h200"
        ),
    ],
    artifacts: Artifacts = DEFAULT_ARTIFACTS,
    verify: Annotated[bool, typer.Option("--verify", help="Read every file and compare its checksum")] = False,
    as_json: Json = False,
) -> None:
    """Say what something is: model, sizes, settings, checksums, and what it goes with"""
    from moespeq_cli.inspection import Facts, describe_path

    found: Facts = describe_path(path, artifacts, verify)
    if as_json:
        console.emit(found.as_json(), as_json=True)
        return
    width = max(len(name) for name in found.rows)
    for name, value in found.rows.items():
        for place, line in enumerate(_lines(value)):
            console.write(f"{name if place == 0 else '':<{width}}  {line}\n")


def _lines(value: Any) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else [str(value)]
