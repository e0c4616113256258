"""Documents whose tokens say which document they are, for tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from megatrain.batch import MicroBatch

SPAN = 10_000
"""Token `d * SPAN + k` is token k of document d: no token occurs twice."""


class MadeDocuments:
    """Document d has `lengths[d]` tokens; even tokens, the first too, and the last are trained.

    Each is a row, unless `counts` says how many documents each row has.
    """

    def __init__(self, lengths: Sequence[int], counts: Sequence[int] | None = None) -> None:
        self.lengths = np.array(lengths, dtype=np.int64)
        self.row_starts = np.cumsum([0, *([1] * len(lengths) if counts is None else counts)])

    def tokens(self, document: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        places = np.arange(self.lengths[document], dtype=np.int32)
        return places + document * SPAN, (places % 2 == 0) | (places == places[-1])


def log_normal(count: int, longest: int, seed: int = 0) -> MadeDocuments:
    lengths = np.random.default_rng(seed).lognormal(np.log(longest / 6), 0.8, count)
    return MadeDocuments(np.clip(lengths.astype(int), 2, longest).tolist())


def real_tokens(batch: Iterable[MicroBatch]) -> list[int]:
    tokens: list[int] = []
    for micro in batch:
        mask = micro.attention_mask
        ids = micro.input_ids if mask is None else micro.input_ids[mask.bool()]
        tokens += ids.flatten().tolist()
    return tokens


def documents_in(batch: Iterable[MicroBatch]) -> Counter[int]:
    """How often each document begins in a batch."""
    return Counter(token // SPAN for token in real_tokens(batch) if token % SPAN == 0)
