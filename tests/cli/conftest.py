from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from moespeq_cli.app import main
from runtime.artifacts.pack import Pack
from tests.decode.packs import build
from tests.decode.scripted import save_scripted

torch.set_num_threads(1)

TEXT = "😀 漢字z"
"""What the scripted model says after an A, followed by half a character and a stop id."""


@dataclass(frozen=True)
class Outcome:
    """Of one command."""

    status: int
    stdout: str
    stderr: str


Command = Callable[..., Outcome]


@pytest.fixture
def moespeq(capsys: pytest.CaptureFixture[str]) -> Command:
    """The command line in this process: arguments in; exit status, stdout and stderr out."""

    def call(*arguments: object) -> Outcome:
        capsys.readouterr()
        status = 0
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as end:
            status = int(end.code or 0)
        out, err = capsys.readouterr()
        return Outcome(status, out, err)

    return call


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    """A random model; its source is `model` beside the pack."""
    return build(tmp_path_factory.mktemp("tiny"), dtype=torch.bfloat16)


def save_talker(folder: Path, last: int, **overrides: Any) -> Pack:
    """A model that says TEXT, half a character and the token `last`, and would count from there."""
    said = [ord("A"), *TEXT.encode(), 0xC3, last, 0x30, 0x31, 0x32]
    return save_scripted(folder, dict(itertools.pairwise(said)), **overrides)


@pytest.fixture(scope="session")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    """A model whose stop id, 258, stands in the configuration."""
    return save_talker(tmp_path_factory.mktemp("talker"), 258, eos_token_id=258)
