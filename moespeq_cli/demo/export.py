"""The trained demo model as a transformers checkpoint, and a check that both compute the same."""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM

from moespeq_cli.demo.network import EXPERT_MODES, DemoModel, Shape

PAD_ID, BOS_ID, EOS_ID = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far the training model and the exported one are apart (relative differences of norms)."""

    gradients: float  # of dense and grouped experts, float32, the worst parameter
    logits: dict[str, float]  # "<mode> <dtype>": training model against transformers
    reload_identical: bool  # the saved checkpoint gives the logits of the model that was saved

    @property
    def close(self) -> bool:
        """Whether the differences are those of rounding."""
        limits = {"float32": 1e-5, "bfloat16": 2e-2}
        near = all(difference < limits[key.split()[1]] for key, difference in self.logits.items())
        return near and self.gradients < 1e-4 and self.reload_identical


def save_checkpoint(model: DemoModel, folder: Path, max_shard_size: str = "15MB") -> None:
    """Write configuration and weights in bfloat16; the tokenizer's files are written by `corpus tokenizer`."""
    exported = to_transformers(model)
    config = exported.generation_config
    config.pad_token_id, config.bos_token_id, config.eos_token_id = PAD_ID, BOS_ID, EOS_ID
    exported.save_pretrained(folder, max_shard_size=max_shard_size)


def to_transformers(model: DemoModel, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The same model as a `Qwen2MoeForCausalLM` whose weights have type `dtype`."""
    exported = Qwen2MoeForCausalLM(transformers_config(model.shape))
    state = transformers_state(model)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    exported.load_state_dict(state, strict=True)
    for parameter in exported.parameters():  # the weights only: the rotary frequencies stay float32
        parameter.data = parameter.data.to(dtype)
    return exported.eval()


def transformers_config(shape: Shape) -> Any:
    """The configuration that makes transformers build the same architecture."""
    sizes = asdict(shape)
    theta = sizes.pop("rope_theta")
    return Qwen2MoeConfig(
        **sizes,
        intermediate_size=4 * shape.hidden_size,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        norm_topk_prob=False,
        qkv_bias=True,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        hidden_act="silu",
        router_aux_loss_coef=0.001,
        output_router_logits=False,
        use_sliding_window=False,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        dtype="bfloat16",
    )


def transformers_state(model: DemoModel) -> dict[str, Tensor]:
    """The parameters under transformers' names."""
    state: dict[str, Tensor] = {
        "model.embed_tokens.weight": model.embed_tokens.weight,
        "model.norm.weight": model.norm.weight,
    }
    for layer_id, layer in enumerate(model.layers):
        for name, parameter in layer.named_parameters():
            state[f"model.layers.{layer_id}.{_transformers_name(name)}"] = parameter
    return {name: tensor.detach().cpu() for name, tensor in state.items()}


def check_agreement(shape: Shape | None = None, tokens: int = 200, seed: int = 0) -> Agreement:
    """Compare the training model with transformers, on random weights and random tokens on the CPU."""
    shape = shape or Shape()
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(EOS_ID + 1, shape.vocab_size, (2, tokens), generator=generator)
    models = {mode: DemoModel(shape, mode) for mode in EXPERT_MODES}
    with torch.no_grad():
        for parameter in models["dense"].parameters():  # so that biases and norms count too
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    models["grouped"].load_state_dict(models["dense"].state_dict())
    logits = {}
    for mode, model in models.items():
        for dtype in (torch.float32, torch.bfloat16):
            with torch.no_grad():
                ours, theirs = model.logits(ids, dtype), to_transformers(model, dtype)(ids).logits
            logits[f"{mode} {str(dtype).removeprefix('torch.')}"] = _relative(ours.float(), theirs.float())
    return Agreement(_gradient_difference(models["dense"], models["grouped"], ids), logits, _reloads(model, ids))


def _gradient_difference(one: DemoModel, other: DemoModel, ids: Tensor) -> float:
    for model in (one, other):
        losses = model(ids[:, :-1], ids[:, 1:], torch.float32)
        (losses.rows.mean() + losses.balance + losses.z).backward()
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(_relative(b.grad, a.grad) for a, b in pairs if a.grad is not None and b.grad is not None)


def _reloads(model: DemoModel, ids: Tensor) -> bool:
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        save_checkpoint(model, Path(folder))
        again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        return torch.equal(again(ids).logits, to_transformers(model)(ids).logits)


def _relative(value: Tensor, reference: Tensor) -> float:
    return float((value - reference).norm() / reference.norm().clamp_min(1e-12))


def _transformers_name(name: str) -> str:
    """`router` and the like, as transformers calls the parameter within a layer."""
    if name == "router":
        return "mlp.gate.weight"
    if name.startswith(("experts.", "shared_expert_gate")):
        return f"mlp.{name}"
    if name.startswith("shared_"):
        return name.replace("shared_", "mlp.shared_expert.", 1)
    return name if name.endswith("layernorm.weight") else f"self_attn.{name}"
