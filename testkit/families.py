"""Tiny random models of every decoder family that the tests cover.

One dictionary of small sizes fits nearly all families, because they share names; what a family
needs beside it stands in EXTRA. Families that exist and cannot be cut into a chain of layers stand
in REFUSED with the words of the error that says so.
"""

from __future__ import annotations

import copy
import functools
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

TINY: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "hidden_dropout": 0.0,
    "max_position_embeddings": 128, "n_layer": 4, "n_head": 4, "n_embd": 64, "n_positions": 128,
    "n_inner": 96, "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 16,
    "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
    "ffn_hidden_size": 96, "d_model": 64, "n_layers": 4, "n_heads": 4, "word_embed_proj_dim": 64,
    "ffn_dim": 96, "rotary_dim": 8, "sliding_window": 16, "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "mamba_d_state": 8, "mamba_chunk_size": 8, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "dropout": 0.0,
    "attention_dropout": 0.0, "activation_dropout": 0.0, "emb_pdrop": 0.0, "layerdrop": 0.0,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "residual_dropout": 0.0,
    "router_jitter_noise": 0.0, "input_jitter_noise": 0.0,
}  # fmt: skip

FAMILIES = """
afmoe apertus arcee aria_text axk1 axk2 bailing_hybrid bamba beam biogpt bitnet bloom codegen cohere
cohere2 cohere2_moe cwm deepseek_v2 deepseek_v3 deepseek_v32 diffllama doge dots1 ernie4_5
ernie4_5_moe exaone4 exaone_moe falcon falcon_h1 falcon_mamba flex_olmo flint gemma gemma2
gemma3_text gemma4_text glm glm4 glm4_moe glm4_moe_lite gpt2 gpt_bigcode gpt_neo gpt_neox
gpt_neox_japanese gpt_oss gptj granite granite_swa granitemoe granitemoe_swa granitemoehybrid
granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax jais2 jamba jetmoe
kolibri1 laguna lfm2 lfm2_moe llama llama4_text mamba mamba2 mellum mimo_v2_flash minicpm3 minimax
minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral modernbert-decoder mpt nanochat
nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe openai-gpt opt persimmon phi phi3 phimoe
qwen2 qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next recurrent_gemma seed_oss
smollm3 solar_open stablelm starcoder2 vaultgemma xglm youtu
""".split()  # noqa: SIM905
FAMILIES = [family for family in FAMILIES if family in CONFIG_MAPPING]
"""Older versions of transformers do not have all of them; the README says how many there are."""

COVERING = {
    "llama": "the plain decoder: rotary positions, grouped heads, an untied head",
    "qwen3": "what most people train: norms of queries and keys, a tied head",
    "gemma": "an embedding scale, norms by 1 + weight",
    "gemma4_text": "embeddings for each layer, layers that read keys and values of earlier ones",
    "gemma2": "windows in every second layer, soft caps of scores and logits",
    "gpt2": "learned positions, Conv1D projections, biases, a tied head",
    "mixtral": "experts as the first mixtures had them",
    "deepseek_v3": "latent attention, a dense first layer, shared experts; router biases in fp32",
    "gpt_oss": "attention sinks, windows, experts with biases",
    "llama4_text": "chunked attention, layers without positions, a shared expert",
    "phimoe": "experts that are drawn at random while training",
    "qwen3_next": "gated delta rule beside gated attention, shared experts with a gate",
    "bailing_hybrid": "delta attention with a forget gate beside latent attention, experts",
    "jamba": "a state space, attention and experts in turn",
    "falcon_mamba": "state spaces alone, norms without weights",
    "mamba2": "state spaces by chunks",
}
COVERING = {family: why for family, why in COVERING.items() if family in FAMILIES}
"""Families that together have every structure that people train, and what each is there for.

The laws run on these at every push, in bf16 and in fp32. A merge runs them in the other families in
bf16, which has masters in two parts and casts that a family can get wrong; the night does so in
fp32.
"""
RARE = """
biogpt bitnet bloom codegen diffllama doge gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gptj jais2
jetmoe modernbert-decoder mpt nanochat openai-gpt opt persimmon recurrent_gemma vaultgemma xglm
""".split()  # noqa: SIM905
"""Families that hardly anybody trains today: the laws run on them at night alone."""

BALANCED = """
ernie4_5_moe flex_olmo flint gpt_oss granitemoe granitemoe_swa granitemoehybrid granitemoeshared
jamba jetmoe laguna mellum minimax minimax_m2 minimax_m3_vl_text mixtral olmoe phimoe qwen2_moe
qwen3_5_moe_text qwen3_moe qwen3_next
""".split()  # noqa: SIM905
BALANCED = [family for family in BALANCED if family in FAMILIES]
"""Families whose own code has a load-balancing loss that we compute too."""

# Where rotary positions span part of a head, `head_dim` is that part.
_LATENT_ATTENTION = """
axk1 axk2 deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite minicpm3 youtu
""".split()  # noqa: SIM905

EXTRA: dict[str, dict[str, Any]] = {
    family: {"head_dim": 8, "num_key_value_heads": 4} for family in _LATENT_ATTENTION
} | {
    "dots1": {"n_shared_experts": 1, "routed_scaling_factor": 1.0},
    "falcon": {"head_dim": None},
    "gemma4_text": {
        "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 4, "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "vocab_size_per_layer_input": 320, "global_head_dim": 32,
    },
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2},
    "minimax_m3_vl_text": {
        "dense_intermediate_size": 96, "shared_intermediate_size": 32,
        "mlp_layer_types": ["dense", *["sparse"] * 3],
        "layer_types": ["full_attention", *["minimax_m3_sparse"] * 3],
        "index_n_heads": 2, "index_head_dim": 16, "index_block_size": 4, "index_topk_blocks": 2,
    },
    "nemotron_h": {
        "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 8,
        "chunk_size": 8, "moe_shared_expert_intermediate_size": 32, "moe_latent_size": None,
    },
    "zamba2": {"layer_types": ["mamba", "mamba", "hybrid", "mamba"], "hybrid_layer_ids": [2]},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip

REFUSED = {
    "glm_moe_dsa": "receives more from an earlier layer than hidden states",
    "hrm_text": "do not each run once",
    "hy_v4": "several streams for each token",
    "rwkv": "receives more from an earlier layer than hidden states",
    "zamba2": "receive one trained tensor besides hidden states",
    "zaya": "receives more from an earlier layer than hidden states",
}

_ENCODER_DECODER = "is an encoder-decoder model"
_ENCODER = "is configured as an encoder"
_SEVERAL = "only text decoders, alone or in joint models of transformers, are supported"
_NOT_BUILT = "transformers cannot build"
_STREAMS = "several streams for each token"
OTHERS_REFUSED = {
    "bart": _ENCODER_DECODER, "bert": _ENCODER, "bert-generation": _ENCODER, "big_bird": _ENCODER,
    "bigbird_pegasus": _ENCODER_DECODER, "blenderbot": _ENCODER_DECODER,
    "blenderbot-small": _ENCODER_DECODER, "blt": _SEVERAL, "camembert": _ENCODER,
    "cohere_compass_text": _NOT_BUILT, "cpmant": "receive one trained tensor besides hidden states",
    "data2vec-text": _ENCODER, "dbrx": _NOT_BUILT, "deepseek_v4": _STREAMS, "electra": _ENCODER,
    "ernie": _ENCODER, "gemma3n_text": _STREAMS, "gemma4_unified_assistant": _SEVERAL,
    "marian": _ENCODER_DECODER, "mbart": _ENCODER_DECODER, "megatron-bert": _ENCODER,
    "moshi": "keys with a leading underscore", "musicgen": _SEVERAL, "musicgen_melody": _SEVERAL,
    "mvp": _ENCODER_DECODER, "pegasus": _ENCODER_DECODER, "plbart": _ENCODER_DECODER,
    "prophetnet": _ENCODER_DECODER, "qwen4_exp_text": _NOT_BUILT, "reformer": _ENCODER,
    "rembert": _ENCODER, "roberta": _ENCODER, "roberta-prelayernorm": _ENCODER,
    "roc_bert": _ENCODER, "roformer": _ENCODER, "trocr": _ENCODER, "whisper": _ENCODER_DECODER,
    "xlm": "is not used on exactly one side of the layers", "xlm-roberta": _ENCODER,
    "xlm-roberta-xl": _ENCODER, "xlnet": "its forward fails with stand-ins for its layers",
    "xmod": _ENCODER, "zamba": "receive one trained tensor besides hidden states",
}  # fmt: skip
"""Causal families by the words with which transformers' own default config is refused."""
ONE_STEP = ("ctrl", "gemma4_unified_text", "gpt-sw3", "kimi_linear")
"""Families that train with the bits of the plain model, shown by one step and no other test."""
NO_TINY_MODEL = ("gemma4_assistant", "inkling_text", "longcat_flash", "xlstm")
"""We have no tiny model of these, or (inkling_text) one that agrees within rounding only."""


def has_key(config: PreTrainedConfig, key: str) -> bool:
    """Return whether a config has a key; those that differ by layer cannot be read from it."""
    try:
        return hasattr(config, key)
    except Exception:
        return False


def tiny_config(family: str, **changes: Any) -> PreTrainedConfig:
    """Return a small configuration of `family`, which the caller may change."""
    return copy.deepcopy(_tiny_config(family, **changes))


@functools.cache
def _tiny_config(family: str, **changes: Any) -> PreTrainedConfig:
    config_class = CONFIG_MAPPING[family]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        default = config_class()
        fields = {key: value for key, value in TINY.items() if has_key(default, key)}
        fields |= EXTRA.get(family, {}) | changes
        return config_class(**{k: v for k, v in fields.items() if v is not None})


def tiny_model(family: str, dtype: torch.dtype, **changes: Any) -> PreTrainedModel:
    """Return a random model of `family`, the same for the same arguments."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(tiny_config(family, **changes), dtype=dtype)


def save_tiny(
    folder: Path, family: str = "llama", dtype: torch.dtype = torch.bfloat16, **changes: Any
) -> Path:
    """Save a random model of `family` in several shards; return the folder."""
    tiny_model(family, dtype, **changes).save_pretrained(folder, max_shard_size="100KB")
    return folder
