"""Attention over latents: keys are the same whatever else a pass looks at. Windows: those of the library's masks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from runtime.gpu import attention
from runtime.gpu.model import LEAST_LENGTH
from tests.tiny import make_model


def test_latents_of_a_pass_are_expanded_in_products_of_one_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    attention.register()
    config = AutoConfig.for_model(
        "deepseek_v2", vocab_size=64, hidden_size=64, intermediate_size=96, moe_intermediate_size=32,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, n_routed_experts=4, num_experts_per_tok=2,
        kv_lora_rank=32, q_lora_rank=None, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention.NAME)
    here, expand = attention.install(model), model.model.layers[0].self_attn.kv_b_proj
    latents = torch.randn(1, 1, 4 * LEAST_LENGTH + 112, 32, dtype=torch.bfloat16)
    shapes: list[int] = []
    linear = F.linear

    def watched(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        shapes.append(x.shape[-2])
        return linear(x, *rest)

    monkeypatch.setattr(F, "linear", watched)
    here.rows(torch.tensor([3]), latents.shape[-2])
    with torch.no_grad():
        whole = expand(latents)
        assert shapes == [*[LEAST_LENGTH] * 4, 112]
        assert torch.equal(whole[:, :, :LEAST_LENGTH], expand(latents[:, :, :LEAST_LENGTH]))
        shapes.clear()
        here.block(0, latents.shape[-2])
        assert torch.allclose(expand(latents).float(), whole.float(), rtol=2e-2, atol=1e-2)
    assert shapes == [latents.shape[-2]]


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("mixtral", {}),
        ("phimoe", {}),
        ("qwen2_moe", {"use_sliding_window": True, "max_window_layers": 1}),
        ("qwen3_moe", {"use_sliding_window": True, "max_window_layers": 0}),
        ("exaone_moe", {}),
        ("afmoe", {}),
    ],
)
@torch.no_grad()
def test_a_window_is_the_librarys(kind: str, changes: dict[str, Any]) -> None:
    attention.register()
    model: Any = make_model(kind, sliding_window=5, **changes)
    ids = (torch.arange(16) * 7 % 250)[None]
    model.set_attn_implementation("eager")
    wanted = model(ids, use_cache=False).logits
    model.set_attn_implementation(attention.NAME)
    here = attention.install(model)
    here.block(0, 16)
    assert torch.allclose(model(ids, use_cache=False).logits, wanted, atol=1e-4)
    here.rows(torch.arange(16), 16)
    assert torch.allclose(model(ids, use_cache=False).logits, wanted, atol=1e-4)
