"""What a pattern freezes of a model that is known by its sizes is what it freezes of the model."""

from __future__ import annotations

import pytest

from megatrain.errors import ConfigError
from megatrain.models.build import build_decoder
from megatrain.planning.catalog.families import shape_from_config
from megatrain.planning.catalog.freezing import with_frozen
from megatrain.planning.model.shapes import ModelShape
from megatrain.planning.model.skeleton import shape_of
from testkit.families import tiny_config

PATTERNS = [
    ("model.embed_tokens*",),
    ("lm_head*",),
    ("*embed_tokens.weight", "*lm_head.weight"),
    ("model.layers.0.*",),
    ("model.layers.*.mlp.*", "model.layers.1.self_attn.q_proj.weight"),
]


def _trained(model: ModelShape) -> list[int]:
    """Trained elements of each block's matrices and tables."""
    return [
        sum(t.num_elements for t in block.tensors if t.trained and len(t.shape) > 1)
        for block in model.blocks
    ]


@pytest.mark.parametrize("patterns", PATTERNS, ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_as_in_the_model_itself(family: str, patterns: tuple[str, ...]) -> None:
    config = tiny_config(family, tie_word_embeddings=False)
    exact = shape_of(build_decoder(config, "bf16", patterns))
    known = with_frozen(shape_from_config(config.to_dict()), patterns)
    assert _trained(known) == _trained(exact)
    assert _trained(known) != _trained(shape_from_config(config.to_dict()))


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    model = shape_from_config(tiny_config("llama").to_dict(), "llama")
    with pytest.raises(ConfigError, match=r"model\.frozen: model\.embd\* matches none .* llama\."):
        with_frozen(model, ("model.embd*",))
