"""Tensors from dimensions are those of the real model, size for size."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from megatrain.errors import ModelConfigError
from megatrain.models.build import build_decoder
from megatrain.models.config_json import parse_config
from megatrain.planning.catalog.families import FAMILIES, shape_from_config
from megatrain.planning.model.shapes import BlockShape, ModelShape
from megatrain.planning.model.skeleton import shape_of
from tests.models.test_real_configs import REAL

KNOWN = {name: fields for name, fields in REAL.items() if fields["model_type"] in FAMILIES}
NEEDED = {"num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 4}
REST = sorted(set(FAMILIES) - {fields["model_type"] for fields in KNOWN.values()})


def sizes(block: BlockShape) -> Counter[tuple[int, ...]]:
    return Counter(tuple(sorted(tensor.shape)) for tensor in block.tensors)


def require_equal(found: ModelShape, real: ModelShape) -> None:
    assert found.params == real.params
    assert found.active_params == real.active_params
    assert (found.vocab, found.hidden, found.tied) == (real.vocab, real.hidden, real.tied)
    assert found.layer_kinds == real.layer_kinds
    assert (found.by_document, found.positions) == (real.by_document, real.positions)
    assert (found.packs, found.packs_by_lengths) == (real.packs, real.packs_by_lengths)
    for mine, true in zip(found.blocks, real.blocks, strict=True):
        assert sizes(mine) == sizes(true)
        assert mine.attention == true.attention
        assert (mine.inner, mine.num_experts) == (true.inner, true.num_experts)
        assert mine.matmul_flops_per_token == true.matmul_flops_per_token


@pytest.mark.few(17)
@pytest.mark.parametrize("name", KNOWN)
def test_real_configs(name: str) -> None:
    config = parse_config(json.dumps(KNOWN[name]).encode())
    require_equal(shape_from_config(KNOWN[name]), shape_of(build_decoder(config, "bf16")))


@pytest.mark.parametrize("family", REST)
def test_families_without_a_real_config(family: str) -> None:
    config = CONFIG_MAPPING[family](**NEEDED)
    fields = json.loads(json.dumps(config.to_dict(), default=str))
    require_equal(
        shape_from_config(fields | {"model_type": family}),
        shape_of(build_decoder(config, "bf16")),
    )


@pytest.mark.parametrize("key", ["hidden_size", "num_key_value_heads", "vocab_size"])
def test_another_dimension_would_be_noticed(key: str) -> None:
    fields = KNOWN["llama 3.1"]
    real = shape_of(build_decoder(parse_config(json.dumps(fields).encode()), "bf16"))
    with pytest.raises(AssertionError):
        require_equal(shape_from_config(fields | {key: 2 * fields[key]}), real)


def test_a_config_of_several_parts_is_taken_for_its_text() -> None:
    fields = KNOWN["gemma 3, text"]
    outer: dict[str, Any] = {"model_type": "gemma3", "text_config": fields, "vision_config": {}}
    assert shape_from_config(outer) == shape_from_config(fields)


@pytest.mark.parametrize("asked", [True, False])
def test_norms_of_queries_and_keys_that_a_config_asks_for(asked: bool) -> None:
    fields = KNOWN["glm 4.5"] | {"use_qk_norm": asked}
    config = parse_config(json.dumps(fields).encode())
    require_equal(shape_from_config(fields), shape_of(build_decoder(config, "bf16")))


def test_what_is_not_known_is_said() -> None:
    with pytest.raises(ModelConfigError, match="1000000000 layers"):
        shape_from_config(KNOWN["llama 3.1"] | {"num_hidden_layers": 10**9})
    with pytest.raises(ModelConfigError, match=r"'jamba': its tensors do not follow .* llama"):
        shape_from_config({"model_type": "jamba"})
    with pytest.raises(
        ModelConfigError, match=r"config of a llama: a dimension is missing.*vocab_size"
    ):
        shape_from_config({"model_type": "llama", "hidden_size": 64})
