"""`moespeq bench make-model`: parse, call, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moespeq_cli import console
from moespeq_cli.options import Json


def make_model(
    geometry: Annotated[
        str, typer.Option("--geometry", help="qwen1.5-moe, deepseek-v2-lite, phi-3.5-moe or mixtral-8x7b")
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder to make; must not be there")],
    layers: Annotated[
        int | None, typer.Option("--layers", help="The first layers only", show_default="all of the model's")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the random weights")] = 0,
    tokens: Annotated[
        int, typer.Option("--tokens", min=2, help="About how many tokens the routing is measured on")
    ] = 512,
    as_json: Json = False,
) -> None:
    """A random checkpoint of a real model's geometry whose routing is like a trained one's"""
    from dataclasses import asdict

    from moespeq_cli.bench.synthetic import folder
    from moespeq_cli.bench.synthetic.architecture import Architecture
    from moespeq_cli.bench.synthetic.figures import measure_routing
    from moespeq_cli.bench.synthetic.models import make_config
    from runtime.artifacts.checkpoint import Checkpoint
    from runtime.artifacts.folder import write_guard
    from runtime.artifacts.manifest import write_json
    from runtime.memory.sizes import format_size

    config = make_config(geometry, layers)
    folder.refuse_existing(out)
    architecture = Architecture.of(config)
    stored_bytes = folder.needed_bytes(architecture)
    count = len(folder.plan_shards(architecture))
    files = f"{count} files" if count > 1 else "1 file"
    console.note(
        f"{geometry}, {architecture.num_layers} layers: {format_size(stored_bytes)} in {files} to {out}, "
        f"then about {tokens} tokens through it and its INT4 draft"
    )
    with console.progress("GB written", stored_bytes / 1e9) as bar:
        folder.write_model(config, out, seed, bar.advance)
    with console.progress("layers measured", architecture.num_layers + 1) as bar:
        figures = measure_routing(Checkpoint.open(out), tokens, advance=bar.advance)
    for line in figures.lines():
        console.note(line)
    body = {"geometry": geometry, "layers": architecture.num_layers, "seed": seed, "routing": asdict(figures)}
    with write_guard("the routing figures", out):
        write_json(out / "routing.json", body)
    console.emit({"path": str(out), **body}, as_json)
