"""Tiny random models and a byte tokenizer, made on the spot: the fixtures of `hard_cases`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

KINDS = (
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "phimoe",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "gpt_oss",
    "granitemoe",
    "minimax_m2",
)
"""What each stage is tested with on its own; tests/families runs them through all of them."""
MORE = ("ernie4_5_moe", "exaone_moe", "afmoe", "granitemoeshared")
"""Families of the table in runtime/model/families.py besides."""
UNLISTED = ("dots1", "hunyuan_v1_moe")
"""Families that no table knows, made of the library's fused experts."""
VOCAB = 260
BOS, EOS, PAD = 256, 257, 259

_SPECIFIC: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8, "sliding_window": None},
    "qwen2_moe": {"num_experts": 8, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 48},
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 64},
    "olmoe": {"num_experts": 8},
    "phimoe": {"num_local_experts": 8, "sliding_window": None},
    "deepseek_v2": {
        "n_routed_experts": 8, "moe_intermediate_size": 64, "n_shared_experts": 2, "kv_lora_rank": 16,
        "q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
        "first_k_dense_replace": 1, "num_hidden_layers": 3, "n_group": 1, "topk_group": 1, "topk_method": "greedy",
    },
    "deepseek_v3": {
        "n_routed_experts": 8, "moe_intermediate_size": 64, "n_shared_experts": 1, "kv_lora_rank": 16,
        "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
        "first_k_dense_replace": 1, "num_hidden_layers": 3, "n_group": 2, "topk_group": 1,
    },
    "glm4_moe": {
        "n_routed_experts": 8, "moe_intermediate_size": 64, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "num_hidden_layers": 3, "n_group": 1, "topk_group": 1,
    },
    "gpt_oss": {"num_local_experts": 8, "intermediate_size": 64, "sliding_window": 16},
    "granitemoe": {"num_local_experts": 8},
    "minimax_m2": {"num_local_experts": 8},
    "ernie4_5_moe": {
        "moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 64, "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1, "moe_layer_end_index": 2, "moe_layer_interval": 1, "num_hidden_layers": 3,
    },
    "exaone_moe": {
        "num_experts": 8, "moe_intermediate_size": 64, "num_shared_experts": 1, "n_group": 1, "topk_group": 1,
        "num_hidden_layers": 3, "first_k_dense_replace": 1, "sliding_window": 8,
    },
    "afmoe": {
        "num_experts": 8, "moe_intermediate_size": 64, "num_shared_experts": 1, "num_dense_layers": 1, "n_group": 1,
        "topk_group": 1, "num_hidden_layers": 3, "sliding_window": 8,
    },
    "granitemoeshared": {"num_local_experts": 8, "shared_intermediate_size": 48},
    "dots1": {
        "n_routed_experts": 8, "moe_intermediate_size": 64, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "num_hidden_layers": 3, "n_group": 1, "topk_group": 1,
    },
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 2},
    "qwen3_next": {
        "num_experts": 8, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 48, "num_hidden_layers": 4,
    },
}  # fmt: skip


def make_config(kind: str, **overrides: Any) -> Any:
    """The configuration of a tiny model of a family; `overrides` win."""
    from transformers import AutoConfig

    settings: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
        "num_experts_per_tok": 2, "initializer_range": 0.3, "tie_word_embeddings": False,
        "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD,
    }  # fmt: skip
    if kind in ("deepseek_v2", "deepseek_v3"):
        del settings["head_dim"]
        settings["num_key_value_heads"] = 4
    settings |= _SPECIFIC[kind] | overrides
    return AutoConfig.for_model(kind, **settings)


def make_model(kind: str, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """A random model of a family."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(make_config(kind, **overrides)).eval()
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(7 + 0.2 * torch.rand(buffer.shape))
        for name, parameter in model.named_parameters():
            if "expert" in name or "gate" in name or "router" in name:
                parameter.normal_(0, 0.3 if "bias" not in name else 0.1)
    return model.to(dtype) if dtype != torch.float32 else model


def save_model(model: Any, folder: Path) -> Path:
    """Save a model with the byte tokenizer beside it."""
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_tiny(kind: str, folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    """A random model of a family on disk, as the library writes it."""
    return save_model(make_model(kind, seed, dtype, **overrides), folder)


def byte_symbols() -> list[str]:
    """The 256 printable symbols of byte-level BPE, by byte value."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    table = {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [table[byte] for byte in range(256)]


def save_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer without merges: one id a byte, an emoji is four."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    specials = ["<bos>", "<eos>", "<end>", "<pad>"]
    vocabulary = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
    vocabulary |= {special: 256 + i for i, special in enumerate(specials)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>",
        "model_max_length": 128, "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
