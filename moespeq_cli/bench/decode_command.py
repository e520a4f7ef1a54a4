"""`moespeq bench decode`: parse, call, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moespeq_cli import console
from moespeq_cli.bench.shared import (
    Compare,
    Cores,
    Output,
    Packs,
    finish,
    fresh_settings,
    named_packs,
    numbers,
    open_embedded,
    require_file,
)
from moespeq_cli.options import DEFAULT_ARTIFACTS, Artifacts

_BUILT = "A built model on a GPU"
_STORED = ("pack", "compare", "same_memory", "caches", "mode", "window_cache", "threads")  # not with --geometry


def decode(
    context: typer.Context,
    pack: Packs = None,
    compare: Compare = None,
    same_memory: Annotated[
        bool, typer.Option("--same-memory", help="Give packs the same memory for drafts and cache together")
    ] = False,
    artifacts: Artifacts = DEFAULT_ARTIFACTS,
    caches: Annotated[
        str,
        typer.Option("--expert-cache", help="Cache sizes, comma-separated; shares are of all raw experts"),
    ] = "10%,25%,50%,100%",
    mode: Annotated[
        list[str] | None, typer.Option("--mode", help="Name of a mode; repeat it for more", show_default="all")
    ] = None,
    prompts: Annotated[int, typer.Option("--prompts", min=1, help="Prompts of each domain")] = 2,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1)] = 64,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Runs of each mode")] = 3,
    windows: Annotated[
        str, typer.Option("--windows", help="Tail lengths, comma-separated; empty skips")
    ] = "1,2,4,8,16,24",
    verifies: Annotated[
        str, typer.Option("--verify-windows", help="Verification lengths, comma-separated")
    ] = "0,1,2,3,4",
    window_cache: Annotated[str, typer.Option("--window-cache", help="Cache size of the window sweep")] = "25%",
    geometry: Annotated[
        str | None,
        typer.Option("--geometry", help="Measure a model that is built in memory, on the GPU", rich_help_panel=_BUILT),
    ] = None,
    layers: Annotated[
        int | None, typer.Option("--layers", min=1, help="Fewer layers than the model has", rich_help_panel=_BUILT)
    ] = None,
    expert_memory: Annotated[
        str,
        typer.Option(
            "--expert-memory",
            help="Device memory for draft and slots, shares of the BF16 expert bytes, comma-separated",
            rich_help_panel=_BUILT,
        ),
    ] = "40%,51%,75%",
    part_memory: Annotated[
        str,
        typer.Option("--window-memory", help="The same, for everything but the ways", rich_help_panel=_BUILT),
    ] = "51%",
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", min=1, help="Length of each prompt", rich_help_panel=_BUILT)
    ] = 64,
    first_tokens: Annotated[
        str,
        typer.Option(
            "--first-token",
            help="Lengths of prompts to time to their first token, comma-separated; empty skips",
            rich_help_panel=_BUILT,
        ),
    ] = "64,512,4096",
    ablations: Annotated[
        bool, typer.Option("--ablations/--no-ablations", help="Leave parts out one by one", rich_help_panel=_BUILT)
    ] = True,
    weights: Annotated[
        str,
        typer.Option(
            "--grid",
            help="alpha/beta/gamma of the priority policy, comma-separated; empty skips",
            rich_help_panel=_BUILT,
        ),
    ] = "0.6/0.3/0.1,1/0/0,0/1/0,0/0/1",
    table_context: Annotated[
        int,
        typer.Option(
            "--memory-table",
            min=0,
            help="Tokens of context for which sharing is measured; 0 skips",
            rich_help_panel=_BUILT,
        ),
    ] = 0,
    disk: Annotated[
        Path | None,
        typer.Option(
            "--disk", help="Folder on the disk that a part of the experts is read from", rich_help_panel=_BUILT
        ),
    ] = None,
    host_cache: Annotated[
        str,
        typer.Option("--host-cache", help="Of the experts, what host memory holds with --disk", rich_help_panel=_BUILT),
    ] = "50%",
    encoding: Annotated[
        list[str] | None,
        typer.Option(
            "--encoding",
            help="Of the exact experts: raw, residual, or both side by side; repeat it, or separate by commas",
            show_default="raw",
            rich_help_panel=_BUILT,
        ),
    ] = None,
    config: Annotated[
        str | None, typer.Option("--config", help="Deployment profile of the run", rich_help_panel=_BUILT)
    ] = None,
    threads: Cores = 0,
    output: Output = None,
) -> None:
    """Cache sizes, eviction, prefetch and windows side by side: the embedded model, or a built one on a GPU"""
    _refuse_others(context, built=geometry is not None)
    if geometry is not None:
        from moespeq_cli.bench.offload_run import Asked, decode_built, parse_weights, print_built
        from runtime.config import make_settings

        require_file(output)
        wanted = Asked(
            geometry=geometry,
            layers=layers,
            memories=[part.strip() for part in expert_memory.split(",") if part.strip()],
            prompts=prompts,
            prompt_tokens=prompt_tokens,
            max_new_tokens=max_new_tokens,
            repeats=repeats,
            part_memory=part_memory,
            ablations=ablations,
            windows=numbers("--windows", windows),
            verifies=numbers("--verify-windows", verifies),
            weights=parse_weights(weights),
            first_token=numbers("--first-token", first_tokens),
            table_context=table_context,
            disk=disk,
            host_cache=host_cache,
            encodings=_encodings(encoding),
        )
        settings = make_settings(config, {"device": "cuda"})
        print_built(decode_built(wanted, settings, lambda figures: finish(output, figures)))
        return
    from moespeq_cli.bench import decode as sweep
    from moespeq_cli.bench.prompts import bench_prompts

    opened, tokenizer, stop_ids = open_embedded(pack, artifacts)
    asked = bench_prompts(tokenizer, prompts)
    sizes = [part.strip() for part in caches.split(",") if part.strip()]
    tails, lengths = numbers("--windows", windows), numbers("--verify-windows", verifies)
    base = fresh_settings(threads)
    modes = sweep.find_modes(mode)
    packs = {opened.manifest.encoding: opened} | named_packs(compare)
    total = len(packs) * len(sizes) * len(modes) + len(tails) * len(lengths)
    console.note(f"{total} settings, {len(asked)} prompts, {max_new_tokens} tokens each, {repeats} repeats")
    with console.progress("settings", total) as bar:
        memory = sweep.sweep_memory(
            packs, base, asked, max_new_tokens, stop_ids, sizes, repeats, bar.advance, same_memory, modes
        )
        grid = (
            sweep.sweep_windows(
                opened, base, asked, max_new_tokens, stop_ids, window_cache, tails, lengths, bar.advance
            )
            if tails and lengths
            else None
        )
    finish(output, {"memory": memory, "windows": grid, "max_new_tokens": max_new_tokens, "prompts": len(asked)})
    print(sweep.memory_table(memory))
    if grid is not None:
        table = sweep.window_table(grid, "total_bytes_per_token", 1e-6, 2)
        print(f"\nMB read a token at {window_cache}, prompts included:\n\n{table}")
        print(f"\nms a token at {window_cache}:\n\n{sweep.window_table(grid, 'ms_per_token', 1, 1)}")
        print(f"\nhit rate at {window_cache}, per cent:\n\n{sweep.window_table(grid, 'hit_rate', 100, 1)}")


def _encodings(asked: list[str] | None) -> list[str]:
    """The encodings of an option that may be repeated or have several; raw without it."""
    from runtime.artifacts.encodings import ENCODINGS
    from runtime.errors import InputError

    names = [name.strip() for part in asked or ["raw"] for name in part.split(",")]
    for name in names:
        if name not in ENCODINGS:
            raise InputError(
                expected=f"--encoding of {', '.join(ENCODINGS)}", found=repr(name), mend="name one of them, or both"
            )
    return list(dict.fromkeys(names))


def _refuse_others(context: typer.Context, built: bool) -> None:
    """Fail where an option was given that says nothing of what is measured."""
    from runtime.errors import InputError

    for option in context.command.params:
        name = option.name or ""
        source = context.get_parameter_source(name)
        other = name in _STORED if built else getattr(option, "rich_help_panel", None) == _BUILT
        if other and source is not None and source.name == "COMMANDLINE":
            raise InputError(
                expected=f"{option.opts[0]} {'without' if built else 'together with'} --geometry",
                found=f"it {'beside' if built else 'without'} --geometry",
                mend="leave one of them out" if built else "name a geometry, such as qwen1.5-moe, or leave it out",
            )
