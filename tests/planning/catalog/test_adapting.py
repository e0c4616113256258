"""Adapters by sizes alone are those of the real skeleton."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from megatrain.config.sections import LoraSettings
from megatrain.errors import ConfigError
from megatrain.models.adapters.lora import Lora
from megatrain.models.build import build_decoder
from megatrain.planning.catalog.adapting import with_adapters
from megatrain.planning.catalog.families import FAMILIES, shape_from_config
from megatrain.planning.model.shapes import BlockShape, ModelShape
from megatrain.planning.model.skeleton import shape_of
from testkit.cases import by_family
from testkit.families import tiny_config


def _sizes(block: BlockShape) -> Counter[tuple[tuple[int, ...], bool, str, str]]:
    """Return what it has; some families turn their experts round."""
    tensors = block.tensors
    return Counter((tuple(sorted(t.shape)), t.trained, t.role, t.adapts) for t in tensors)


def _shapes(family: str, targets: tuple[str, ...], dropout: float) -> tuple[ModelShape, ModelShape]:
    """Return a model by its sizes, and by its skeleton."""
    config = tiny_config(family)
    fields = json.loads(json.dumps(config.to_dict(), default=str)) | {"model_type": family}
    settings = LoraSettings(rank=4, targets=targets, dropout=dropout)
    lora = Lora(rank=4, alpha=8.0, targets=targets, dropout=dropout)
    real = shape_of(build_decoder(config, "bf16", lora=lora))
    return with_adapters(shape_from_config(fields), settings), real


@pytest.mark.parametrize("family", by_family(FAMILIES))
def test_adapters_are_those_of_the_skeleton(family: str) -> None:
    found, real = _shapes(family, (), 0.0)
    for mine, true in zip(found.blocks, real.blocks, strict=True):
        assert _sizes(mine) == _sizes(true)
        assert mine.matmul_flops_per_token == true.matmul_flops_per_token
        assert mine.gradient_flops_per_token == true.gradient_flops_per_token
        assert (mine.inner, mine.drops) == (true.inner, true.drops)
    assert found.is_adapted
    assert not found.trains_projection
    assert found.trained_params == real.trained_params < 0.2 * real.params


def test_targets_and_dropout_are_those_of_the_settings() -> None:
    found, real = _shapes("llama", ("q_proj", "*.mlp.*"), 0.1)
    assert [_sizes(block) for block in found.blocks] == [_sizes(block) for block in real.blocks]
    assert found.structures[0].drops
    assert len(found.structures[0].trained_part.tensors) == 2 * 4
    assert _sizes(_shapes("llama", ("k_proj",), 0.0)[0].structures[0]) != _sizes(
        real.structures[0]
    ), "another target would be noticed"


def test_a_target_that_matches_nothing_is_named() -> None:
    model = shape_from_config(tiny_config("llama").to_dict())
    with pytest.raises(ConfigError, match=r"lora\.targets: Wqkv matches none of the known"):
        with_adapters(model, LoraSettings(rank=4, targets=("Wqkv",)))
