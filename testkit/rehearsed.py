"""Small models of many families, for holding predictions against their rehearsal."""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING

from megatrain.models.adapters.lora import LoraConfig
from megatrain.models.build import build_decoder
from megatrain.models.decoder import Decoder

_SMALL: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 896,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "head_dim": 32,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 256}
SMALL: dict[str, dict[str, Any]] = {
    "llama": _SMALL,
    "mistral": _SMALL,
    "qwen2": {key: value for key, value in _SMALL.items() if key != "head_dim"},
    "qwen3": _SMALL,
    "gemma2": _SMALL | {"tie_word_embeddings": True, "sliding_window": 64},
    "granite": _SMALL | {"logits_scaling": 8.0},
    "phi3": _SMALL,
    "mixtral": _SMALL | _EXPERTS | {"num_local_experts": 4},
    "qwen3_moe": _SMALL | _EXPERTS | {"num_experts": 8},
    "gpt_oss": _SMALL | _EXPERTS | {"num_local_experts": 4, "sliding_window": 64},
    "deepseek_v3": _SMALL
    | _EXPERTS
    | {
        "num_key_value_heads": 8,
        "n_routed_experts": 8,
        "first_k_dense_replace": 1,
        "q_lora_rank": 64,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "n_group": 1,
        "topk_group": 1,
    },
}


def decoder_of(
    family: str,
    dtype: Any = "bf16",
    attn: str | None = None,
    lora: LoraConfig | None = None,
    **changes: Any,
) -> Decoder:
    """Return a small model of the family."""
    fields = SMALL[family] | changes
    if family == "deepseek_v3":
        fields = {key: value for key, value in fields.items() if key != "head_dim"}
    return build_decoder(CONFIG_MAPPING[family](**fields), dtype, (), attn, lora)
