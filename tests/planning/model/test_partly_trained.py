"""Adapters and frozen params of a shape are those of the skeleton that is built with them."""

from __future__ import annotations

import pytest

from megatrain.config.sections import LoraSettings
from megatrain.errors import ConfigError
from megatrain.models.adapters.lora import LoraConfig
from megatrain.models.build import build_decoder
from megatrain.planning.catalog.known_models import known_models
from megatrain.planning.model.partly_trained import with_adapters, with_frozen
from megatrain.planning.model.shapes import BlockShape, ModelShape, TensorShape
from megatrain.planning.model.skeleton import shape_of
from testkit.cases import by_family
from testkit.families import REFUSED, tiny_config

FAMILIES = sorted({model.shape.family for model in known_models()} - set(REFUSED))
PATTERNS = [
    ("model.embed_tokens*",),
    ("lm_head*",),
    ("*embed_tokens.weight", "*lm_head.weight"),
    ("model.layers.0.*",),
    ("model.layers.*.mlp.*", "model.layers.1.self_attn.q_proj.weight"),
    ("model.norm.weight", "*.input_layernorm.weight"),
]


def _tensors(block: BlockShape) -> list[TensorShape]:
    """Return the tensors by name: adapters stand beside their modules, or behind all."""
    return sorted(block.tensors, key=lambda tensor: tensor.name)


def _shapes(
    family: str, targets: tuple[str, ...], dropout: float, experts: tuple[str, ...] = ()
) -> tuple[ModelShape, ModelShape]:
    """Return a model with adapters added to its shape, and to its skeleton."""
    config = tiny_config(family)
    settings = LoraSettings(rank=4, targets=targets, dropout=dropout, experts=experts)
    lora = LoraConfig(
        rank=4, alpha=8.0, target_modules=targets, dropout=dropout, target_parameters=experts
    )
    real = shape_of(build_decoder(config, "bf16", lora=lora))
    return with_adapters(shape_of(build_decoder(config, "bf16")), settings), real


@pytest.mark.parametrize("family", by_family(FAMILIES))
def test_adapters_are_those_of_the_skeleton(family: str) -> None:
    found, real = _shapes(family, (), 0.0)
    for mine, true in zip(found.blocks, real.blocks, strict=True):
        assert _tensors(mine) == _tensors(true)
        assert (mine.inner, mine.drops) == (true.inner, true.drops)
    assert found.is_adapted
    assert not found.trains_projection
    assert found.trained_params == real.trained_params < 0.2 * real.params


def test_targets_and_dropout_are_those_of_the_settings() -> None:
    found, real = _shapes("llama", ("q_proj", "*.mlp.*"), 0.1)
    assert [_tensors(block) for block in found.blocks] == [_tensors(block) for block in real.blocks]
    assert found.structures[0].drops
    assert len(found.structures[0].trained_part.tensors) == 2 * 4
    other, _ = _shapes("llama", ("k_proj",), 0.0)
    assert _tensors(other.structures[0]) != _tensors(real.structures[0]), "it would be noticed"


MIXTURES = ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "llama4_text"]


@pytest.mark.parametrize("family", MIXTURES)
def test_adapters_of_experts_are_those_of_the_skeleton(family: str) -> None:
    found, real = _shapes(family, (), 0.0, ("all-experts",))
    assert [_tensors(block) for block in found.blocks] == [_tensors(block) for block in real.blocks]
    without, _ = _shapes(family, (), 0.0)
    assert found.trained_params > without.trained_params
    mixture = next(block for block in found.structures if block.num_experts)
    plain = next(block for block in without.structures if block.num_experts)
    ranks = 2 * 4 * mixture.experts_per_token  # of two params, for each expert that a token uses
    assert mixture.adapted_widths[1] == plain.adapted_widths[1] + ranks


def test_experts_can_be_named_and_a_model_without_them_says_so() -> None:
    found, real = _shapes("mixtral", ("q_proj",), 0.0, ("experts.down_proj",))
    assert [_tensors(block) for block in found.blocks] == [_tensors(block) for block in real.blocks]
    assert len(found.structures[0].trained_part.tensors) == 4
    model = shape_of(build_decoder(tiny_config("llama"), "bf16"))
    with pytest.raises(ConfigError, match=r"lora\.experts: llama has no experts in one tensor"):
        with_adapters(model, LoraSettings(rank=4, experts=("all-experts",)))


def test_ranks_may_differ_by_name_and_by_layer() -> None:
    pattern = {"layers.1.mlp.down_proj": 8, "*.mlp.*": 2}
    plain = build_decoder(tiny_config("llama"), "bf16")
    lora = LoraConfig(rank=4, alpha=8.0, ranks=tuple(pattern.items()))
    real = shape_of(build_decoder(tiny_config("llama"), "bf16", lora=lora))
    found = with_adapters(shape_of(plain), LoraSettings(rank=4, rank_pattern=pattern))
    assert [_tensors(block) for block in found.blocks] == [_tensors(block) for block in real.blocks]
    assert found.layer_kinds == real.layer_kinds == (0, 1, 0, 0)
    with pytest.raises(ConfigError, match=r"lora: mlp\.fc1 in rank_pattern or alpha_pattern"):
        with_adapters(shape_of(plain), LoraSettings(rank=4, rank_pattern={"mlp.fc1": 8}))


def test_magnitudes_fp32_and_modules_that_are_saved_are_those_of_the_skeleton() -> None:
    config = tiny_config("llama", tie_word_embeddings=False)
    lora = LoraConfig(
        rank=4, alpha=8.0, dora=True, fp32=True, modules_to_save=("embed_tokens", "lm_head")
    )
    settings = LoraSettings(
        rank=4, dora=True, dtype="fp32", modules_to_save=("embed_tokens", "lm_head")
    )
    real = shape_of(build_decoder(config, "bf16", lora=lora))
    found = with_adapters(shape_of(build_decoder(config, "bf16")), settings)
    assert [_tensors(block) for block in found.blocks] == [_tensors(block) for block in real.blocks]
    assert found.trains_projection
    plain = with_adapters(shape_of(build_decoder(config, "bf16")), LoraSettings(rank=4))
    assert not plain.trains_projection


def test_a_target_that_matches_nothing_is_named() -> None:
    model = shape_of(build_decoder(tiny_config("llama"), "bf16"))
    with pytest.raises(ConfigError, match=r"lora\.targets: Wqkv matches none of the known"):
        with_adapters(model, LoraSettings(rank=4, targets=("Wqkv",)))


@pytest.mark.parametrize("patterns", PATTERNS, ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_frozen_params_are_those_of_the_skeleton(family: str, patterns: tuple[str, ...]) -> None:
    config = tiny_config(family, tie_word_embeddings=False)
    exact = shape_of(build_decoder(config, "bf16", patterns))
    plain = shape_of(build_decoder(config, "bf16"))
    assert with_frozen(plain, patterns) == exact != plain


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    model = shape_of(build_decoder(tiny_config("llama"), "bf16"), "llama")
    with pytest.raises(ConfigError, match=r"model\.frozen: model\.embd\* matches none .* llama\."):
        with_frozen(model, ("model.embd*",))
