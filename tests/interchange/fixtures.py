"""GPTQ checkpoints as another program leaves them: no manifest, its own settings, more quantised than experts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from runtime.artifacts.checkpoint import Checkpoint
from runtime.artifacts.gptq_format import pack_linear, unpack_linear
from runtime.artifacts.quantized import PARTS
from tests.pack.fixtures import save_quantized

SETTINGS = {  # what GPTQModel 7.6.0 writes, less what it says of itself
    "bits": 4, "group_size": 32, "desc_act": False, "lm_head": False, "method": "gptq", "quant_method": "gptq",
    "format": "gptq", "checkpoint_format": "gptq", "pack_dtype": "int32", "sym": True,
    "meta": {"quantizer": ["gptqmodel:7.6.0"], "damp_percent": 0.05},
}  # fmt: skip
Change = Callable[[dict[str, Tensor]], None]


def save_foreign(model: Path, folder: Path, change: Change | None = None, **settings: object) -> Path:
    """The experts of a model rounded to INT4 and its attention too, as GPTQModel would save them.

    Args:
        model: the source.
        folder: where to save.
        change: alters the tensors before they are saved.
        settings: of the quantization_config, over `SETTINGS`.
    """
    ours = Checkpoint.open(save_quantized(model, folder.with_name(f"{folder.name}-ours")))
    tensors = {name: ours.read(name) for name in ours.tensors}
    if ours.config["model_type"] == "gpt_oss":
        _cut_in_halves(tensors)
    for name in [name for name in tensors if ".self_attn." in name and name.endswith("_proj.weight")]:
        codes, scales = _round(tensors.pop(name).float())
        linear = name.removesuffix(".weight")
        packed = pack_linear(codes, scales, torch.full_like(scales, 8, dtype=torch.int64), 4, 32)
        tensors |= {f"{linear}.{part}": tensor for part, tensor in packed.items()}
    if change is not None:
        change(tensors)
    folder.mkdir(parents=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    quantization = SETTINGS | settings
    (folder / "config.json").write_text(json.dumps(ours.config | {"quantization_config": quantization}))
    (folder / "quantize_config.json").write_text(json.dumps(quantization))
    return folder


def _cut_in_halves(tensors: dict[str, Tensor]) -> None:
    """GPTQModel cuts alternating gate and up rows in the middle."""
    for name in [name for name in tensors if name.endswith("gate_proj.qweight")]:
        linears = [name.removesuffix(".qweight"), name.removesuffix("gate_proj.qweight") + "up_proj"]
        rows = []
        for linear in linears:
            parts = {part: tensors[f"{linear}.{part}"] for part in PARTS}
            rows.append([*unpack_linear(parts, 4, 32), tensors[f"{linear}.bias"]])
        whole = [torch.stack(pair, dim=1).flatten(0, 1) for pair in zip(*rows, strict=True)]
        for linear, half in zip(linears, zip(*(part.chunk(2) for part in whole), strict=True), strict=True):
            codes, scales, zeros, bias = half
            packed = pack_linear(codes, scales, zeros.to(torch.int64), 4, 32)
            tensors |= {f"{linear}.{part}": tensor for part, tensor in packed.items()}
            tensors[f"{linear}.bias"] = bias.clone()


def _round(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of INT4 in groups of 32."""
    grouped = weight.reshape(weight.shape[0], -1, 32)
    scales = (grouped.abs().amax(-1) / 7).to(torch.float16)
    codes = (grouped / scales.float()[..., None]).round().clamp(-8, 7) + 8
    return codes.reshape(weight.shape).to(torch.uint8), scales
