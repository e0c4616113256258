"""Rows of tokens: what the row says, without its padding; anything odd is a bad row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megatrain.data.rows.columns import detect_format
from megatrain.data.rows.rows import canonical
from megatrain.data.rows.skipped import BadRow

SHAPE = detect_format([{"input_ids": [1, 2]}])


def _row(**cells: Any) -> tuple[list[int], tuple[tuple[int, int], ...]]:
    row = canonical(cells, SHAPE)
    return list(row.token_ids), row.trained_runs


@pytest.mark.parametrize("form", [list, np.array, torch.tensor, str])
def test_tokens_and_trained_tokens_are_those_of_the_row(form: Any) -> None:
    ids, labels = form([5, 6, 7, 8]), form([-100, 6, -100, 8])
    assert _row(input_ids=ids) == ([5, 6, 7, 8], ((0, 4),))
    assert _row(input_ids=ids, labels=labels) == ([5, 6, 7, 8], ((1, 2), (3, 4)))
    assert _row(input_ids=ids, loss_mask=form([0, 1, 1, 0])) == ([5, 6, 7, 8], ((1, 3),))
    both = _row(input_ids=ids, labels=labels, loss_mask=form([0, 0, 1, 1]))
    assert both == ([5, 6, 7, 8], ((3, 4),))


@pytest.mark.parametrize(
    ("mask", "kept"), [([1, 1, 1, 0], [5, 6, 7]), ([0, 0, 1, 1], [7, 8]), ([1] * 4, [5, 6, 7, 8])]
)  # fmt: skip
def test_padding_is_left_out(mask: list[int], kept: list[int]) -> None:
    assert _row(input_ids=[5, 6, 7, 8], attention_mask=mask) == (kept, ((0, len(kept)),))


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"input_ids": [5, 6], "labels": [5, 7]}, "labels that are not the row's tokens"),
        ({"input_ids": [5, 6], "labels": [6]}, "wrong type"),
        ({"input_ids": [5, 6], "loss_mask": [0, 2]}, "wrong type"),
        ({"input_ids": [5, 6, 7], "attention_mask": [1, 0, 1]}, "attention mask with holes"),
        ({"input_ids": [5, 6], "attention_mask": [0, 0]}, "empty"),
        ({"input_ids": []}, "empty"),
        ({"input_ids": [5, -1]}, "wrong type"),
        ({"input_ids": [5, 2**40]}, "wrong type"),
        ({"input_ids": [5, 6.0]}, "wrong type"),
        ({"input_ids": [[5, 6]]}, "wrong type"),
        ({"input_ids": "words"}, "wrong type"),
        ({"text": "words"}, "other shape"),
    ],
)
def test_what_is_not_a_row_of_tokens_is_bad(cells: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRow) as bad:
        _row(**cells)
    assert bad.value.reason == reason


def test_other_columns_are_named_as_unused() -> None:
    assert canonical({"input_ids": [1, 2], "source": "x"}, SHAPE).unused == ("source",)
