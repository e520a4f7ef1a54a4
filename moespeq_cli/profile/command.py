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


_TUNING = "Tuning of a run by a finished profile"


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
        int,
        typer.Option(
            "--samples", min=1, max=options.MOST_SAMPLES, help="Number of sequences, divided evenly among the domains"
        ),
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
    sensitivity_tokens: Annotated[
        int,
        typer.Option(
            "--sensitivity-tokens",
            min=0,
            help="Tokens at most on which the loss is differentiated to find what rounding hurts; 0 leaves it out",
        ),
    ] = 8192,
    probe_tokens: Annotated[
        int,
        typer.Option(
            "--probe-tokens",
            min=0,
            help="Tokens at most on which one class of linears at a time is rounded to 8 and 4 bits and compared; 0 "
            "leaves it out",
        ),
    ] = 0,
    probe_problems: Annotated[
        int,
        typer.Option(
            "--probe-problems",
            min=0,
            max=500,
            help="Embedded problems to answer with each class rounded; the embedded model only",
        ),
    ] = 0,
    device: Annotated[
        str, typer.Option("--device", help="Where the layers compute, one at a time: auto, cpu, cuda")
    ] = "auto",
    tune: Annotated[
        bool,
        typer.Option(
            "--tune",
            help="Measure nothing; replay the routing that a finished profile recorded and write the best settings of "
            "eviction and window as a deployment profile",
            rich_help_panel=_TUNING,
        ),
    ] = False,
    tune_cache: Annotated[
        str,
        typer.Option("--tune-cache", help="Expert cache to tune for, such as 25% or 12GB", rich_help_panel=_TUNING),
    ] = "25%",
    tune_out: Annotated[
        Path | None,
        typer.Option(
            "--tune-out",
            help="YAML file to write",
            show_default="tuned.yaml in the artifacts folder",
            rich_help_panel=_TUNING,
        ),
    ] = None,
    pack: Annotated[
        Path | None,
        typer.Option(
            "--pack",
            help="Pack whose record sizes count",
            show_default="pack/ in the artifacts folder, if it is of this model; else all experts are alike",
            rich_help_panel=_TUNING,
        ),
    ] = None,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
    force: options.Force = False,
) -> None:
    """Measure which experts a model uses, how well the draft foresees them, and what rounding would hurt"""
    if tune:
        _tune(
            out or artifacts / "profile",
            tune_cache,
            tune_out or artifacts / "tuned.yaml",
            pack,
            artifacts,
            as_json,
            force,
        )
        return
    from moespeq_cli.device import pick_device
    from moespeq_cli.profile.build import STORED, ProfileJob, build, find_identical, open_draft
    from moespeq_cli.profile.texts import read_domains
    from moespeq_cli.quantize.calibrate import choose_seq_len
    from runtime.artifacts.checkpoint import Checkpoint
    from runtime.model.families import describe
    from runtime.model.loader import require_supported
    from runtime.model.tokenizer import load_tokenizer

    place_to_compute = pick_device(device)
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
    if probe_problems:
        _require_embedded(checkpoint.digest, probe_tokens)
    job = ProfileJob(
        checkpoint,
        spec,
        sequences,
        source,
        draft,
        arithmetic,
        trace_tokens,
        sensitivity_tokens,
        probe_tokens,
        probe_problems,
        place_to_compute,
    )
    place = out or artifacts / "profile"
    if dry_run:
        from moespeq_cli.profile.plan import estimate_profile

        estimate = estimate_profile(job)
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
        try:
            made = build(job, place, force)
        except KeyboardInterrupt:
            console.note(f"finished layers are kept in {place}; repeat the command, without --force, to go on")
            raise
    _tell(made)
    console.emit(_result(made) if as_json else place, as_json)


def _tune(
    place: Path, cache: str, target: Path, pack: Path | None, artifacts: Path, as_json: bool, force: bool
) -> None:
    import dataclasses

    from moespeq_cli.profile import tune
    from runtime.artifacts.profile import Profile
    from runtime.errors import InputError

    profile = Profile.open(place, verify=True)
    if target.exists() and not force:
        raise InputError(
            expected=f"no file at {target}", found="one", mend="pass --force to replace it, or another --tune-out"
        )
    sizes = _record_sizes(profile, pack, artifacts)
    with console.progress("replays", tune.num_replays()) as bar:
        found = tune.tune(profile, cache, sizes, bar.advance)
    for line in tune.lines(found):
        console.note(line)
    tune.write_yaml(found, target, f"{profile.manifest.model_type}, digest {profile.manifest.model_digest[:16]}")
    body = dataclasses.asdict(found) | {"grid": [[*point, size] for point, size in found.grid.items()]}
    console.emit({"path": str(target), **body} if as_json else target, as_json)


def _record_sizes(profile: Profile, pack: Path | None, artifacts: Path) -> dict[tuple[int, int], int] | None:
    from runtime.artifacts.manifest import is_finished, require_same_model
    from runtime.artifacts.pack import Pack

    folder = pack or artifacts / "pack"
    if pack is None and not is_finished(folder):
        return None
    opened = Pack.open(folder)
    if pack is not None:
        require_same_model("pack", folder, opened.manifest.model_digest, profile.manifest.model_digest)
    if opened.manifest.model_digest != profile.manifest.model_digest:
        console.note(f"{folder} is of another model: all experts count alike")
        return None
    return {key: place.padded_bytes for key, place in opened.target_locations().items()}


def _require_embedded(digest: str, probe_tokens: int) -> None:
    from runtime.artifacts.checkpoint import Checkpoint
    from runtime.errors import InputError

    embedded = Checkpoint.open(options.model_folder(None)).digest
    if digest != embedded:
        raise InputError(
            expected="--probe-problems with the embedded model, which was trained on such problems",
            found="another model",
            mend="leave --probe-problems out; --probe-tokens measures routing, logits and loss of any model",
        )
    if not probe_tokens:
        raise InputError(
            expected="--probe-tokens with --probe-problems", found="--probe-tokens 0", mend="pass --probe-tokens 8192"
        )


def _announce(job: ProfileJob, place: Path) -> None:
    from moespeq_cli.profile.plan import ProfilePlan
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
    console.note(
        f"compared with {draft}; {job.dtype} arithmetic on {job.device.type}; one layer in memory, at most "
        f"{format_size(ProfilePlan(job).peak_memory_bytes())} with all else, {format_size(job.activation_bytes())} of "
        f"them hidden states (estimated); to {place}"
    )
    if job.num_backward:
        console.note(f"sensitivity by a backward pass over the first {job.num_backward} sequences, in float32")


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
    if made.manifest.sensitivity is not None:
        scores = _layer_scores(made)
        order = sorted(scores, key=lambda layer: (-scores[layer], layer))
        more = " ..." if len(order) > 8 else ""
        console.note(f"layers by what rounding their experts hurts: {', '.join(map(str, order[:8]))}{more}")
    console.note(f"report: {made.folder / 'report.html'}")


def _layer_scores(made: Profile) -> dict[int, float]:
    sensitivity = made.sensitivity()
    return {layer: sensitivity.experts_of(layer) for layer in made.manifest.moe_layers}


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
        "sensitivity_by_layer": None
        if manifest.sensitivity is None
        else {str(layer): score for layer, score in _layer_scores(made).items()},
    }
