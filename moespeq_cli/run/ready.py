"""The pack that a run needs: the one that is there, or the embedded model's, made on the spot."""

from __future__ import annotations

from pathlib import Path

from moespeq_cli import console
from runtime.artifacts.manifest import is_finished, require_same_model
from runtime.artifacts.pack import Pack
from runtime.errors import ArtifactError


def open_pack(pack: Path | None, artifacts: Path, model: str | None) -> Pack:
    """Open the pack to run.

    Args:
        pack: where the user says it is.
        artifacts: where it is otherwise (`pack/` in there).
        model: the model it must be of, where the user names one.

    Raises:
        ArtifactError: there is none, it is unfinished or damaged.
        InputError: it is of another model.
    """
    folder = pack if pack is not None else artifacts / "pack"
    if not is_finished(folder) and pack is None:
        if model is not None:
            raise ArtifactError(
                expected=f"a pack of {model} in {folder}",
                found="none",
                mend=f"run `moespeq quantize --model {model}` and `moespeq pack --model {model}` first",
            )
        _make_embedded(artifacts)
    opened = Pack.open(folder)
    if model is not None:
        from runtime.artifacts.checkpoint import Checkpoint

        require_same_model("pack", folder, opened.manifest.model_digest, Checkpoint.open(model).digest)
    return opened


def _make_embedded(artifacts: Path) -> None:
    """Quantise and pack the embedded model with the defaults of those commands."""
    from moespeq_cli.pack.command import pack
    from moespeq_cli.quantize.command import quantize

    console.note(f"no pack in {artifacts / 'pack'}: making one of the embedded demo model first")
    with console.stdout_to_stderr():
        if not is_finished(artifacts / "quantized"):
            quantize(artifacts=artifacts)
        pack(artifacts=artifacts)
