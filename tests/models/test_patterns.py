"""Patterns that match nothing are refused, with names that come near."""

from __future__ import annotations

import pytest

from megatrain.errors import ConfigError
from megatrain.models.build import build_decoder
from megatrain.models.patterns import check_patterns
from testkit.families import tiny_config

NAMES = build_decoder(tiny_config("llama", tie_word_embeddings=True), "bf16").names


@pytest.mark.parametrize(
    "pattern", ["model.embed_tokens.weight", "model.embed_*", "*.q_proj.*", "model.layers.0.*", "*"]
)
def test_a_pattern_that_matches_passes(pattern: str) -> None:
    check_patterns("model.frozen", (pattern,), NAMES)


@pytest.mark.parametrize(
    ("pattern", "way_out"),
    [
        ("model.embed_token.*", "Similar names: model.embed_tokens.weight"),
        (
            "model.layers.*.attn.q_proj.weight",
            "Similar names: model.layers.*.self_attn.q_proj.weight",
        ),
        ("Model.embed_tokens.weight", "Similar names: model.embed_tokens.weight"),
        ("lm_head.*", "The model ties it to model.embed_tokens.weight: use that name."),
        ("xyz", "Its parameters have names like model.embed_tokens.weight, model.layers.*."),
    ],
)
def test_a_pattern_that_matches_nothing_is_refused(pattern: str, way_out: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_patterns("model.frozen", ("*norm*", pattern), NAMES)
    expected = f"model.frozen: {pattern} matches no parameter of the model. {way_out}"
    assert str(caught.value).startswith(expected)
