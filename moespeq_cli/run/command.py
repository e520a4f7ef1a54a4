"""`moespeq run`: parse, call, print."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moespeq_cli import console
from moespeq_cli.options import DEFAULT_ARTIFACTS, Artifacts

if TYPE_CHECKING:
    from moespeq_cli.run.prompts import Prompt
    from runtime.artifacts.pack import Pack
    from runtime.config import RunSettings
    from runtime.memory.plan import MemoryPlan

EXAMPLE = "Maria has 31 apples. She buys 4 bags with 6 apples each. How many apples does she have now?"

_SETTINGS = "Speculation and memory"
_SAMPLING = "Sampling"
_PROMPTS = "Prompts"


def run(
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", "-p", help="Text to answer; repeat it for more", rich_help_panel=_PROMPTS),
    ] = None,
    prompt_file: Annotated[
        str | None,
        typer.Option(
            "--prompt-file",
            help="File with one prompt, or JSONL with many; - reads JSONL from stdin",
            rich_help_panel=_PROMPTS,
        ),
    ] = None,
    raw: Annotated[
        bool,
        typer.Option("--raw", help="Continue the text as it is, without the chat template", rich_help_panel=_PROMPTS),
    ] = False,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", min=0, help="Tokens to generate at most", rich_help_panel=_PROMPTS)
    ] = 128,
    stop: Annotated[
        list[str] | None,
        typer.Option("--stop", help="Text at which to stop; repeat it for more", rich_help_panel=_PROMPTS),
    ] = None,
    pack: Annotated[
        Path | None, typer.Option("--pack", help="Folder that pack made", show_default="pack in --artifacts")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="Refuse a pack that is not of this model")] = None,
    artifacts: Artifacts = DEFAULT_ARTIFACTS,
    config: Annotated[
        str | None,
        typer.Option("--config", help="Deployment profile: a YAML file, or the name of one that comes along"),
    ] = None,
    prefetch_window: Annotated[
        int | None,
        typer.Option(
            "--prefetch-window", min=0, help="Tokens to draft ahead", show_default="16", rich_help_panel=_SETTINGS
        ),
    ] = None,
    verify_window: Annotated[
        int | None,
        typer.Option(
            "--verify-window",
            min=0,
            help="Drafted tokens that one verification takes at most",
            show_default="2",
            rich_help_panel=_SETTINGS,
        ),
    ] = None,
    governor: Annotated[
        str | None,
        typer.Option(
            "--governor", help="fixed, threshold or roofline", show_default="roofline", rich_help_panel=_SETTINGS
        ),
    ] = None,
    no_speculate: Annotated[
        bool, typer.Option("--no-speculate", help="Load no draft; the target alone", rich_help_panel=_SETTINGS)
    ] = False,
    prefetch: Annotated[
        str | None,
        typer.Option("--prefetch", help="draft, history or none", show_default="draft", rich_help_panel=_SETTINGS),
    ] = None,
    eviction: Annotated[
        str | None,
        typer.Option(
            "--eviction", help="lookahead, lru, lfu or priority", show_default="lookahead", rich_help_panel=_SETTINGS
        ),
    ] = None,
    warm: Annotated[
        bool | None,
        typer.Option(
            "--warm/--no-warm",
            help="Begin by reading the experts that the pack's profile used most",
            show_default="True",
            rich_help_panel=_SETTINGS,
        ),
    ] = None,
    expert_cache: Annotated[
        str | None,
        typer.Option(
            "--expert-cache",
            help="Memory for target experts, such as 12GB or 25%",
            show_default="60% of what is free",
            rich_help_panel=_SETTINGS,
        ),
    ] = None,
    max_parallel_transfers: Annotated[
        int | None,
        typer.Option(
            "--max-parallel-transfers",
            min=1,
            help="Experts read at a time; at least 8 from disk behind a GPU's host cache",
            show_default="4",
            rich_help_panel=_SETTINGS,
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            "--context",
            min=1,
            help="Tokens of prompt and answer to plan memory for",
            show_default="4096",
            rich_help_panel=_SETTINGS,
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            help="cpu, cuda, or auto: a GPU where there is one that will do",
            show_default="auto",
            rich_help_panel=_SETTINGS,
        ),
    ] = None,
    host_cache: Annotated[
        str | None,
        typer.Option(
            "--host-cache",
            help="Host memory for target experts of a run on a GPU, such as 24GB or 50%",
            show_default="all experts, or what fits",
            rich_help_panel=_SETTINGS,
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            help="Arithmetic: auto (as stored), bfloat16, float16 or float32",
            show_default="auto",
            rich_help_panel=_SETTINGS,
        ),
    ] = None,
    check: Annotated[
        str | None,
        typer.Option(
            "--check",
            help="Compare checksums: all (before the first token), first-use, or auto (all up to 4 GB)",
            rich_help_panel=_SETTINGS,
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option("--threads", min=0, help="Threads of the arithmetic; 0 chooses", rich_help_panel=_SETTINGS),
    ] = None,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0, help="0 takes the most likely token", rich_help_panel=_SAMPLING)
    ] = 0.0,
    top_p: Annotated[
        float,
        typer.Option("--top-p", help="Keep the likeliest tokens up to this probability", rich_help_panel=_SAMPLING),
    ] = 1.0,
    sample_top_k: Annotated[
        int,
        typer.Option(
            "--sample-top-k", min=0, help="Keep so many of the likeliest tokens; 0 keeps all", rich_help_panel=_SAMPLING
        ),
    ] = 0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of all random choices", rich_help_panel=_SAMPLING)] = 0,
    accept: Annotated[
        str,
        typer.Option(
            "--accept",
            help="coupled (text of a seed never depends on the draft) or rejection (more proposals accepted)",
            rich_help_panel=_SAMPLING,
        ),
    ] = "coupled",
    stats: Annotated[
        Path | None, typer.Option("--stats", help="Write all figures of the run to this JSON file")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the memory plan and stop")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a prompt on stdout")] = False,
) -> None:
    """Answer prompts: draft in INT4, fetch the experts that are coming, verify with the exact ones"""
    from moespeq_cli.run.ready import open_pack
    from runtime.config import make_settings
    from runtime.decode.sampling import SamplingSettings

    said = {
        "prefetch_window": prefetch_window,
        "verify_window": verify_window,
        "governor": governor,
        "speculate": False if no_speculate else None,
        "prefetch": prefetch,
        "eviction": eviction,
        "warm": warm,
        "expert_cache_size": expert_cache,
        "max_parallel_transfers": max_parallel_transfers,
        "context": context,
        "device": device,
        "host_cache_size": host_cache,
        "dtype": dtype,
        "check": check,
        "threads": threads,
    }
    settings = make_settings(config, said)
    sampling = SamplingSettings(temperature, top_p, sample_top_k, seed, accept)
    prompts = None if dry_run else _prompts(prompt, prompt_file, as_json, model is None and pack is None)
    opened = open_pack(pack, artifacts, model)
    if dry_run:
        _dry_run(opened, settings, as_json)
        return
    assert prompts is not None
    _answer(opened, settings, sampling, prompts, max_new_tokens, stop or [], raw, stats, as_json)


def _prompts(texts: list[str] | None, file: str | None, as_json: bool, embedded: bool) -> Iterator[Prompt]:
    from moespeq_cli.run import prompts
    from runtime.errors import InputError

    if texts is not None and file is not None:
        raise InputError(expected="--prompt or --prompt-file", found="both", mend="leave one of them out")
    if texts is not None:
        return iter([prompts.Prompt(text) for text in texts])
    if file is not None:
        return prompts.from_file(file)
    if prompts.stdin_offers_prompts(wait=as_json):
        return prompts.from_file("-")
    if as_json or not embedded:
        raise InputError(
            expected="a prompt", found="none", mend="pass --prompt, --prompt-file, or JSONL on standard input"
        )
    console.note(f"no prompt given; an example: {EXAMPLE}")
    return iter([prompts.Prompt(EXAMPLE)])


def _print_plan(plan: MemoryPlan) -> None:
    lines = plan.lines()
    width = max(len(name) for name, _ in lines)
    for name, amount in lines:
        console.note(f"  {name:<{width}}  {amount}")


def _dry_run(pack: Pack, settings: RunSettings, as_json: bool) -> None:
    import dataclasses

    from runtime.opening import choose_device, plan_on

    plan = plan_on(choose_device(pack, settings), pack, settings)
    if as_json:
        console.emit({"path": str(pack.folder), **dataclasses.asdict(plan)}, as_json=True)
        return
    for name, amount in plan.lines():
        console.write(f"{name}: {amount}\n")


def _answer(
    pack: Pack,
    settings: RunSettings,
    sampling: Any,
    prompts: Iterator[Prompt],
    max_new_tokens: int,
    stop: list[str],
    raw: bool,
    stats: Path | None,
    as_json: bool,
) -> None:
    from moespeq_cli.run import output
    from moespeq_cli.run.session import Session, answer_all, declared_stop_ids
    from runtime.model.tokenizer import load_tokenizer
    from runtime.opening import choose_device, open_engine, plan_on

    output.prepare_stdout()
    device = choose_device(pack, settings)
    plan = plan_on(device, pack, settings)
    console.note(f"{pack.folder} ({pack.spec.model_type}, {pack.spec.num_records} experts) on {device.name}")
    if device.refused is not None:
        console.note(f"the GPU is left alone: {device.refused}")
    if settings.host_cache_size is not None and not device.is_gpu:
        console.note("--host-cache is for runs on a GPU and changes nothing here; --expert-cache bounds the memory")
    _print_plan(plan)
    if stats is not None:
        output.claim_figures(stats)
    tokenizer = load_tokenizer(pack.config_folder)
    results: list[dict[str, Any]] = []
    filled = plan.host_slots >= pack.spec.num_records  # minutes for a large model
    with console.progress("experts", plan.host_slots) if filled else nullcontext() as bar:
        engine = open_engine(device, pack, settings, plan, done=lambda _: bar.advance() if bar else None)
    with engine:
        session = Session(engine, tokenizer, sampling, max_new_tokens, stop, raw, declared_stop_ids(pack, tokenizer))

        def done(result: dict[str, Any]) -> None:
            results.append(result)
            if as_json:
                output.write_result(result)
            else:
                console.write("\n")

        piece = (lambda text: None) if as_json else console.write
        refused = answer_all(session, prompts, piece, done, go_on=as_json)
        if not results:
            console.note("no prompts came in")
        report = engine.report() | {"finished": True, "results": results}
        if report.get("slow_decode") is not None:
            console.note(
                f"residual records were decoded by NumPy, some twenty times slower than compiled code: "
                f"{report['slow_decode']}"
            )
    if stats is not None:
        output.write_figures(stats, report)
    _summarise(report)
    if refused:
        console.note(f"{refused} of {len(results)} prompts could not be answered; their results say why")
        raise typer.Exit(1)


def _summarise(report: dict[str, Any]) -> None:
    if not report["new_tokens"]:
        return
    cache = report["expert_cache"]

    def percent(value: float | None) -> str:
        return "n/a" if value is None else f"{value:.1%}"

    console.note(
        f"{report['new_tokens']} tokens, {report['ms_per_token']:.1f} ms a token; "
        f"draft right {percent(report['acceptance'])}, its experts {percent(report['routing_agreement'])}; "
        f"cache hits {percent(cache['hit_rate'])}, {report['prefill_read_bytes'] / 1e6:.2f} MB read for prompts "
        f"and {report['bytes_per_token'] / 1e6:.2f} MB a token, "
        f"waited {cache['wait_s']:.2f} s"
    )
