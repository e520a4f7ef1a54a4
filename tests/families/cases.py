"""One tiny model of a family with everything that the stages make of it, and the library's own model beside."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from moespeq_cli.quantize import gptq
from runtime.artifacts.checkpoint import Checkpoint
from runtime.artifacts.pack import Pack
from runtime.artifacts.quantized import Quantized
from runtime.model.families import MoeSpec, describe, to_disk_tensors
from tests.decode.packs import prompt_of
from tests.pack.fixtures import make_pack, save_quantized, unpack_layer
from tests.tiny import KINDS, MORE, UNLISTED, make_model, save_model

STEP = 2.0**-4
"""Every expert weight is a whole number of these from -8 to 7: what four bits can hold."""
WINDOWS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral with a window": ("mixtral", {"sliding_window": 8}),
    "qwen2_moe with a window": ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
}
"""Models whose attention ends a few tokens back; gpt_oss, exaone_moe and afmoe have it anyway."""
CASES = [*KINDS, *MORE, *UNLISTED, *WINDOWS]


@dataclass(frozen=True)
class Case:
    """Attributes: the model's folder, its quantized artifact, its pack, and transformers' model of the same weights."""

    model: Path
    quantized: Quantized
    pack: Pack
    library: Any

    @property
    def spec(self) -> MoeSpec:
        return self.pack.spec

    @torch.no_grad()
    def logits(self, tokens: Sequence[int]) -> Tensor:
        """The library's, [T, vocab_size]."""
        found: Tensor = self.library(torch.tensor([list(tokens)])).logits[0]
        return found

    def text(self, prompt: Sequence[int], count: int) -> list[int]:
        """The library's greedy continuation."""
        whole = self.library.generate(
            torch.tensor([list(prompt)]), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        return [int(token) for token in whole[0, len(prompt) :]]


def make_case(name: str, folder: Path) -> Case:
    """A random float32 model whose experts lie on the grid of four bits, quantised without loss and packed."""
    from transformers import AutoModelForCausalLM

    kind, overrides = WINDOWS.get(name, (name, {}))
    model = make_model(kind, **overrides)
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if path.endswith(("experts.gate_up_proj", "experts.down_proj")):
                weight.copy_((weight / STEP).round().clamp(-8, 7) * STEP)
    source = save_model(model, folder / "model")
    with pytest.MonkeyPatch.context() as patch:  # the largest weight of a group says nothing about its grid
        patch.setattr(gptq, "rtn_scales", lambda weights, size, bits: _steps(weights, size))
        save_quantized(source, folder / "quantized", group_size=16)  # torch's kernel for wider ones rounds to BF16
    pack = make_pack(source, folder / "quantized", folder / "pack")
    library = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    return Case(source, Quantized.open(folder / "quantized"), pack, library)


def _steps(weights: Tensor, size: int) -> Tensor:
    return torch.full((*weights.shape[:2], weights.shape[2] // size), STEP)


def unpack(case: Case, folder: Path) -> Path:
    """The Hugging Face folder that the records and the dense part of a pack hold."""
    shutil.copytree(case.pack.config_folder, folder)
    tensors = {name: case.pack.read_dense(name) for name in case.pack.dense_names()}
    for layer_id in case.spec.moe_layers:
        tensors |= to_disk_tensors(case.spec, layer_id, unpack_layer(case.pack, layer_id))
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, folder / "model.safetensors", {"format": "pt"})
    return folder


def source_of(case: Case) -> tuple[Checkpoint, MoeSpec]:
    """The model as the stages open it."""
    checkpoint = Checkpoint.open(case.model)
    return checkpoint, describe(checkpoint)


def texts() -> list[Tensor]:
    """Sequences shorter and longer than any window."""
    return [torch.tensor(prompt_of(length)) for length in (3, 17, 40)]
