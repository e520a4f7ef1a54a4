"""The public configurations of the models that can be built, as transformers' own classes have them."""

from __future__ import annotations

from typing import Any

from runtime.errors import InputError

PAD_ID, BOS_ID, EOS_ID = 0, 1, 2  # of the embedded model's tokenizer, which the built models use
SPECIAL_IDS = (PAD_ID, BOS_ID, EOS_ID)
TEXT_IDS = 4096  # that tokenizer's size: ids from here on are of no text

_QWEN: dict[str, Any] = {
    "model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"], "vocab_size": 151936, "hidden_size": 2048,
    "intermediate_size": 5632, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
    "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 60,
    "num_experts_per_tok": 4, "norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "qkv_bias": True, "use_sliding_window": False,
    "max_window_layers": 21, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}  # fmt: skip
_DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "vocab_size": 102400, "hidden_size": 2048,
    "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16,
    "num_key_value_heads": 16, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
    "first_k_dense_replace": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.0, "topk_method": "greedy",
    "n_group": 1, "topk_group": 1, "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "max_position_embeddings": 163840, "rms_norm_eps": 1e-6,
    "attention_bias": False, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 4096,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.707, "mscale_all_dim": 0.707,
    },
}  # fmt: skip
# The published factors for contexts beyond 4096 tokens are left out: they change no tensor, only rotary angles.
_PHI: dict[str, Any] = {
    "model_type": "phimoe", "architectures": ["PhimoeForCausalLM"], "vocab_size": 32064, "hidden_size": 4096,
    "intermediate_size": 6400, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "num_local_experts": 16, "num_experts_per_tok": 2, "max_position_embeddings": 131072, "sliding_window": 131072,
    "rms_norm_eps": 1e-5, "router_jitter_noise": 0.01, "input_jitter_noise": 0.01, "attention_bias": True,
    "lm_head_bias": True, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
_MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "vocab_size": 32000, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 32768, "sliding_window": None,
    "rms_norm_eps": 1e-5, "router_aux_loss_coef": 0.02,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen1.5-moe": _QWEN,
    "deepseek-v2-lite": _DEEPSEEK,
    "phi-3.5-moe": _PHI,
    "mixtral-8x7b": _MIXTRAL,
}


def make_config(geometry: str, num_layers: int | None = None, **overrides: Any) -> Any:
    """The configuration of a model, an object of transformers' class for it.

    Every size is the published model's; the ids of special tokens are those of the embedded tokenizer.

    Args:
        geometry: a key of `MODELS`.
        num_layers: fewer layers than the model has; None takes all.
        overrides: other values, for models smaller than real ones.

    Raises:
        InputError: no such geometry, or a number of layers that the model does not have.
    """
    from transformers import AutoConfig

    if geometry not in MODELS:
        raise InputError(expected=f"--geometry of {', '.join(MODELS)}", found=repr(geometry), mend="name one of these")
    settings = MODELS[geometry] | overrides
    least, most = settings.get("first_k_dense_replace", 0) + 1, settings["num_hidden_layers"]
    if num_layers is not None and not least <= num_layers <= most:
        raise InputError(
            expected=f"--layers from {least}, the first layer with routed experts, to {most}",
            found=str(num_layers),
            mend="pass another --layers, or leave it out for the whole model",
        )
    settings = settings | {
        "num_hidden_layers": num_layers or most,
        "tie_word_embeddings": False,
        "pad_token_id": PAD_ID,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "dtype": "bfloat16",
    }
    return AutoConfig.for_model(settings.pop("model_type"), **settings)
