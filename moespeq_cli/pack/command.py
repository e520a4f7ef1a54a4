"""`moespeq pack`: parse, call, print."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from moespeq_cli import console
from moespeq_cli.options import DEFAULT_ARTIFACTS, Artifacts, DryRun, Force, Json, Model, model_folder

Source = Annotated[
    Path | None,
    typer.Option("--quantized", help="Folder that quantize made", show_default="quantized in --artifacts"),
]
Profile = Annotated[
    Path | None,
    typer.Option(
        "--profile", help="Folder that profile made, for striping", show_default="profile in --artifacts, if there"
    ),
]
Out = Annotated[Path | None, typer.Option("--out", help="Where the pack goes", show_default="pack in --artifacts")]
Shards = Annotated[int, typer.Option("--shards", min=1, help="Files to spread the experts over, one a drive")]
Encoding = Annotated[
    str,
    typer.Option(
        "--encoding",
        help="How the exact experts are written: raw; residual, smaller, which GPUs from compute capability 9.0 on "
        "compute from; or auto: residual where this machine has such a GPU and the drafts are INT4, else raw",
    ),
]
Verify = Annotated[bool, typer.Option("--verify", help="Write nothing; read a pack again and compare all of it")]


def pack(
    model: Model = None,
    quantized: Source = None,
    profile: Profile = None,
    out: Out = None,
    artifacts: Artifacts = DEFAULT_ARTIFACTS,
    shards: Shards = 1,
    encoding: Encoding = "auto",
    verify: Verify = False,
    dry_run: DryRun = False,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Lay every expert out as one aligned record, exact and quantised side by side"""
    folder = out if out is not None else artifacts / "pack"
    if verify:
        found = quantized if quantized is not None else artifacts / "quantized"
        console.emit(_verify(folder, model, found if quantized is not None or found.is_dir() else None), as_json)
        return
    from runtime.artifacts.manifest import is_finished

    asked = profile is not None
    if profile is None and is_finished(artifacts / "profile"):
        profile = artifacts / "profile"
    elif profile is None and (artifacts / "profile").is_dir():
        console.note(f"{artifacts / 'profile'} is not finished: striping without it; repeat moespeq profile to use it")
    elif profile == Path("none"):
        profile = None
    source = quantized if quantized is not None else artifacts / "quantized"
    if dry_run:
        console.emit(_estimate(folder, model_folder(model), source, profile, shards, encoding), as_json)
        return
    console.emit(_build(folder, model_folder(model), source, profile, asked, shards, encoding, force), as_json)


def _build(
    folder: Path,
    model: str,
    quantized: Path,
    profile: Path | None,
    asked: bool,
    shards: int,
    encoding: str,
    force: bool,
) -> dict[str, Any]:
    from moespeq_cli.pack.build import REPORT, build_pack, find_finished
    from moespeq_cli.pack.plan import make_plan
    from moespeq_cli.pack.report import report_lines
    from runtime.artifacts.manifest import PROGRESS

    plan = make_plan(model, quantized, profile, folder, shards, encoding)
    manifest = None if force else find_finished(plan, any_profile=not asked)
    if manifest is not None:
        (folder / PROGRESS).unlink(missing_ok=True)  # a kill came between manifest and its removal
        striped = "" if manifest.profile_sha256 == plan.profile_sha256 else ", striped without this profile (--force)"
        console.note(f"{folder} is this pack already{striped}; nothing to do")
    else:
        for line in plan.lines():
            console.note(line)
        with console.progress("experts", plan.spec.num_records) as bar:
            manifest = build_pack(plan, force, bar.advance)
        report = json.loads((folder / REPORT).read_text(encoding="utf-8"))
        for line in report_lines(report):
            console.note(line)
    return {
        "path": str(folder),
        "encoding": manifest.encoding,
        "records": manifest.spec.num_records,
        "shards": manifest.num_shards,
        "target_bytes": sum(entry.size_bytes for name, entry in manifest.files.items() if name.startswith("target-")),
        "draft_bytes": plan.draft_bytes,
        "dense_bytes": plan.dense_bytes,
        "total_bytes": sum(entry.size_bytes for entry in manifest.files.values()),
    }


def _estimate(
    folder: Path, model: str, quantized: Path, profile: Path | None, shards: int, encoding: str
) -> dict[str, Any]:
    from moespeq_cli.estimate import RESIDUAL_WEIGHTS_PER_S, estimate_pack, seconds_each
    from moespeq_cli.pack.encode import encode_expert
    from moespeq_cli.pack.plan import make_plan
    from runtime.artifacts.encodings import RAW

    plan = make_plan(model, quantized, profile, folder, shards, encoding)
    keys, layouts = plan.spec.expert_keys(), plan.draft_layouts

    def encode(place: int) -> None:
        key = keys[place % len(keys)]
        encode_expert(plan, key, layouts[key[0]])

    encoded_s = plan.spec.expert_parameters / RESIDUAL_WEIGHTS_PER_S  # by code that is compiled when it is first used
    record_s = seconds_each(encode) if plan.encoding is RAW else encoded_s
    estimate = estimate_pack(plan.checkpoint, plan.spec, plan.total_bytes, plan.draft_bytes, record_s)
    for line in (*plan.lines(), *estimate.lines()):
        console.note(line)
    return estimate.as_json(folder)


def _verify(folder: Path, model: str | None, quantized: Path | None) -> dict[str, Any]:
    from moespeq_cli.pack.verify import find_sources, verify_pack
    from runtime.artifacts.pack import Pack
    from runtime.errors import ArtifactError
    from runtime.memory.sizes import format_size

    pack = Pack.open(folder)
    checkpoint, source = find_sources(pack, model_folder(model), model is not None, quantized)
    console.note(f"reading {pack.spec.num_records} experts and {len(pack.manifest.files)} files of {folder}")
    if checkpoint is None:
        console.note("not a pack of the embedded model: checksums only; pass --model to compare the weights")
    with console.progress("experts", pack.spec.num_records) as bar:
        found = verify_pack(pack, checkpoint, source, bar.advance)
    console.note(
        f"{found.files} files and {found.records} records, {format_size(found.bytes_read)}; "
        f"{found.residual_decoded} residual records decoded; equal to their sources: "
        f"{found.records_equal_to_source} target records, {found.dense_equal_to_source} dense tensors, "
        f"{found.drafts_equal_to_quantized} draft records"
    )
    if found.problems:
        for problem in found.problems:
            console.note(problem)
        raise ArtifactError(
            expected=f"an undamaged pack in {folder}",
            found=f"{len(found.problems)} faults, the first: {found.problems[0]}",
            mend="make the pack again with `moespeq pack --force`",
        )
    return {
        "path": str(folder),
        "files": found.files,
        "records": found.records,
        "bytes_read": found.bytes_read,
        "residual_decoded": found.residual_decoded,
        "records_equal_to_source": found.records_equal_to_source,
        "dense_equal_to_source": found.dense_equal_to_source,
        "drafts_equal_to_quantized": found.drafts_equal_to_quantized,
    }
