"""Joint models: which there are, and what their parts may be.

A joint config describes a text decoder and other parts, each with its own configuration. The
model is the joint class of transformers, so that names, ties and masks are those of the folder.
Text is trained; what a forward over text never reads is carried (probing/boundaries.py).

A config is untrusted, and a part may name any class of transformers: only text decoders that we
would train alone, and towers that joint models are known to have, are built.

Laws (tests/models/test_multimodal.py)
    1. A part of any other class is refused, with its name.
    2. Facts about text are those of the text part.
"""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from megatrain.errors import ModelConfigError

TEXT_PART = "text_config"
TOWERS = frozenset(
    """
    blip_2_qformer clip_vision_model exaone4_5_vision fun_asr_nano_encoder glm4v_vision
    glmasr_encoder idefics3_vision internvl_vision moss_transcribe_diarize_audio pixtral
    qwen2_5_vl_vision qwen2_audio_encoder qwen3_asr_encoder qwen3_vl_vision radio sam_vision_model
    siglip2_vision_model siglip_vision_model vibevoice_acoustic_tokenizer_encoder voxtral_encoder
    """.split()  # noqa: SIM905
)
"""The parts, besides text, that a family may have where its class takes any."""
_TIMM = frozenset({"timm_wrapper", "timm_backbone"})
UNFIT = {
    "gemma3n": "its tower for images is a model of the package timm",
    "shieldgemma2": "transformers 5.22 does not load its weights into its joint class",
}
"""Joint families that cannot be trained for a reason that no probe of the model finds."""


def is_joint(model_type: str) -> bool:
    """Return whether a family has a joint class."""
    if model_type not in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES or model_type not in CONFIG_MAPPING:
        return False
    return model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or bool(parts_of(model_type))


def parts_of(model_type: str) -> set[str]:
    """Return the names of a family's parts. (A group of settings, as in mpt, is not a part.)"""
    return {
        name
        for name, part_class in CONFIG_MAPPING[model_type].sub_configs.items()
        if getattr(part_class, "model_type", None) != ""
    }


def joint_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """Return the class of a joint model; None: the config is of a text decoder alone."""
    if not is_joint(config.model_type):
        return None
    found: type[PreTrainedModel] = MODEL_FOR_MULTIMODAL_LM_MAPPING[type(config)]
    return found


def text_part(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration of the text decoder: a part of `config`, or `config` itself."""
    return config.get_text_config()


def attention_choice(config: PreTrainedConfig, attn: str | None) -> Any:
    """Return what transformers takes to let text attend by `attn`, and towers as they like."""
    if attn is None or joint_class(config) is None or TEXT_PART not in config.sub_configs:
        return attn
    return {TEXT_PART: attn}


def part_class(
    family: str, name: str, declared: type[PreTrainedConfig], fields: dict[str, Any]
) -> type[PreTrainedConfig] | None:
    """Return the class of a part's configuration; None: the family's default. Raises
    ModelConfigError for a class that no joint model has there.
    """
    model_type = fields.get("model_type")
    if model_type in _TIMM:
        raise ModelConfigError(
            f"config.json: {name} of this {family} is a model of the package timm, whose code may "
            "fetch files. Only parts that transformers has itself are built."
        )
    if declared is not AutoConfig:
        return declared
    if model_type is None:
        return None
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name == TEXT_PART else TOWERS
    default = getattr(CONFIG_MAPPING[family](), name, None)
    allowed = model_type in known or model_type == getattr(default, "model_type", None)
    if not isinstance(model_type, str) or not allowed or model_type not in CONFIG_MAPPING:
        raise ModelConfigError(
            f"config.json: {name} of this {family} is a {str(model_type)[:80]!r}, which is not a "
            f"{'text decoder' if name == TEXT_PART else 'tower'} that joint models are known to "
            "have. A newer version may."
        )
    found: type[PreTrainedConfig] = CONFIG_MAPPING[model_type]
    return found
