from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from moespeq_cli.demo import checkpoint_path
from runtime.artifacts.pack import Pack
from tests.decode.packs import build
from tests.decode.scripted import save_scripted
from tests.pack.fixtures import make_pack, save_quantized

torch.set_num_threads(1)

PackOf = Callable[[str, torch.dtype], Pack]


@pytest.fixture(scope="session")
def pack_of(tmp_path_factory: pytest.TempPathFactory) -> PackOf:
    """Packs by family and type, each made once."""
    made: dict[tuple[str, torch.dtype], Pack] = {}

    def pack(kind: str, dtype: torch.dtype) -> Pack:
        if (kind, dtype) not in made:
            made[kind, dtype] = build(tmp_path_factory.mktemp(kind), kind, dtype)
        return made[kind, dtype]

    return pack


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    """Sixteen experts a layer, top-2 (H12)."""
    return build(tmp_path_factory.mktemp("wide"), num_experts=16)


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    """A model that counts: byte t is followed by t + 1, from 199 on by 258, which ends the text as 257 does."""
    chain = {t: t + 1 for t in range(199)} | {199: 258, 258: 100, 257: 50}
    return save_scripted(tmp_path_factory.mktemp("scripted"), chain, eos_token_id=[257, 258])


@pytest.fixture(scope="session")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    """The embedded model with round-to-nearest INT4 experts."""
    folder: Path = tmp_path_factory.mktemp("embedded")
    return make_pack(checkpoint_path(), save_quantized(checkpoint_path(), folder / "quantized"), folder / "pack")
