"""Rows that are tokens already, as a tokenizer or a collator made them.

    {"input_ids": [1, 5, 7, 2], "labels": [-100, -100, 7, 2], "attention_mask": [1, 1, 1, 1]}

Labels are as in transformers: the token itself where it is trained, -100 elsewhere; without them
every token is trained. A loss mask says the same by 1 and 0; of a row with both, tokens are trained
that both train. An attention mask may leave out padding at either end. No token is added: a
text has the end that it came with. Lists, arrays and tensors are the same.

Laws (tests/data/rows/test_tokens.py)
    1. Tokens and trained tokens are those of the row, without its padding.
    2. A label other than its token and -100, or a hole in the mask, is a bad row, and not trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatrain.data.rows.cells import EMPTY, WRONG_TYPE, decoded, kind_of, read_cell
from megatrain.data.rows.skipped import BadRow

TOKEN_COLUMNS = ("input_ids", "labels", "loss_mask", "attention_mask")
OTHER_LABELS = "labels that are not the row's tokens"
HOLES = "attention mask with holes"
_UNTRAINED = -100
_LARGEST = 2**31 - 1


def read_token_row(value: Mapping[str, Any]) -> tuple[Sequence[int], tuple[tuple[int, int], ...]]:
    """Return a row's tokens, and begin and end of each run of trained ones. Raises BadRow."""
    ids = _numbers(read_cell(value, "input_ids"), "input_ids", least=0)
    labels = value.get("labels")
    given = ids if labels is None else _numbers(labels, "labels", least=_UNTRAINED, like=ids)
    if (marks := value.get("loss_mask")) is not None:
        chosen = _numbers(marks, "loss_mask", least=0, like=ids)
        if chosen.max() > 1:
            raise BadRow(WRONG_TYPE, f"loss_mask has {chosen.max()}, not 0 or 1")
        given = np.where(chosen == 1, given, _UNTRAINED)
    if (mask := value.get("attention_mask")) is not None:
        real = _real_part(_numbers(mask, "attention_mask", least=0, like=ids))
        ids, given = ids[real], given[real]
    trained = given != _UNTRAINED
    if (wrong := np.flatnonzero(trained & (given != ids))).size:
        at = int(wrong[0])
        raise BadRow(OTHER_LABELS, f"label {at} is {given[at]}, the token {ids[at]}")
    edges = np.flatnonzero(np.diff(trained, prepend=False, append=False))
    runs = tuple((int(begin), int(end)) for begin, end in edges.reshape(-1, 2))
    return ids.tolist(), runs


def _real_part(mask: NDArray[np.int64]) -> slice:
    """Return the tokens that are not padding."""
    real = np.flatnonzero(mask)
    if not real.size:
        raise BadRow(EMPTY, "attention_mask")
    part = slice(int(real[0]), int(real[-1]) + 1)
    if len(real) != part.stop - part.start:
        raise BadRow(HOLES, f"{len(real)} of {part.stop - part.start} tokens")
    return part


def _numbers(
    value: object, name: str, *, least: int, like: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """Return one whole number for each token. (tokens,)"""
    value = decoded(value)
    plain = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(plain, Sequence) or isinstance(plain, str | bytes):
        raise BadRow(WRONG_TYPE, f"{name} is {kind_of(plain)}, not a list")
    if not plain:
        raise BadRow(EMPTY, name)
    if not all(type(number) is int and least <= number <= _LARGEST for number in plain):
        odd = next(n for n in plain if type(n) is not int or not least <= n <= _LARGEST)
        raise BadRow(WRONG_TYPE, f"{name} has {str(odd)[:40]}, not a token")
    if like is not None and len(plain) != len(like):
        raise BadRow(WRONG_TYPE, f"{name} has {len(plain)} numbers, input_ids {len(like)}")
    return np.array(plain, dtype=np.int64)
