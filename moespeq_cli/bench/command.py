"""`moespeq bench`: parse, call, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moespeq_cli import console
from moespeq_cli.bench.decode_command import decode
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
from moespeq_cli.bench.synthetic.command import make_model
from moespeq_cli.options import DEFAULT_ARTIFACTS, Artifacts

bench = typer.Typer(help="Measure, for the docs", no_args_is_help=True)
bench.command()(make_model)
bench.command()(decode)


@bench.command()
def quality(
    pack: Packs = None,
    compare: Compare = None,
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

    opened, tokenizer, stop_ids = open_embedded(pack, artifacts)
    packs = {"gptq": opened} | named_packs(compare)
    total = problems * (1 + 2 * len(packs)) + 3 * prompts * len(packs)
    with console.progress("texts", total) as bar:
        result = measure.measure_quality(
            packs,
            fresh_settings(threads, verify_window),
            tokenizer,
            problems,
            prompts,
            max_new_tokens,
            stop_ids,
            bar.advance,
        )
    finish(output, result)
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
    require_file(output)
    if picture is not None:
        pictures.require_file(picture)
    with tempfile.TemporaryDirectory() as folder:
        forms = measure.quantize_forms(model_folder(None), Path(folder), spec.moe_layers, console.note)
        with console.progress("layers", spec.num_layers) as bar:
            run = measure.MixtureRun(LayerStream(checkpoint, spec), texts, forms)
            rows = run.measure(measure.mixtures(ranking), bar.advance)
    tokens = sum(len(text.input_ids) for text in texts)
    result = {"ranking": [list(pair) for pair in choice.ranking], "domains": run.names, "tokens": tokens, "rows": rows}
    finish(output, result)
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
    finish(output, result)
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
    finish(output, {"threads": threads, "group_size": measure.GROUP_SIZE, "rows": rows})
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

    sizes = sorted(set(numbers("--tokens", tokens)))
    plan = measure.Plan(
        parse_geometries(geometry),
        parse_forms(form, group_size),
        sizes,
        check,
        residual=residual_form(form, group_size),
        dense=DENSE in (form or ()),
    )
    require_file(output)
    session = KernelSession.open(plan, candidate, tune)
    cases = plan.num_cases + (len(SEED_TABLE) if seed_table else 0)
    console.note(session.announcement())
    with console.progress("layers", cases) as bar:
        session.measure(bar.advance, seed_table)
    finish(output, session.result())
    print(session.text())
    if tune is not None:
        session.tune(tune)
        finish(output, session.result())
        print(f"\nBest from how many tokens on is in {tune}")
