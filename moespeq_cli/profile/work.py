"""What a profile has measured so far, on disk, so that a stopped one goes on where it was."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from moespeq_cli.quantize.folder import save_tensors
from runtime.artifacts.folder import write_guard
from runtime.artifacts.manifest import PROGRESS, Journal, read_json
from runtime.errors import ArtifactError

FOLDER = "work"


class Work:
    """A folder with a journal: each step is marked when its tensors are on disk.

    Attributes:
        keep_inputs: of how many first sequences every layer's inputs stay, for the backward pass.
    """

    def __init__(self, folder: Path, settings: dict[str, str], keep_inputs: int) -> None:
        """Begin, or go on.

        Raises:
            ArtifactError: the folder holds work begun with other settings.
        """
        with write_guard("unfinished work", folder):
            folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.keep_inputs = keep_inputs
        self.journal = Journal(folder, settings)

    def last_done(self, step: str) -> int | None:
        """The greatest number n of which `step n` is marked."""
        return max(self.numbers(step), default=None)

    def numbers(self, step: str) -> list[int]:
        """Every number n of which `step n` is marked."""
        return [int(name.rpartition(" ")[2]) for name in self.journal.done if name.rpartition(" ")[0] == step]

    def save(self, step: str, number: int, tensors: dict[str, Tensor], **record: object) -> None:
        """Write the tensors of a step and mark it."""
        save_tensors(self._file(step, number), {name: tensor.contiguous() for name, tensor in tensors.items()})
        self.journal.mark(f"{step} {number}", record)

    def load(self, step: str, number: int) -> dict[str, Tensor]:
        """The tensors of a marked step, in memory of their own.

        Raises:
            ArtifactError: the file is gone.
        """
        path = self._file(step, number)
        if not path.is_file():
            raise ArtifactError(expected=f"{path} of the stopped run", found="no such file", mend="start over: --force")
        return {name: tensor.clone() for name, tensor in load_file(path).items()}

    def reader(self, step: str, number: int) -> Callable[[int], Tensor]:
        """Reads `load(step, number)` tensor by tensor: those named 000000, 000001 and so on."""
        handle: Any = safe_open(self._file(step, number), framework="pt")

        def read(place: int) -> Tensor:
            tensor: Tensor = handle.get_tensor(f"{place:06d}")
            return tensor

        return read

    def drop(self, step: str, number: int) -> None:
        """Remove the file of a step that nothing needs any more; its mark stays."""
        self._file(step, number).unlink(missing_ok=True)

    def remove(self) -> None:
        """Forget all of it."""
        remove(self.folder)

    # What `measure` keeps between layers.

    def resume(self) -> tuple[int, dict[str, Tensor]] | None:
        """How many layers are done, and what was kept after them; None at the start."""
        done = self.last_done("forward")
        return None if done is None else (done, self.load("forward", done))

    def inputs(self, layer_id: int, target: list[Tensor]) -> None:
        """Keep what the backward pass needs: the states before a layer (or, past the last, before the head)."""
        if self.keep_inputs:
            tensors = {f"{place:06d}": states for place, states in enumerate(target[: self.keep_inputs])}
            self.save("inputs", layer_id, tensors)

    def keep(self, layers_done: int, tensors: dict[str, Tensor]) -> None:
        """Keep what goes on after so many layers."""
        self.save("forward", layers_done, tensors)
        self.drop("forward", layers_done - 1)

    def _file(self, step: str, number: int) -> Path:
        return self.folder / f"{step.replace(' ', '-')}-{number:05d}.safetensors"


def begun_with(folder: Path, settings: dict[str, str]) -> bool:
    """Whether the folder holds unfinished work of these settings."""
    if not (folder / PROGRESS).is_file():
        return False
    try:
        body = read_json(folder / PROGRESS, "a progress file")
    except ArtifactError:
        return False
    return isinstance(body, dict) and body.get("settings") == settings


def remove(folder: Path) -> None:
    """Remove unfinished work, the journal last, so that what a kill leaves is still known for what it is."""
    if folder.is_dir():
        with write_guard("unfinished work", folder):
            for path in sorted(folder.iterdir(), key=lambda path: path.name == PROGRESS):
                path.unlink()
            shutil.rmtree(folder)
