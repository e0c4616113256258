"""The reward of the example: how many letters of an answer are right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

END = 1
"""The token that ends an answer."""


def letters(
    completions: Sequence[str],
    completion_ids: Sequence[Sequence[int]],
    answer: Sequence[str],
    **_: Any,
) -> list[float]:
    """Return the share of right letters of each text; 0 without its end, or of another length."""
    given = zip(completions, completion_ids, answer, strict=True)
    return [share(wanted, text) if ids[-1] == END else 0.0 for text, ids, wanted in given]


def share(wanted: str, text: str) -> float:
    if len(text) != len(wanted):
        return 0.0
    return sum(a == b for a, b in zip(text, wanted, strict=True)) / len(wanted)
