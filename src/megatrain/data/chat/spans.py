"""Spans of characters as runs of tokens.

A token is inside a span if it has one of its characters. Reading every token's characters costs
more than a tenth of tokenizing, so a run is found by asking for the tokens at its two ends. Where
an end is not between two tokens, all of them are checked.

Laws (tests/data/chat/test_spans.py)
    1. Asking for the ends gives the same result as checking every token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatrain.data.chat.template import CharSpan

Runs = tuple[CharSpan, ...]
"""Tokens from begin to end, in order; no two runs touch."""


def tokens_in(span: CharSpan, encoding: Any, num_chars: int) -> CharSpan:
    """Return the tokens of a text of `num_chars` that contain a character of `span`."""
    if span[0] >= span[1]:
        return (0, 0)
    begin = encoding.char_to_token(span[0])
    end = len(encoding) if span[1] == num_chars else encoding.char_to_token(span[1])
    if begin is None or end is None or end <= begin or _is_unclear(span[1], end, encoding):
        return tokens_in_by_all(span, encoding)
    return (begin, end)


def _is_unclear(char: int, end: int, encoding: Any) -> bool:
    """Return whether token `end` began before `char`, or the one before it has no characters."""
    before = encoding.token_to_chars(end - 1)
    if before is None or before[0] >= before[1]:
        return True
    if end == len(encoding):
        return False
    after = encoding.token_to_chars(end)
    return after is None or after[0] < char


def tokens_in_by_all(span: CharSpan, encoding: Any) -> CharSpan:
    """Return the same by checking every token."""
    ranges = enumerate(_ranges(encoding.offsets))
    inside = [number for number, (a, b) in ranges if a < span[1] and b > span[0]]
    return (inside[0], inside[-1] + 1) if inside else (0, 0)


def _ranges(offsets: Iterable[CharSpan]) -> Iterator[CharSpan]:
    """Yield each token's characters. Tokenizers may trim a lone space to nothing: restore it."""
    before = 0
    for start, end in offsets:
        yield (start if end > start else min(before, start), end)
        before = end


def merged_runs(runs: Iterable[CharSpan]) -> Runs:
    """Return runs in order, those that touch as one, and none that is empty."""
    found: list[CharSpan] = []
    for begin, end in sorted(runs):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        elif begin < end:
            found.append((begin, end))
    return tuple(found)


def without(runs: Iterable[CharSpan], holes: Iterable[CharSpan]) -> Runs:
    """Return what is left of runs outside of `holes`."""
    left = tuple(runs)
    for hole in holes:
        parts = [part for a, b in left for part in ((a, min(b, hole[0])), (max(a, hole[1]), b))]
        left = tuple((a, b) for a, b in parts if a < b)
    return left


def moved(runs: Iterable[CharSpan], offset: int) -> list[CharSpan]:
    return [(begin + offset, end + offset) for begin, end in runs]


def clipped(runs: Iterable[CharSpan], start: int, stop: int) -> Runs:
    """Return the parts between `start` and `stop`, counted from `start`."""
    cut = [(max(begin, start), min(end, stop)) for begin, end in runs]
    return tuple((begin - start, end - start) for begin, end in cut if begin < end)


def mask_of(runs: Sequence[int] | NDArray[np.int32], length: int) -> NDArray[np.bool_]:
    """Return which of `length` tokens are in a run; `runs` is begin, end, begin..."""
    edges = np.zeros(length + 1, dtype=np.int8)
    edges[runs[0::2]] += 1
    edges[runs[1::2]] -= 1
    return np.cumsum(edges[:-1]).astype(np.bool_)
