"""A decoding pass can be recorded: the library's code in it makes nothing on the host and looks at nothing there."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from runtime.artifacts.checkpoint import Checkpoint
from runtime.gpu import rotary
from runtime.gpu.model import DeviceModel
from runtime.kernels.rows_reference import TorchRows
from runtime.model import loader
from runtime.model.families import dense_names, describe
from tests.gpu.test_rows_decoder import Experts
from tests.tiny import KINDS, MORE, make_model, save_model

CAPACITY = 64
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5],
    "long_factor": [8.0] * 8,
    "short_mscale": 1.1,
    "long_mscale": 1.3,
    "original_max_position_embeddings": CAPACITY,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    kind: (kind, {})
    for kind in (*KINDS, *MORE)
    if kind != "gpt_oss"  # whose attention has sinks: left to the CPU
} | {"phimoe as published": ("phimoe", {"rope_parameters": LONGROPE})}
ON_HOST = ("_local_scalar_dense", "nonzero", "lift_fresh")  # wait for the device, or come from the host's memory


class Bfloat16Experts(Experts):
    def compute(self, place: int, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return super().compute(place, hidden, top_k_index, top_k_weights).to(hidden.dtype)


class Watch(TorchDispatchMode):
    """Notes what cannot be recorded on a GPU, with the line that asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(op)
        made = not any(isinstance(leaf, Tensor) for leaf in torch.utils._pytree.tree_leaves((args, kwargs)))
        if made or any(part in name for part in ON_HOST):
            frames = [frame for frame in traceback.extract_stack()[:-1] if "/torch/" not in frame.filename]
            if not made or "/transformers/" in frames[-1].filename:
                self.found.append(f"{name} at {frames[-1].filename}:{frames[-1].lineno}")
        return op(*args, **kwargs)


def open_model(kind: str, folder: Path, changes: dict[str, Any]) -> DeviceModel:
    source = Checkpoint.open(save_model(make_model(kind, **changes), folder))
    spec = describe(source)
    names = dense_names(source, spec)
    return DeviceModel(source.folder, spec, source.read, names, torch.device("cpu"), CAPACITY, TorchRows())


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("name", CASES)
def test_a_pass_is_all_on_the_device(name: str, rows: int, tmp_path: Path) -> None:
    kind, changes = CASES[name]
    model = open_model(kind, tmp_path / "model", changes)
    watch = Watch()
    with watch:
        model.rows(torch.arange(rows), torch.arange(rows), CAPACITY, Bfloat16Experts(model.spec.top_k))
    assert watch.found == []


def test_what_cannot_be_recorded_is_seen() -> None:
    watch = Watch()
    with watch:
        torch.arange(3)  # here it is this project's own
        bool(torch.ones(()) > 0)
    assert len(watch.found) == 1 and "_local_scalar_dense" in watch.found[0]


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_positions_are_the_librarys_one_by_one(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotary, "_AT_ONCE", 24)
    kind, changes = CASES[name]
    model = open_model(kind, tmp_path / "model", changes)
    own = loader.build(tmp_path / "model", torch.bfloat16, model.spec, "sdpa").model.rotary_emb
    x = torch.zeros(1, 1, model.config.hidden_size, dtype=torch.bfloat16)
    places = torch.tensor([[0, 5, CAPACITY - 1, 5]])
    found = model.model.model.rotary_emb(x, position_ids=places)
    found = found if isinstance(found, tuple) else (found,)
    for row, place in enumerate(places[0].tolist()):
        want = own(x, position_ids=torch.tensor([[place]]))
        for one, other in zip(found, want if isinstance(want, tuple) else (want,), strict=True):
            assert torch.equal(one[:, row], other[:, 0])
