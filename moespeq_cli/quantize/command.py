"""`moespeq quantize`: routed experts to INT4 or INT8 by GPTQ, all else bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moespeq_cli import console
from moespeq_cli.options import DEFAULT_ARTIFACTS, MOST_SAMPLES, Artifacts, DryRun, Force, Json, Model, model_folder
from runtime.errors import InputError


def quantize(
    model: Model = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder to make", show_default="ARTIFACTS/quantized")
    ] = None,
    artifacts: Artifacts = DEFAULT_ARTIFACTS,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data", help="Calibration text: JSONL with text or messages, or plain text", show_default="embedded"
        ),
    ] = None,
    samples: Annotated[
        int, typer.Option("--samples", min=1, max=MOST_SAMPLES, help="Sequences to calibrate with, at most")
    ] = 128,
    seq_len: Annotated[
        int | None,
        typer.Option(
            "--seq-len", min=1, help="Tokens in a sequence, at most", show_default="512, or the model's context"
        ),
    ] = None,
    bits: Annotated[int, typer.Option("--bits", help="Width of a code, 4 or 8")] = 4,
    group_size: Annotated[
        int, typer.Option("--group-size", help="Input channels that share a scale, -1 for all of them")
    ] = 128,
    sym: Annotated[bool, typer.Option("--sym/--no-sym", help="Symmetric scales, the only kind there is")] = True,
    damp_percent: Annotated[
        float, typer.Option("--damp-percent", help="First damping, as a share of the Hessian's mean diagonal")
    ] = 0.01,
    scale_search: Annotated[
        bool | None,
        typer.Option(
            "--scale-search/--no-scale-search",
            help="Search each group's clipping, or take its largest weight as auto-gptq does",
            show_default="search",
        ),
    ] = None,
    token_damping: Annotated[
        bool | None,
        typer.Option(
            "--token-damping/--no-token-damping",
            help="Damp more where an expert saw few tokens",
            show_default="yes, but not with --solver auto-gptq",
        ),
    ] = None,
    solver: Annotated[
        str, typer.Option("--solver", help="batched, or auto-gptq to drive that package's own")
    ] = "batched",
    method: Annotated[str, typer.Option("--method", help="gptq, or rtn to round to nearest for comparison")] = "gptq",
    min_tokens: Annotated[
        int, typer.Option("--min-tokens", min=1, help="Round an expert to nearest that saw fewer tokens")
    ] = 32,
    skip_modules: Annotated[
        str,
        typer.Option(
            "--skip-modules", help="What stays as it is; down_proj, or gate_proj,up_proj, or layers.N may be added"
        ),
    ] = "gate,attention,layernorm,shared_expert",
    sensitive_layers: Annotated[str, typer.Option("--sensitive-layers", help="Layers to keep finer, such as 0,3")] = "",
    sensitive_bits: Annotated[
        int, typer.Option("--sensitive-bits", help="Width of their codes, one scale an output channel")
    ] = 8,
    profile: Annotated[
        Path | None, typer.Option("--profile", help="Folder that profile made, to pick the sensitive layers by")
    ] = None,
    sensitive_share: Annotated[
        float | None,
        typer.Option(
            "--sensitive-share",
            help="Share of the layers with experts that --profile picks, rounded up to whole layers",
            show_default="0.1",
        ),
    ] = None,
    device: Annotated[
        str, typer.Option("--device", help="Where the layers and the solver compute: auto, cpu, cuda")
    ] = "auto",
    seed: Annotated[int, typer.Option("--seed", help="Chooses among more text than is wanted")] = 0,
    dry_run: DryRun = False,
    as_json: Json = False,
    force: Force = False,
) -> None:
    """Quantise the routed experts of a model, layer by layer, into a GPTQ folder"""
    if not sym:
        raise InputError(expected="--sym", found="--no-sym", mend="leave it out: only symmetric scales are supported")
    from moespeq_cli.quantize import build
    from moespeq_cli.quantize.plan import QuantizeOptions
    from moespeq_cli.quantize.report import sensitive_lines
    from runtime.artifacts.manifest import read_json

    options = QuantizeOptions(
        model=model_folder(model),
        out=out or artifacts / "quantized",
        data=data,
        samples=samples,
        seq_len=seq_len,
        bits=bits,
        group_size=group_size,
        damp_percent=damp_percent,
        scale_search=scale_search,
        token_damping=token_damping,
        solver=solver,
        method=method,
        skip_modules=_names(skip_modules),
        sensitive_layers=_numbers(sensitive_layers),
        sensitive_bits=sensitive_bits,
        profile=profile,
        sensitive_share=sensitive_share,
        min_tokens=min_tokens,
        seed=seed,
        device=device,
        force=force,
    )
    work = build.prepare(options)
    if dry_run:
        from moespeq_cli.estimate import estimate_quantize
        from moespeq_cli.quantize.plan import plan_lines

        plan, tokens = work.plan, work.sequences.tokens
        result_bytes = plan.dense_bytes + plan.quantized_bytes
        estimate = estimate_quantize(
            work.checkpoint, work.spec, tokens, plan.disk_bytes, result_bytes, method == "gptq"
        )
        for line in (*plan_lines(plan, options, work.sequences), *estimate.lines()):
            console.note(line)
        console.emit(estimate.as_json(options.out), as_json)
        return
    try:
        with console.progress("layers", work.spec.moe_layers[-1] + 1) as bar:
            manifest = build.quantize(options, console.note, bar.advance, work)
    except KeyboardInterrupt:
        console.note(f"finished layers are kept in {options.out}; repeat the command to go on")
        raise
    if manifest.rounded_linears and method == "gptq":
        console.note(
            f"{manifest.rounded_linears} of {manifest.quantized_linears} linears were rounded to nearest, for want of "
            f"tokens; {options.out / build.REPORT} lists their experts"
        )
    sensitive = None
    if work.options.sensitive_layers:
        sensitive = read_json(options.out / build.REPORT, "the report").get("sensitive")
        for line in sensitive_lines(sensitive) if sensitive is not None else ():  # older reports have none
            console.note(line)
    elif profile is not None:
        console.note(f"--sensitive-share {work.options.share:g} picks no layer")
    console.emit(
        {
            "path": str(options.out),
            "quantized_linears": manifest.quantized_linears,
            "kept_linears": manifest.kept_linears,
            "rounded_linears": manifest.rounded_linears,
            "mean_output_error": manifest.mean_output_error,
            "calibration_tokens": manifest.calibration.tokens,
            "bytes": sum(entry.size_bytes for entry in manifest.files.values()),
            "sensitive": sensitive,
        },
        as_json,
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for part in text.split(",") if (name := part.strip()))


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(name) for name in _names(text))
    except ValueError:
        raise InputError(
            expected="--sensitive-layers as numbers with commas between, such as 0,3",
            found=repr(text),
            mend="correct it",
        ) from None
