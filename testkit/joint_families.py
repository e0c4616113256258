"""Tiny random joint models: a text decoder with towers, of every family that has a joint class.

Sizes of text are those of testkit/families.py, towers have their own small ones; what a part needs
beside them stands in PARTS. Families that cannot be trained on text stand in REFUSED_JOINT, with
words of the error that says why.
"""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from testkit.families import TINY, has_key

JOINT_FAMILIES = """
aria aya_vision chameleon cohere2_vision cohere_compass cosmos3_edge cosmos3_omni deepseek_vl
deepseek_vl_hybrid emu3 exaone4_5 fun_asr_nano fuyu gemma3 gemma4 gemma4_unified git glm46v glm4v
glm4v_moe glm_ocr glmasr glmga got_ocr2 granite_speech granite_speech_plus hunyuan_vl
hyperclovax_vision_v2 idefics2 idefics3 internvl janus kimi_k25 kosmos-2.5 lfm2_vl lighton_ocr
llama4 llava llava_next llava_next_video llava_onevision minicpm_ocr minicpmv4_6 minicpmv4_7
minimax_m3_vl mistral3 mistral4 moss_transcribe_diarize muse_glimmer ovis2 paddleocr_vl paligemma
phi4_multimodal pp_chart2table qianfan_ocr qwen2_5_omni_thinker qwen2_5_vl qwen2_audio qwen2_vl
qwen3_5 qwen3_5_moe qwen3_asr qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe smolvlm
unlimited_ocr vibevoice_asr video_llama_3 video_llava vipllava voxtral
""".split()  # noqa: SIM905

_NEEDS_IMAGE = "its forward fails with stand-ins for its layers"
_ENCODER = "is an encoder-decoder model"
REFUSED_JOINT = {
    "blip": "its output projection is not linear",
    "blip-2": _NEEDS_IMAGE,
    "ernie4_5_vl_moe": "rearranged, so it cannot be read directly into its place",
    "evolla": "is configured as an encoder",
    "fast_vlm": "is a model of the package timm",
    "florence2": _ENCODER,
    "gemma3n": "is a model of the package timm",
    "glm5_next": "several streams for each token",
    "idefics": _NEEDS_IMAGE,
    "instructblip": _NEEDS_IMAGE,
    "instructblipvideo": _NEEDS_IMAGE,
    "kosmos-2": _NEEDS_IMAGE,
    "kyutai_speech_to_text": "keys with a leading underscore",
    "mistral_large4": "receives more from an earlier layer than hidden states",
    "mllama": "do not each run once",
    "molmo2": "`mm_token_type_ids` is required",
    "nemotron_h_omni": "its output projection is not linear",
    "perception_lm": "is a model of the package timm",
    "pi0": "no list of layers found",
    "pix2struct": _ENCODER,
    "pp_formulanet": _ENCODER,
    "qwen2_5_omni": "its output projection is not linear",
    "shieldgemma2": "does not load its weights",
    "step3p7": "rearranged, so it cannot be read directly into its place",
    "t5gemma2": _ENCODER,
    "udop": _ENCODER,
    "vision-encoder-decoder": _ENCODER,
    "voxtral_realtime": _NEEDS_IMAGE,
}
"""With words of the reason. Where no tiny config can be made, the default one is refused."""

UNTRIED = """
deepseek_ocr2 diffusion_gemma granite4_vision inkling_mm_model muse_spark nemo_speechlm
qwen3_omni_moe qwen4_exp
""".split()  # noqa: SIM905
"""We have no tiny model of these: training one works, or is refused with a reason."""

TOWER: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "depth": 2, "embed_dim": 32, "num_heads": 2, "image_size": 28,
    "patch_size": 14, "out_hidden_size": 64, "encoder_layers": 2, "d_model": 32, "num_layers": 2,
    "encoder_attention_heads": 2, "encoder_ffn_dim": 48, "base_channels": 32,
    "channel_multiplier": [1, 1], "num_res_blocks": 1, "codebook_size": 64, "num_embeddings": 64,
}  # fmt: skip


def _mrope(sections: list[int]) -> dict[str, Any]:
    """Return positions with several axes, that share the width of a head."""
    return {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}


_TEXT = "text_config"
PARTS: dict[tuple[str, str], dict[str, Any]] = {
    **{
        (family, _TEXT): {"rope_parameters": _mrope([2, 3, 3])}
        for family in (
            "cosmos3_edge", "glm46v", "glm4v", "paddleocr_vl", "qwen2_5_omni_thinker",
            "qwen2_5_vl", "qwen2_vl",
        )
    },
    **{
        (family, _TEXT): {"rope_parameters": _mrope([1, 1, 2]) | {"partial_rotary_factor": 0.5}}
        for family in ("glm4v_moe", "glm_ocr", "glmga")
    },
    ("chameleon", ""): {"vocabulary_map": {"<image>": 300}},
    ("emu3", ""): {"vocabulary_map": {"<image>": 300}},
    ("ernie4_5_vl_moe", _TEXT): {
        "moe_intermediate_size": [32, 16], "moe_num_experts": 4,
        "rope_parameters": _mrope([3, 3, 2]),
    },
    ("gemma4", _TEXT): {
        "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    ("gemma4", ""): {"vision_config": {"model_type": "gemma4_vision", **TOWER, "head_dim": 16}},
    ("gemma4_unified", _TEXT): {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
    ("gemma4_unified", ""): {"vision_config": {"model_type": "gemma4_unified_vision", **TOWER}},
    ("glm5_next", _TEXT): {"num_key_value_heads": 4, "qk_rope_head_dim": 0},
    ("hunyuan_vl", _TEXT): {"rope_parameters": _mrope([2, 2, 2, 2])},
    ("kimi_k25", _TEXT): {"num_key_value_heads": 4, "head_dim": 8},
    ("cohere_compass", _TEXT): {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4}
            for kind in ("full_attention", "sliding_attention")
        }
    },
    ("fun_asr_nano", ""): {"adaptor_config": {"hidden_size": 64, "intermediate_size": 16}},
    ("mistral4", ""): {"head_dim": None, "num_key_value_heads": 4},
    ("qwen2_5_omni_thinker", ""): {"vision_start_token_id": 301},
    ("qwen3_omni_moe_thinker", ""): {"vision_start_token_id": 301},
    ("molmo2", "vision_config"): {"image_size": [28, 28]},
    ("molmo2", "adapter_config"): {"vision_feature_layer": [-1, 0]},
}  # fmt: skip
"""By family and part; the name of the family's own config is empty."""


@functools.cache
def tiny_joint_config(family: str) -> PreTrainedConfig:
    """Return a small configuration of a joint `family`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        has_text = "text_config" in CONFIG_MAPPING[family].sub_configs
        own = {key: TINY[key] for key in ("vocab_size", "pad_token_id")} if has_text else TINY
        return _tiny(family, CONFIG_MAPPING[family], "", own)


def _tiny(family: str, config_class: Any, name: str, sizes: dict[str, Any]) -> PreTrainedConfig:
    default = config_class()
    fields = {key: value for key, value in sizes.items() if has_key(default, key)}
    for part in config_class.sub_configs:
        inner = getattr(default, part, None)
        if inner is not None:
            small = TINY if part in ("text_config", "thinker_config") else TOWER
            fields[part] = _tiny(family, type(inner), part, small).to_dict()
    fields |= PARTS.get((family, name), {})
    return config_class(**{key: value for key, value in fields.items() if value is not None})


def tiny_joint_model(family: str, dtype: torch.dtype) -> PreTrainedModel:
    """Return a random joint model of `family`, the same for the same arguments."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        return AutoModelForMultimodalLM.from_config(tiny_joint_config(family), dtype=dtype)


def save_tiny_joint(folder: Path, family: str, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Save a random joint model of `family` in several shards; return the folder."""
    tiny_joint_model(family, dtype).save_pretrained(folder, max_shard_size="100KB")
    return folder


def refused_json(family: str) -> bytes:
    """Return a config.json of `family`: a tiny one, or the default where none can be made."""
    try:
        config = tiny_joint_config(family)
    except Exception:  # transformers validates with many kinds of exception
        config = CONFIG_MAPPING[family]()
    return str(config.to_json_string()).encode()
