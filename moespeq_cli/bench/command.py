"""`moespeq bench`: parse, call, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from moespeq_cli import console
from moespeq_cli.bench.synthetic.command import make_model
from moespeq_cli.options import DEFAULT_ARTIFACTS, Artifacts

_BUILT = "A built model on a GPU"
_STORED = ("pack", "compare", "same_memory", "caches", "mode", "window_cache", "threads")  # not with --geometry

bench = typer.Typer(help="Measure, for the docs", no_args_is_help=True)
bench.command()(make_model)

Output = Annotated[Path | None, typer.Option("--json", help="Write the raw figures to this file")]
Packs = Annotated[Path | None, typer.Option("--pack", help="Pack to measure", show_default="pack in --artifacts")]
Cores = Annotated[int, typer.Option("--threads", min=0, help="Threads of the arithmetic; 0 chooses")]


@bench.command()
def decode(
    context: typer.Context,
    pack: Packs = None,
    compare: Annotated[
        list[str] | None,
        typer.Option("--compare", help="NAME=PACK, another pack of the embedded model; repeat it for more"),
    ] = None,
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

        _require_file(output)
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
            windows=_numbers("--windows", windows),
            verifies=_numbers("--verify-windows", verifies),
            weights=parse_weights(weights),
            first_token=_numbers("--first-token", first_tokens),
            table_context=table_context,
            disk=disk,
            host_cache=host_cache,
            encodings=_encodings(encoding),
        )
        settings = make_settings(config, {"device": "cuda"})
        print_built(decode_built(wanted, settings, lambda figures: _finish(output, figures)))
        return
    from moespeq_cli.bench import decode as sweep
    from moespeq_cli.bench.prompts import bench_prompts

    opened, tokenizer, stop_ids = _open(pack, artifacts)
    asked = bench_prompts(tokenizer, prompts)
    sizes = [part.strip() for part in caches.split(",") if part.strip()]
    tails, lengths = _numbers("--windows", windows), _numbers("--verify-windows", verifies)
    base = _settings(threads)
    modes = sweep.find_modes(mode)
    packs = {opened.manifest.encoding: opened} | _others(compare)
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
    _finish(output, {"memory": memory, "windows": grid, "max_new_tokens": max_new_tokens, "prompts": len(asked)})
    print(sweep.memory_table(memory))
    if grid is not None:
        table = sweep.window_table(grid, "total_bytes_per_token", 1e-6, 2)
        print(f"\nMB read a token at {window_cache}, prompts included:\n\n{table}")
        print(f"\nms a token at {window_cache}:\n\n{sweep.window_table(grid, 'ms_per_token', 1, 1)}")
        print(f"\nhit rate at {window_cache}, per cent:\n\n{sweep.window_table(grid, 'hit_rate', 100, 1)}")


@bench.command()
def quality(
    pack: Packs = None,
    compare: Annotated[
        list[str] | None,
        typer.Option("--compare", help="NAME=PACK, another pack of the embedded model; repeat it for more"),
    ] = None,
    artifacts: Artifacts = DEFAULT_ARTIFACTS,
    problems: Annotated[int, typer.Option("--problems", min=1, max=500, help="Held-out maths problems")] = 500,
    prompts: Annotated[int, typer.Option("--prompts", min=1, help="Prompts of each domain for acceptance")] = 50,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1)] = 96,
    verify_window: Annotated[
        int | None,
        typer.Option(
            "--verify-window", min=0, help="Verify so many proposals each time", show_default="as roofline chooses"
        ),
    ] = None,
    threads: Cores = 0,
    output: Output = None,
) -> None:
    """Exact match of target, speculation and draft alone, and acceptance by domain, on the embedded model"""
    from moespeq_cli.bench import quality as measure

    opened, tokenizer, stop_ids = _open(pack, artifacts)
    packs = {"gptq": opened} | _others(compare)
    total = problems * (1 + 2 * len(packs)) + 3 * prompts * len(packs)
    with console.progress("texts", total) as bar:
        result = measure.measure_quality(
            packs,
            _settings(threads, verify_window),
            tokenizer,
            problems,
            prompts,
            max_new_tokens,
            stop_ids,
            bar.advance,
        )
    _finish(output, result)
    print(measure.quality_tables(result))


@bench.command()
def sensitive(
    profile: Annotated[
        Path | None, typer.Option("--profile", help="Folder that profile made", show_default="profile in --artifacts")
    ] = None,
    artifacts: Artifacts = DEFAULT_ARTIFACTS,
    samples: Annotated[int, typer.Option("--samples", min=3, help="Held-out texts to compare on")] = 600,
    picture: Annotated[Path | None, typer.Option("--picture", help="PNG file to draw the curves to")] = None,
    output: Output = None,
) -> None:
    """What finer layers buy: shares of the layers by sensitivity, at 8 and 4 bits, on the embedded model"""
    import tempfile

    from moespeq_cli.bench import sensitive as measure
    from moespeq_cli.options import model_folder
    from moespeq_cli.profile import pictures
    from moespeq_cli.profile.texts import HELD_OUT, read_domains
    from moespeq_cli.quantize.sensitive import choose_layers
    from runtime.artifacts.checkpoint import Checkpoint
    from runtime.model.families import describe
    from runtime.model.stream import LayerStream
    from runtime.model.tokenizer import load_tokenizer

    checkpoint = Checkpoint.open(model_folder(None))
    spec = describe(checkpoint)
    choice = choose_layers(profile or artifacts / "profile", 1.0, checkpoint.digest)
    ranking = [layer for layer, _ in choice.ranking]
    vocab_size = int(checkpoint.config["vocab_size"])
    _, texts = read_domains([HELD_OUT], load_tokenizer(checkpoint.folder), samples, 512, vocab_size)
    _require_file(output)
    if picture is not None:
        pictures.require_file(picture)
    with tempfile.TemporaryDirectory() as folder:
        forms = measure.quantize_forms(model_folder(None), Path(folder), spec.moe_layers, console.note)
        with console.progress("layers", spec.num_layers) as bar:
            run = measure.MixtureRun(LayerStream(checkpoint, spec), texts, forms)
            rows = run.measure(measure.mixtures(ranking), bar.advance)
    tokens = sum(len(text.input_ids) for text in texts)
    result = {"ranking": [list(pair) for pair in choice.ranking], "domains": run.names, "tokens": tokens, "rows": rows}
    _finish(output, result)
    if picture is not None:
        pictures.save_lines(measure.curve(result, picture.stem), picture.parent)
    print(measure.table(result))


@bench.command()
def records(
    pack: Packs = None,
    artifacts: Artifacts = DEFAULT_ARTIFACTS,
    threads: Annotated[int, typer.Option("--threads", min=1, help="Threads that share a large record")] = 1,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Rounds over all records")] = 20,
    output: Output = None,
) -> None:
    """Residual records to weights: compiled code beside NumPy"""
    from moespeq_cli.bench import records as measure
    from runtime.artifacts.pack import Pack

    with console.progress("decoders", 2) as bar:
        result = measure.measure(
            Pack.open(pack if pack is not None else artifacts / "pack"), threads, repeats, bar.advance
        )
    _finish(output, result)
    print(measure.table(result))


@bench.command()
def linear(
    shapes: Annotated[
        str, typer.Option("--shapes", help="OUTxIN, comma-separated")
    ] = "256x256,256x128,2816x2048,2048x1408",
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Rounds over all weights")] = 7,
    threads: Annotated[int, typer.Option("--threads", min=1, help="Threads of the arithmetic")] = 1,
    output: Output = None,
) -> None:
    """One token through a linear of the draft: the INT4 kernel beside BF16 and plain dequantising"""
    import torch

    from moespeq_cli.bench import linear as measure
    from runtime.errors import InputError

    try:
        sizes = [(int(a), int(b)) for a, _, b in (part.strip().partition("x") for part in shapes.split(","))]
    except ValueError:
        raise InputError(
            expected="--shapes as OUTxIN, comma-separated", found=shapes, mend="write 2816x2048,..."
        ) from None
    if bad := [size for size in sizes if size[0] % 16 or size[1] % measure.GROUP_SIZE or min(size) < 1]:
        raise InputError(
            expected=f"output features in multiples of 16, input features of {measure.GROUP_SIZE}",
            found=f"{bad[0][0]}x{bad[0][1]}",
            mend="pass other --shapes",
        )
    torch.set_num_threads(threads)
    with console.progress("shapes", len(sizes)) as bar:
        rows = measure.measure(sizes, repeats, bar.advance)
    _finish(output, {"threads": threads, "group_size": measure.GROUP_SIZE, "rows": rows})
    print(measure.table(rows))


@bench.command()
def kernels(
    geometry: Annotated[
        list[str] | None,
        typer.Option(
            "--geometry",
            help="Name of a model, all, or EXPERTS:TOP_K:HIDDENxINTER[:ACTIVATION][:bias]; repeat it for more",
            show_default="four models",
        ),
    ] = None,
    form: Annotated[
        list[str] | None,
        typer.Option(
            "--form",
            help="int4, int8, bf16, residual (exact weights from records and codes), or dense (what a decoding pass "
            "computes besides); repeat it for more",
            show_default="int4 and bf16",
        ),
    ] = None,
    tokens: Annotated[
        str, typer.Option("--tokens", help="Tokens of a call, comma-separated")
    ] = "1,2,4,6,8,16,32,64,128,256,512,1024,4096",
    group_size: Annotated[
        int, typer.Option("--group-size", help="Columns that share a scale of int4; -1 is one a row")
    ] = 128,
    candidate: Annotated[
        list[str] | None,
        typer.Option("--candidate", help="A way to compute; repeat it for more", show_default="all but variants"),
    ] = None,
    check: Annotated[bool, typer.Option("--check/--no-check", help="Probe every kernel before timing it")] = True,
    seed_table: Annotated[
        bool, typer.Option("--seed-table", help="Also a loop over experts against ours, for four widths of 60 experts")
    ] = False,
    tune: Annotated[
        Path | None, typer.Option("--tune", help="Write which kernel is best from how many tokens on to this profile")
    ] = None,
    output: Output = None,
) -> None:
    """Expert kernels on the GPU: right first, then time, bandwidth and distance from the floor"""
    from moespeq_cli.bench import kernels as measure
    from moespeq_cli.bench.geometry import SEED_TABLE, parse_geometries
    from moespeq_cli.bench.kernel_session import DENSE, KernelSession, parse_forms, residual_form

    sizes = sorted(set(_numbers("--tokens", tokens)))
    plan = measure.Plan(
        parse_geometries(geometry),
        parse_forms(form, group_size),
        sizes,
        check,
        residual=residual_form(form, group_size),
        dense=DENSE in (form or ()),
    )
    _require_file(output)
    session = KernelSession.open(plan, candidate, tune)
    cases = plan.num_cases + (len(SEED_TABLE) if seed_table else 0)
    console.note(session.announcement())
    with console.progress("layers", cases) as bar:
        session.measure(bar.advance, seed_table)
    _finish(output, session.result())
    print(session.text())
    if tune is not None:
        session.tune(tune)
        _finish(output, session.result())
        print(f"\nBest from how many tokens on is in {tune}")


def _open(pack: Path | None, artifacts: Path) -> tuple[Any, Any, frozenset[int]]:
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


def _others(compare: list[str] | None) -> dict[str, Any]:
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


def _settings(threads: int, verify_window: int | None = None) -> Any:
    from runtime.config import make_settings

    fixed = {} if verify_window is None else {"governor": "fixed", "verify_window": verify_window}
    return make_settings(None, {"threads": threads, "context": 512, "warm": False} | fixed)  # caches start empty


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


def _numbers(option: str, text: str) -> list[int]:
    """The numbers of an option; none where it is empty."""
    from runtime.errors import InputError

    try:
        return [int(part) for part in text.split(",")] if text.strip() else []
    except ValueError:
        raise InputError(
            expected=f"{option} as whole numbers, comma-separated", found=repr(text), mend="write 1,2,4"
        ) from None


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


def _require_file(output: Path | None) -> None:
    """Fail before long work where its figures could not be written."""
    from runtime.artifacts.folder import require_writable
    from runtime.errors import InputError

    if output is not None:
        if output.is_dir():
            raise InputError(expected="a file for --json", found=f"the folder {output}", mend="name a file in it")
        require_writable("the figures", output)


def _finish(output: Path | None, result: dict[str, Any]) -> None:
    from moespeq_cli.bench.environment import environment
    from runtime.artifacts.folder import write_guard
    from runtime.artifacts.manifest import write_json

    if output is not None:
        with write_guard("the figures", output.parent):
            output.parent.mkdir(parents=True, exist_ok=True)
            write_json(output, {"environment": environment()} | result)
