"""Laws of key_values.py."""

from __future__ import annotations

import functools

import pytest
import torch
from transformers import PreTrainedModel

from megatrain.models import key_values
from megatrain.models.key_values import TextCache
from testkit.spoken import spoken_model

FAMILIES = ["llama", "gemma3_text", "gpt2"]
"""All columns; windows of 16 beside them; positions that are learned."""
TEXTS = ([5, 6, 7] * 8, [9, 10, 11], [12, 13, 14, 15, 16])


@functools.cache
def model(family: str) -> PreTrainedModel:
    return spoken_model(family, seed=3)


def read(plain: PreTrainedModel, cache: TextCache, rows: list[list[int]]) -> torch.Tensor:
    """Return the logits behind rows of tokens that follow what a cache holds."""
    with torch.no_grad():
        inputs = cache.inputs(len(rows[0]))
        logits: torch.Tensor = plain(input_ids=torch.tensor(rows), **inputs).logits[:, -1]
    return logits


def caches(plain: PreTrainedModel) -> list[TextCache]:
    """Return a cache for each text."""
    made = [TextCache(plain) for _ in TEXTS]
    for cache, text in zip(made, TEXTS, strict=True):
        read(plain, cache, [text])
    return made


def whole(plain: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = plain(input_ids=torch.tensor([tokens])).logits[0, -1]
    return logits


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_that_join_and_leave_are_read_on_as_they_would_be_alone(family: str) -> None:
    plain = model(family)
    together = TextCache.of([(cache, [0]) for cache in caches(plain)])
    found = read(plain, together, [[20], [21], [22]])
    for row, (text, token) in enumerate(zip(TEXTS, (20, 21, 22), strict=True)):
        torch.testing.assert_close(found[row], whole(plain, [*text, token]), rtol=1e-4, atol=1e-4)
    left = TextCache.of([(together, [2, 1])])  # without the longest
    assert left.length == len(TEXTS[2]) + 1
    found = read(plain, left, [[30], [31]])
    for row, tokens in enumerate(([*TEXTS[2], 22, 30], [*TEXTS[1], 21, 31])):
        torch.testing.assert_close(found[row], whole(plain, tokens), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cache_of_rows_has_their_bits_and_no_more_columns(family: str) -> None:
    plain = model(family)
    alone = caches(plain)
    together = TextCache.of([(alone[1], [0]), (alone[2], [0])])
    read(plain, together, [[20], [21]])
    for layer, (short, long) in enumerate(zip(alone[1].layers, alone[2].layers, strict=True)):
        keys = together.layers[layer].keys
        assert keys.shape[2] == len(TEXTS[2]) + 1
        assert torch.equal(keys[0, :, 2:-1], short.keys[0])
        assert torch.equal(keys[1, :, :-1], long.keys[0])


def test_a_row_that_is_shifted_by_a_column_would_be_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, rows = model("llama"), key_values._rows
    monkeypatch.setattr(key_values, "_rows", lambda parts, width: rows(parts, width).roll(1, 2))
    together = TextCache.of([(cache, [0]) for cache in caches(plain)])
    found = read(plain, together, [[20], [21], [22]])
    assert not torch.allclose(found[1], whole(plain, [*TEXTS[1], 21]), rtol=1e-2, atol=1e-2)
