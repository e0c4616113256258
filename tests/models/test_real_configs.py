"""Configs as people find them: what the strict reader must accept, with the keys of many years.

The files are written after those of well-known models, legacy keys included. Keys that are refused
by policy (a `quantization_config`) are left out and put back in a test of their own.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatrain.errors import ModelConfigError
from megatrain.models.config_json import parse_config

# fmt: off
REAL: dict[str, dict[str, Any]] = {
    "llama 2": {
        "_name_or_path": "meta-llama/Llama-2-7b-hf", "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 11008, "max_position_embeddings": 4096,
        "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 32, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None,
        "tie_word_embeddings": False, "torch_dtype": "float16", "transformers_version": "4.31.0",
        "use_cache": True, "vocab_size": 32000, "pad_token_id": 0, "max_length": 4096,
    },
    "llama 3.1": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu",
        "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
        "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3",
        },
        "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.42.3", "use_cache": True, "vocab_size": 128256,
    },
    "llama 3.2, fine-tuned and saved again": {
        "_attn_implementation_autoset": True, "_name_or_path": "./out/checkpoint-500",
        "architectures": ["LlamaForCausalLM"], "bos_token_id": 128000, "eos_token_id": 128009,
        "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 8192,
        "max_position_embeddings": 131072, "model_type": "llama", "num_attention_heads": 32,
        "num_hidden_layers": 16, "num_key_value_heads": 8, "pad_token_id": 128004,
        "rope_scaling": {
            "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3",
        },
        "rope_theta": 500000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers_version": "4.48.3", "unsloth_fixed": True, "unsloth_version": "2025.1.8",
        "use_cache": False, "vocab_size": 128256,
    },
    "yi": {
        "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "hidden_size": 7168, "initializer_range": 0.02,
        "intermediate_size": 20480, "max_position_embeddings": 200000, "model_type": "llama",
        "num_attention_heads": 56, "num_hidden_layers": 60, "num_key_value_heads": 8,
        "pad_token_id": 0, "rms_norm_eps": 1e-05, "rope_theta": 10000000, "use_cache": True,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 64000,
        "output_attentions": False, "num_labels": 2, "name_or_path": "01-ai/Yi-34B-200K",
    },
    "vicuna, rope scaled as it once was": {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 5120, "intermediate_size": 13824,
        "max_position_embeddings": 4096, "model_type": "llama", "num_attention_heads": 40,
        "num_hidden_layers": 40, "num_key_value_heads": 40, "pad_token_id": 0,
        "rope_scaling": {"factor": 4.0, "type": "linear"}, "max_sequence_length": 16384,
        "torch_dtype": "float16", "vocab_size": 32000, "bos_token_id": 1, "eos_token_id": 2,
    },
    "qwen 2.5": {
        "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
        "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 3584,
        "initializer_range": 0.02, "intermediate_size": 18944, "max_position_embeddings": 32768,
        "max_window_layers": 28, "model_type": "qwen2", "num_attention_heads": 28,
        "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0, "sliding_window": 131072, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "transformers_version": "4.43.1", "use_cache": True,
        "use_sliding_window": False, "vocab_size": 152064, "use_mrope": False,
    },
    "qwen 3": {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 12288,
        "max_position_embeddings": 40960, "max_window_layers": 36, "model_type": "qwen3",
        "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.51.0",
        "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
    },
    "qwen 3 with experts": {
        "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "bos_token_id": 151643,
        "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 4096, "intermediate_size": 12288, "max_position_embeddings": 40960,
        "max_window_layers": 94, "mlp_only_layers": [], "model_type": "qwen3_moe",
        "moe_intermediate_size": 1536, "norm_topk_prob": True, "num_attention_heads": 64,
        "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 94,
        "num_key_value_heads": 4, "output_router_logits": False, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
        "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
    },
    "qwen 3 next": {
        "architectures": ["Qwen3NextForCausalLM"], "attention_bias": False, "bos_token_id": 151643,
        "decoder_sparse_step": 1, "eos_token_id": 151645, "full_attention_interval": 4,
        "head_dim": 256, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 5120,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_value_head_dim": 128, "mlp_only_layers": [],
        "max_position_embeddings": 262144, "model_type": "qwen3_next", "norm_topk_prob": True,
        "moe_intermediate_size": 512, "num_attention_heads": 16, "num_experts": 512,
        "num_experts_per_tok": 10, "num_hidden_layers": 48, "num_key_value_heads": 2,
        "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06, "rope_scaling": None,
        "rope_theta": 10000000, "shared_expert_intermediate_size": 512, "torch_dtype": "bfloat16",
        "tie_word_embeddings": False, "use_cache": True, "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "gemma": {
        "architectures": ["GemmaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 2, "eos_token_id": 1, "head_dim": 256, "hidden_act": "gelu",
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 3072, "initializer_range": 0.02,
        "intermediate_size": 24576, "max_position_embeddings": 8192, "model_type": "gemma",
        "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 16,
        "pad_token_id": 0, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000.0,
        "torch_dtype": "bfloat16", "transformers_version": "4.38.1", "vocab_size": 256000,
    },
    "gemma 2": {
        "architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": 50.0, "bos_token_id": 2,
        "cache_implementation": "hybrid", "eos_token_id": [1, 107], "final_logit_softcapping": 30.0,
        "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 3584,
        "hidden_activation": "gelu_pytorch_tanh", "intermediate_size": 14336,
        "max_position_embeddings": 8192, "model_type": "gemma2", "num_attention_heads": 16,
        "num_hidden_layers": 42, "num_key_value_heads": 8, "pad_token_id": 0,
        "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_theta": 10000.0,
        "sliding_window": 4096, "sliding_window_size": 4096, "torch_dtype": "bfloat16",
        "use_cache": True, "vocab_size": 256000,
    },
    "gemma 3, text": {
        "architectures": ["Gemma3ForCausalLM"], "attn_logit_softcapping": None, "bos_token_id": 2,
        "cache_implementation": "hybrid", "eos_token_id": [1, 106], "final_logit_softcapping": None,
        "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152,
        "intermediate_size": 6912, "max_position_embeddings": 32768, "model_type": "gemma3_text",
        "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
        "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": 512, "sliding_window_pattern": 6, "torch_dtype": "bfloat16",
        "transformers_version": "4.50.0.dev0", "use_cache": True, "vocab_size": 262144,
        "_sliding_window_pattern": 6, "use_bidirectional_attention": False,
    },
    "mistral": {
        "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096, "head_dim": None,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 32000,
        "transformers_version": "4.34.0.dev0", "use_cache": True, "attention_dropout": 0.0,
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1,
        "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32,
        "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "num_local_experts": 8, "output_router_logits": False, "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": None,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
        "vocab_size": 32000, "router_jitter_noise": 0.0,
    },
    "phi 2": {
        "_name_or_path": "microsoft/phi-2", "architectures": ["PhiForCausalLM"],
        "attention_dropout": 0.0, "bos_token_id": 50256, "embd_pdrop": 0.0, "eos_token_id": 50256,
        "hidden_act": "gelu_new", "hidden_size": 2560, "initializer_range": 0.02,
        "intermediate_size": 10240, "layer_norm_eps": 1e-05, "max_position_embeddings": 2048,
        "model_type": "phi", "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 32, "partial_rotary_factor": 0.4, "qk_layernorm": False,
        "resid_pdrop": 0.1, "rope_scaling": None, "rope_theta": 10000.0, "use_cache": True,
        "tie_word_embeddings": False, "torch_dtype": "float16", "vocab_size": 51200,
    },
    "phi 3, long": {
        "_name_or_path": "Phi-3-mini-128k-instruct", "architectures": ["Phi3ForCausalLM"],
        "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1, "embd_pdrop": 0.0,
        "eos_token_id": 32000, "hidden_act": "silu", "hidden_size": 3072,
        "intermediate_size": 8192, "max_position_embeddings": 131072, "model_type": "phi3",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
        "original_max_position_embeddings": 4096, "pad_token_id": 32000, "resid_pdrop": 0.0,
        "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 262144,
        "rope_scaling": {
            "long_factor": [1.07 + 1.3 * i for i in range(48)], "type": "longrope",
            "short_factor": [1.1 + 0.04 * i for i in range(48)],
        },
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
        "vocab_size": 32064,
    },
    "deepseek v3": {
        "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "bos_token_id": 0,
        "attention_dropout": 0.0, "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3,
        "hidden_act": "silu", "hidden_size": 7168, "initializer_range": 0.02,
        "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
        "model_type": "deepseek_v3", "moe_intermediate_size": 2048, "moe_layer_freq": 1,
        "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
        "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
        "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
        "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16", "use_cache": True, "v_head_dim": 128, "vocab_size": 129280,
        "pretraining_tp": 1, "aux_loss_alpha": 0.001, "seq_aux": True,
    },
    "gpt-oss": {
        "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
        "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu",
        "hidden_size": 2880, "initial_context_length": 4096, "intermediate_size": 2880,
        "initializer_range": 0.02, "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64,
        "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8,
        "num_local_experts": 32, "output_router_logits": False, "pad_token_id": 199999,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn",
            "original_max_position_embeddings": 4096, "truncate": False,
        },
        "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128,
        "swiglu_limit": 7.0, "tie_word_embeddings": False, "use_cache": True, "vocab_size": 201088,
    },
    "glm 4": {
        "architectures": ["Glm4ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "eos_token_id": [151329, 151336, 151338], "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 13696,
        "max_position_embeddings": 32768, "model_type": "glm4", "num_attention_heads": 32,
        "num_hidden_layers": 40, "num_key_value_heads": 2, "pad_token_id": 151329,
        "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
        "vocab_size": 151552, "transformers_version": "4.52.0.dev0",
    },
    "glm 4.5": {
        "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
        "eos_token_id": [151329, 151336, 151338], "first_k_dense_replace": 1, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 10944,
        "max_position_embeddings": 131072, "model_type": "glm4_moe", "moe_intermediate_size": 1408,
        "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True,
        "num_attention_heads": 96, "num_experts_per_tok": 8, "num_hidden_layers": 46,
        "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "pad_token_id": 151329,
        "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_scaling": None,
        "rope_theta": 1000000, "routed_scaling_factor": 1.0, "tie_word_embeddings": False,
        "topk_group": 1, "torch_dtype": "bfloat16", "use_cache": True, "use_qk_norm": False,
        "vocab_size": 151552,
    },
    "falcon": {
        "alibi": False, "apply_residual_connection_post_layernorm": False,
        "architectures": ["FalconForCausalLM"], "attention_dropout": 0.0, "bias": False,
        "bos_token_id": 11, "eos_token_id": 11, "hidden_dropout": 0.0, "hidden_size": 4544,
        "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "falcon",
        "multi_query": True, "new_decoder_architecture": False, "num_attention_heads": 71,
        "num_hidden_layers": 32, "parallel_attn": True, "torch_dtype": "bfloat16",
        "transformers_version": "4.27.4", "use_cache": True, "vocab_size": 65024,
    },
    "gpt-2": {
        "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
        "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768,
        "n_head": 12, "n_inner": None, "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1,
        "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
        "summary_type": "cls_index", "summary_use_proj": True, "vocab_size": 50257,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "output_past": True,
    },
    "pythia": {
        "architectures": ["GPTNeoXForCausalLM"], "bos_token_id": 0, "eos_token_id": 0,
        "hidden_act": "gelu", "hidden_size": 2048, "initializer_range": 0.02,
        "intermediate_size": 8192, "layer_norm_eps": 1e-05, "max_position_embeddings": 2048,
        "model_type": "gpt_neox", "num_attention_heads": 16, "num_hidden_layers": 24,
        "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False,
        "torch_dtype": "float16", "use_cache": True, "use_parallel_residual": True,
        "vocab_size": 50304,
    },
    "opt": {
        "_remove_final_layer_norm": False, "activation_dropout": 0.0, "activation_function": "relu",
        "architectures": ["OPTForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 2,
        "do_layer_norm_before": True, "dropout": 0.1, "eos_token_id": 2, "ffn_dim": 8192,
        "hidden_size": 2048, "init_std": 0.02, "layerdrop": 0.0, "max_position_embeddings": 2048,
        "model_type": "opt", "num_attention_heads": 32, "num_hidden_layers": 24, "pad_token_id": 1,
        "prefix": "</s>", "torch_dtype": "float16", "use_cache": True, "vocab_size": 50272,
        "word_embed_proj_dim": 2048, "enable_bias": True, "layer_norm_elementwise_affine": True,
    },
    "bloom": {
        "apply_residual_connection_post_layernorm": False, "attention_dropout": 0.0,
        "architectures": ["BloomForCausalLM"], "attention_softmax_in_fp32": True,
        "bias_dropout_fusion": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3,
        "unk_token_id": 0, "hidden_dropout": 0.0, "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05, "masked_softmax_fusion": True, "model_type": "bloom",
        "n_embed": 1536, "n_inner": None, "n_layer": 24, "num_attention_heads": 16,
        "offset_alibi": 100, "pretraining_tp": 2, "seq_length": 4096, "skip_bias_add": True,
        "skip_bias_add_qkv": False, "transformers_version": "4.21.0", "use_cache": True,
        "vocab_size": 250880, "hidden_size": 1536,
    },
    "mpt": {
        "architectures": ["MPTForCausalLM"], "d_model": 4096, "emb_pdrop": 0, "expansion_ratio": 4,
        "attn_config": {
            "alibi": True, "alibi_bias_max": 8, "attn_impl": "torch", "attn_pdrop": 0,
            "attn_type": "multihead_attention", "attn_uses_sequence_id": False, "clip_qkv": None,
            "prefix_lm": False, "qk_ln": False, "softmax_scale": None,
        },
        "embedding_fraction": 1.0, "init_device": "cpu", "learned_pos_emb": True,
        "init_config": {
            "emb_init_std": None, "fan_mode": "fan_in", "init_div_is_residual": True,
            "init_gain": 0, "init_nonlinearity": "relu", "name": "kaiming_normal_", "verbose": 0,
        },
        "logit_scale": None, "max_seq_len": 2048, "model_type": "mpt", "n_heads": 32,
        "n_layers": 32, "no_bias": True, "norm_type": "low_precision_layernorm", "resid_pdrop": 0,
        "tokenizer_name": "EleutherAI/gpt-neox-20b", "torch_dtype": "bfloat16", "verbose": 0,
        "use_cache": False, "vocab_size": 50432,
    },
    "gpt-j": {
        "activation_function": "gelu_new", "architectures": ["GPTJForCausalLM"], "attn_pdrop": 0.0,
        "bos_token_id": 50256, "embd_pdrop": 0.0, "eos_token_id": 50256, "gradient_checkpointing":
        False, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "gptj",
        "n_embd": 4096, "n_head": 16, "n_inner": None, "n_layer": 28, "n_positions": 2048,
        "resid_pdrop": 0.0, "rotary": True, "rotary_dim": 64, "scale_attn_weights": True,
        "summary_activation": None, "summary_type": "cls_index", "tie_word_embeddings": False,
        "tokenizer_class": "GPT2Tokenizer", "use_cache": True, "vocab_size": 50400,
        "task_specific_params": {"text-generation": {"do_sample": True, "temperature": 1.0}},
    },
    "gpt-neo": {
        "activation_function": "gelu_new", "architectures": ["GPTNeoForCausalLM"],
        "attention_dropout": 0, "attention_layers": ["global", "local"] * 12,
        "attention_types": [[["global", "local"], 12]], "bos_token_id": 50256, "embed_dropout": 0,
        "eos_token_id": 50256, "hidden_size": 2048, "initializer_range": 0.02,
        "intermediate_size": None, "layer_norm_epsilon": 1e-05, "max_position_embeddings": 2048,
        "model_type": "gpt_neo", "num_heads": 16, "num_layers": 24, "resid_dropout": 0,
        "vocab_size": 50257, "window_size": 256,
    },
    "starcoder 2": {
        "activation_function": "gelu", "architectures": ["Starcoder2ForCausalLM"],
        "attention_dropout": 0.1, "attention_softmax_in_fp32": True, "bos_token_id": 0,
        "embedding_dropout": 0.1, "eos_token_id": 0, "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 3072, "initializer_range": 0.018042, "intermediate_size": 12288,
        "layer_norm_epsilon": 1e-05, "max_position_embeddings": 16384, "mlp_type": "default",
        "model_type": "starcoder2", "norm_epsilon": 1e-05, "norm_type": "layer_norm",
        "num_attention_heads": 24, "num_hidden_layers": 30, "num_key_value_heads": 2,
        "residual_dropout": 0.1, "rope_theta": 999999.4420358813, "scale_attn_weights": True,
        "scale_attention_softmax_in_fp32": True, "sliding_window": 4096, "use_bias": True,
        "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 49152,
    },
    "command r": {
        "architectures": ["CohereForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 5, "eos_token_id": 255001, "hidden_act": "silu", "hidden_size": 8192,
        "intermediate_size": 22528, "layer_norm_eps": 1e-05, "logit_scale": 0.0625,
        "max_position_embeddings": 8192, "model_max_length": 131072, "model_type": "cohere",
        "num_attention_heads": 64, "num_hidden_layers": 40, "num_key_value_heads": 64,
        "pad_token_id": 0, "rope_theta": 8000000.0, "torch_dtype": "float16", "use_cache": True,
        "use_qk_norm": False, "vocab_size": 256000,
    },
    "olmo 2": {
        "architectures": ["Olmo2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "eos_token_id": 100257, "hidden_act": "silu", "hidden_size": 5120, "pad_token_id": 100277,
        "intermediate_size": 13824, "max_position_embeddings": 4096, "model_type": "olmo2",
        "num_attention_heads": 40, "num_hidden_layers": 40, "num_key_value_heads": 40,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 500000, "use_cache": True,
        "tie_word_embeddings": False, "torch_dtype": "float32", "vocab_size": 100352,
    },
    "smollm 3": {
        "architectures": ["SmolLM3ForCausalLM"], "attention_bias": False, "bos_token_id": 128000,
        "eos_token_id": 128012, "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 11008, "layer_types": ["full_attention"] * 36, "mlp_bias": False,
        "max_position_embeddings": 65536, "max_window_layers": 28, "model_type": "smollm3",
        "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9, "num_attention_heads": 16,
        "num_hidden_layers": 36, "num_key_value_heads": 4, "pad_token_id": 128004,
        "pretraining_tp": 2, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 5000000.0,
        "sliding_window": None, "torch_dtype": "bfloat16", "use_cache": False,
        "use_sliding_window": False, "vocab_size": 128256,
    },
    "jamba": {
        "architectures": ["JambaForCausalLM"], "attention_dropout": 0.0, "attn_layer_offset": 4,
        "attn_layer_period": 8, "bos_token_id": 1, "calc_logits_for_entire_prompt": False,
        "eos_token_id": 2, "expert_layer_offset": 1, "expert_layer_period": 2, "hidden_act": "silu",
        "hidden_size": 4096, "intermediate_size": 14336, "mamba_conv_bias": True, "mamba_d_conv": 4,
        "mamba_d_state": 16, "mamba_dt_rank": 256, "mamba_expand": 2, "mamba_inner_layernorms":
        True, "mamba_proj_bias": False, "model_type": "jamba", "n_ctx": 262144,
        "num_attention_heads": 32, "num_experts": 16, "num_experts_per_tok": 2,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "num_logits_to_keep": 1,
        "output_router_logits": False, "pad_token_id": 0, "rms_norm_eps": 1e-06,
        "router_aux_loss_coef": 0.001, "sliding_window": None, "torch_dtype": "bfloat16",
        "use_cache": True, "use_mamba_kernels": True, "vocab_size": 65536,
    },
    "nemotron h": {
        "architectures": ["NemotronHForCausalLM"], "attention_bias": False, "bos_token_id": 1,
        "chunk_size": 128, "conv_kernel": 4, "eos_token_id": 12, "head_dim": 128,
        "hidden_dropout": 0.0, "hidden_size": 4480, "intermediate_size": 15680, "expand": 2,
        "hybrid_override_pattern": "M-M-M-M*-M-M-M-M*-", "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05, "mamba_head_dim": 80, "mamba_hidden_act": "silu",
        "mamba_num_heads": 128, "mamba_proj_bias": False, "max_position_embeddings": 131072,
        "mlp_bias": False, "mlp_hidden_act": "relu2", "model_type": "nemotron_h", "n_groups": 8,
        "num_attention_heads": 40, "num_hidden_layers": 18, "num_key_value_heads": 8,
        "pad_token_id": 0, "residual_in_fp32": False, "rms_norm_eps": 1e-05,
        "ssm_state_size": 128, "tie_word_embeddings": False, "time_step_floor": 0.0001,
        "time_step_limit": [0.0, float("inf")], "time_step_max": 0.1, "time_step_min": 0.001,
        "time_step_rank": 256, "torch_dtype": "bfloat16", "use_bias": False, "use_cache": True,
        "use_conv_bias": True, "use_mamba_kernels": True, "vocab_size": 131072,
    },
    "granite": {
        "architectures": ["GraniteForCausalLM"], "attention_multiplier": 0.0078125,
        "bos_token_id": 0, "embedding_multiplier": 12.0, "eos_token_id": 0, "hidden_act": "silu",
        "hidden_size": 4096, "intermediate_size": 12800, "logits_scaling": 16.0,
        "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "granite",
        "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8,
        "pad_token_id": 0, "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "use_cache": True,
        "rope_scaling": None, "rope_theta": 10000000.0, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "vocab_size": 49155,
    },
    "llama 4, text": {
        "attention_bias": False, "attention_chunk_size": 8192, "attention_dropout": 0.0,
        "attn_scale": 0.1, "attn_temperature_tuning": True, "bos_token_id": 200000, "floor_scale":
        8192, "eos_token_id": [200001, 200007, 200008], "for_llm_compressor": False, "head_dim":
        128, "hidden_act": "silu", "hidden_size": 5120, "interleave_moe_layer_step": 1,
        "intermediate_size": 8192, "intermediate_size_mlp": 16384, "model_type": "llama4_text",
        "max_position_embeddings": 10485760, "moe_layers": list(range(48)), "no_rope_layers": [],
        "num_attention_heads": 40, "num_experts_per_tok": 1, "num_hidden_layers": 48,
        "num_key_value_heads": 8, "num_local_experts": 16, "output_router_logits": False,
        "pad_token_id": 200018, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3",
        },
        "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "torch_dtype": "bfloat16",
        "use_cache": True, "use_qk_norm": True, "vocab_size": 202048,
    },
}
# fmt: on


def _parse(fields: dict[str, Any]) -> Any:
    return parse_config(json.dumps(fields).encode())


@pytest.mark.parametrize("name", REAL)
def test_a_real_config_is_accepted(name: str) -> None:
    fields = REAL[name]
    config = _parse(fields)
    assert config.model_type == fields["model_type"]
    assert config.vocab_size == fields["vocab_size"]


@pytest.mark.parametrize("name", ["deepseek v3", "phi 3, long"])
def test_code_that_a_folder_brings_is_ignored_where_transformers_has_the_family(name: str) -> None:
    code = {"AutoConfig": "configuration_own.C", "AutoModelForCausalLM": "modeling_own.M"}
    assert _parse(REAL[name] | {"auto_map": code}).to_dict() == _parse(REAL[name]).to_dict()


def test_scaled_rope_is_not_lost() -> None:
    assert _parse(REAL["llama 3.1"]).rope_parameters["factor"] == 8.0
    assert (
        _parse(REAL["vicuna, rope scaled as it once was"]).rope_parameters["rope_type"] == "linear"
    )
    assert _parse(REAL["qwen 3"]).rope_parameters["rope_theta"] == 1000000
    assert len(_parse(REAL["phi 3, long"]).rope_parameters["long_factor"]) == 48


@pytest.mark.parametrize(
    ("name", "key", "value", "reason"),
    [
        ("gpt-oss", "quantization_config", {"quant_method": "awq"}, "quantized by 'awq'"),
        ("mistral", "_attn_implementation", "flash_attention_2", "leading underscore"),
    ],
)
def test_what_policy_refuses_is_refused_there_too(
    name: str, key: str, value: Any, reason: str
) -> None:
    with pytest.raises(ModelConfigError, match=f"key {key} is refused: .*{reason}"):
        _parse(REAL[name] | {key: value})
