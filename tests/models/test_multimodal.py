"""Joint configs: which parts are built, and what is asked of text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

from megatrain.disk.hf.names import NameMap
from megatrain.errors import ConfigError, MegaTrainError, ModelConfigError
from megatrain.models.build import build_decoder
from megatrain.models.config_json import parse_config
from megatrain.models.documents import by_document
from megatrain.models.isolation import check_packing, packing_family
from megatrain.models.multimodal import attention_choice, is_joint, joint_class, text_part
from megatrain.models.rope import with_rope
from testkit.cases import at_a_push
from testkit.families import tiny_config
from testkit.joint_families import (
    JOINT_FAMILIES,
    REFUSED_JOINT,
    UNTRIED,
    refused_json,
    tiny_joint_config,
)


def _parsed(family: str, **changes: Any) -> Any:
    fields = json.loads(tiny_joint_config(family).to_json_string())
    for name, value in changes.items():
        fields[name] = {**fields[name], **value} if isinstance(value, dict) else value
    return parse_config(json.dumps(fields).encode())


def test_every_joint_family_of_transformers_is_trained_refused_or_untried() -> None:
    told = [*JOINT_FAMILIES, *REFUSED_JOINT, *UNTRIED]
    assert sorted(told) == sorted(MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES)
    assert len(JOINT_FAMILIES) >= 15


@pytest.mark.parametrize("family", at_a_push(sorted(REFUSED_JOINT), 6))
def test_a_family_that_cannot_be_trained_is_refused_with_the_reason(family: str) -> None:
    with pytest.raises(MegaTrainError) as refused:
        NameMap(build_decoder(parse_config(refused_json(family)), "bf16"))
    assert REFUSED_JOINT[family] in str(refused.value)


@pytest.mark.parametrize(
    ("part", "model_type"),
    [
        ("vision_config", "timm_wrapper"),
        ("vision_config", "rwkv"),
        ("vision_config", "llama"),
        ("vision_config", 7),
        ("text_config", "clip_vision_model"),
        ("text_config", "no_such_thing"),
    ],
)
def test_a_part_of_another_class_is_refused(part: str, model_type: str) -> None:
    with pytest.raises(ModelConfigError, match=rf"{part} of this llava is"):
        _parsed("llava", **{part: {"model_type": model_type}})
    assert _parsed("llava", vision_config={"model_type": "siglip_vision_model"})


@pytest.mark.parametrize("key", ["quantization_config", "_target_", "to_dict"])
def test_a_part_has_no_key_that_the_whole_may_not_have(key: str) -> None:
    with pytest.raises(ModelConfigError, match=f"{key} is refused"):
        _parsed("gemma3", text_config={key: {}})


def test_fields_by_layer_are_looked_at_as_fields_are() -> None:
    layers = {"0": {"head_dim": 16}}
    assert _parsed("gemma4_unified", text_config={"per_layer_config": layers})
    wrong: list[Any] = [{"0": {"to_dict": 1}}, {"0": 5}, 7, {"0": {"auto_map": {}}}]
    for bad in wrong:
        with pytest.raises(ModelConfigError):
            _parsed("gemma4_unified", text_config={"per_layer_config": bad})


def test_what_is_asked_about_text_is_answered_by_its_part() -> None:
    config = tiny_joint_config("gemma3")
    assert text_part(config) is config.text_config
    assert attention_choice(config, "eager") == {"text_config": "eager"}
    assert attention_choice(config, None) is None
    decoder = build_decoder(config, "bf16", attn="eager")
    assert decoder.text_config._attn_implementation == "eager"
    alone = tiny_config("llama")
    assert text_part(alone) is alone
    assert attention_choice(alone, "eager") == "eager"
    assert joint_class(alone) is None
    assert not is_joint("llama")


def test_a_joint_model_packs_where_its_text_decoder_does() -> None:
    config = tiny_joint_config("llava")
    assert by_document(config)
    check_packing(packing_family(config))
    other = _parsed("llava", text_config={"model_type": "opt"})
    assert not by_document(other)
    with pytest.raises(ConfigError, match="llava with opt is not known"):
        check_packing(packing_family(other))
    with pytest.raises(ConfigError, match="not known to pass their lengths"):
        check_packing(packing_family(config), "flash_attention_2")


def test_rotary_positions_of_a_joint_model_are_scaled_in_its_config() -> None:
    data = tiny_joint_config("llava").to_json_string().encode()
    with pytest.raises(ConfigError, match=r"llava is a joint model.*text_config"):
        with_rope(data, {"rope_type": "yarn", "factor": 4.0})
