"""The reward of the example: how many letters of an answer are right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def letters(
    rows: Sequence[Mapping[str, str]], texts: Sequence[str], ended: Sequence[bool]
) -> list[float]:
    """Return the share of right letters of each text; 0 without its end, or of another length."""
    given = zip(rows, texts, ended, strict=True)
    return [share(row["answer"], text) if is_whole else 0.0 for row, text, is_whole in given]


def share(wanted: str, text: str) -> float:
    if len(text) != len(wanted):
        return 0.0
    return sum(a == b for a, b in zip(text, wanted, strict=True)) / len(wanted)
