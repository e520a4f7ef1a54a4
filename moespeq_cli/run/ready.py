"""The pack that a run needs: the one that is there, or the embedded model's, made on the spot."""

from __future__ import annotations

from pathlib import Path

from moespeq_cli import console
from moespeq_cli.options import model_folder
from runtime.artifacts.checkpoint import Checkpoint
from runtime.artifacts.manifest import MANIFEST, PROGRESS, is_finished, read_json, require_same_model
from runtime.artifacts.pack import Pack
from runtime.errors import ArtifactError


def open_pack(pack: Path | None, artifacts: Path, model: str | None) -> Pack:
    """Open the pack to run.

    Args:
        pack: where the user says it is.
        artifacts: where it is otherwise (`pack/` in there). Where nothing of another model lies there, the embedded
            model is quantised and packed first.
        model: the model it must be of, where the user names one.

    Raises:
        ArtifactError: there is none, it is unfinished or damaged.
        InputError: it is of another model.
    """
    folder = pack if pack is not None else artifacts / "pack"
    if pack is None and not is_finished(folder) and not (folder / PROGRESS).is_file():
        _refuse_fallback(artifacts, folder, model)
        _make_embedded(artifacts)
    opened = Pack.open(folder)
    if model is not None:
        require_same_model("pack", folder, opened.manifest.model_digest, Checkpoint.open(model).digest)
    return opened


def _refuse_fallback(artifacts: Path, folder: Path, model: str | None) -> None:
    """The embedded model stands in only where the user has begun nothing else."""
    if model is not None:
        raise ArtifactError(
            expected=f"a pack of {model} in {folder}",
            found="none",
            mend=f"run `moespeq quantize --model {model}` and `moespeq pack --model {model}` first",
        )
    embedded = Checkpoint.open(model_folder(None)).digest
    for stage in ("quantized", "profile"):
        place = artifacts / stage
        body = read_json(place / MANIFEST, f"the {stage} manifest") if is_finished(place) else None
        if isinstance(body, dict) and body.get("model_digest") != embedded:
            raise ArtifactError(
                expected=f"a pack in {folder}",
                found=f"none, but a {stage} artifact of a {body.get('model_type')} model in {place}",
                mend="run `moespeq pack --model MODEL` for that model first, or pass another --artifacts",
            )


def _make_embedded(artifacts: Path) -> None:
    """Quantise and pack the embedded model with the defaults of those commands."""
    from moespeq_cli.pack.command import pack
    from moespeq_cli.quantize.command import quantize

    console.note(f"no pack in {artifacts / 'pack'}: making one of the embedded demo model first")
    with console.stdout_to_stderr():
        if not is_finished(artifacts / "quantized"):
            quantize(artifacts=artifacts)
        pack(artifacts=artifacts)
