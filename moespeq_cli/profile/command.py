"""The command `moespeq profile`."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moespeq_cli import console, options

if TYPE_CHECKING:
    from moespeq_cli.profile.build import ProfileJob
    from runtime.artifacts.profile import Profile


class Arithmetic(enum.StrEnum):
    """In what the hidden states are computed."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    MODEL = "model"


def profile(
    model: options.Model = None,
    artifacts: options.Artifacts = options.DEFAULT_ARTIFACTS,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder to write to", show_default="profile/ in the artifacts folder")
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            metavar="[NAME=]FILE",
            help="Texts to route, JSONL or plain; repeat it for several domains; held-out takes the embedded "
            "evaluation texts",
            show_default="the embedded calibration texts",
        ),
    ] = None,
    samples: Annotated[
        int, typer.Option("--samples", min=1, help="Number of sequences, divided evenly among the domains")
    ] = 48,
    seq_len: Annotated[
        int | None, typer.Option("--seq-len", min=1, help="Tokens of a sequence at most", show_default="512")
    ] = None,
    quantized: Annotated[
        str | None,
        typer.Option(
            "--quantized",
            metavar="DIR|none",
            help="Draft to compare with",
            show_default="quantized/ in the artifacts folder, if it is of this model",
        ),
    ] = None,
    dtype: Annotated[
        Arithmetic, typer.Option("--dtype", help="Type of the arithmetic; 'model' is that of the weights")
    ] = Arithmetic.FLOAT32,
    trace_tokens: Annotated[
        int, typer.Option("--trace-tokens", min=0, help="Tokens whose choices are recorded for replaying caches")
    ] = 16384,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
    force: options.Force = False,
) -> None:
    """Count which experts a model uses on given texts, and how well the draft foresees them"""
    from moespeq_cli.profile.build import STORED, ProfileJob, build, find_identical, open_draft
    from moespeq_cli.profile.texts import read_domains
    from moespeq_cli.quantize.calibrate import choose_seq_len
    from runtime.artifacts.checkpoint import Checkpoint
    from runtime.model.families import describe
    from runtime.model.loader import require_supported
    from runtime.model.tokenizer import load_tokenizer

    checkpoint = Checkpoint.open(options.model_folder(model))
    spec = describe(checkpoint)
    require_supported(checkpoint, spec)
    length = choose_seq_len(seq_len, checkpoint.config.get("max_position_embeddings"))
    source, sequences = read_domains(
        data or [], load_tokenizer(checkpoint.folder), samples, length, int(checkpoint.config["vocab_size"])
    )
    draft = None
    if quantized != "none":
        draft = open_draft(Path(quantized) if quantized else None, artifacts / "quantized", checkpoint.digest)
    arithmetic = STORED[spec.dtype] if dtype is Arithmetic.MODEL else dtype.value
    job = ProfileJob(checkpoint, spec, sequences, source, draft, arithmetic, trace_tokens)
    place = out or artifacts / "profile"
    if dry_run:
        from moespeq_cli.estimate import estimate_profile

        tokens, passes = sum(job.domains().values()), 1 if draft is None else 2
        estimate = estimate_profile(checkpoint, spec, tokens, job.activation_bytes(), job.data_bytes(), passes)
        _announce(job, place)
        for line in estimate.lines():
            console.note(line)
        console.emit(estimate.as_json(place), as_json)
        return
    made = find_identical(place, job, force)
    if made is not None:
        console.note(f"{place} holds this profile already; nothing to do (--force makes it again)")
    else:
        _announce(job, place)
        made = build(job, place)
    _tell(made)
    console.emit(_result(made) if as_json else place, as_json)


def _announce(job: ProfileJob, place: Path) -> None:
    from runtime.memory.sizes import format_size

    tokens = job.domains()
    console.note(
        f"profiling {job.spec.model_type}, {len(job.spec.moe_layers)} layers with {job.spec.num_experts} experts, on "
        f"{sum(tokens.values())} tokens in {len(job.sequences)} sequences "
        f"({', '.join(f'{name} {count}' for name, count in tokens.items())}; {job.text_source})"
    )
    draft = (
        f"the draft in {job.quantized.folder}" if job.quantized is not None else "no draft (moespeq quantize makes one)"
    )
    layer_bytes = job.spec.num_experts * job.spec.expert_parameters * (2 + 4)
    console.note(
        f"compared with {draft}; {job.dtype} arithmetic; one layer in memory, about {format_size(layer_bytes)}, and "
        f"{format_size(job.activation_bytes())} of hidden states; to {place}"
    )


def _tell(made: Profile) -> None:
    from moespeq_cli.profile.charts import percent

    draft = made.manifest.draft
    for place, name in enumerate(made.manifest.domain_names):
        kept = percent(float(made.tensors["kept_from_previous"][place].mean()))
        line = f"{name}: {made.manifest.domains[name]} tokens, {kept} of the experts kept from token to token"
        if draft is not None:
            line += (
                f", routing agreement {percent(draft.agreement[name])}, same greedy token {percent(draft.greedy[name])}"
            )
        console.note(line)
    console.note(f"report: {made.folder / 'report.html'}")


def _result(made: Profile) -> dict[str, object]:
    manifest, draft = made.manifest, made.manifest.draft
    return {
        "path": str(made.folder),
        "report": str(made.folder / "report.html"),
        "domains": manifest.domains,
        "sequences": manifest.sequences,
        "moe_layers": list(manifest.moe_layers),
        "routing_agreement": None if draft is None else draft.agreement,
        "routing_agreement_next_layer": None if draft is None else draft.agreement_next,
        "greedy_agreement": None if draft is None else draft.greedy,
        "sampled_acceptance": None if draft is None else draft.overlap,
    }
