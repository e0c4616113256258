"""Whole documents put together into rows of at most `max_length` tokens.

Best fit, longest first, within a window of documents: each goes where least room is left over.
Windows are consecutive positions of the order, so a window's rows are a function of seed, epoch and
window alone: nothing has to be replayed to know them. No document is cut; isolation comes from
position ids that start anew at each document (micro_batches.py).

Laws (tests/data/test_packing.py)
    1. Every document of a window is in exactly one row; no row is longer than `max_length`.
    2. Rows of log-normal documents are at least 97 % full.
    3. The same window gives the same rows, in any process.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatrain.data.order import Indices, Order, Permutation
from megatrain.errors import DataError

WINDOW = 2048
"""Documents in a window: enough to fill rows, packed in some 6 ms."""

Lengths = NDArray[np.int64]


def pack(lengths: Sequence[int], max_length: int) -> list[list[int]]:
    """Return rows as lists of places in `lengths`, longest document first."""
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, row), sorted
    for place in sorted(range(len(lengths)), key=lambda place: (-lengths[place], place)):
        length = lengths[place]
        at = bisect_left(room, (length, 0))
        if at < len(room):
            left, row = room.pop(at)
            rows[row].append(place)
        else:
            left, row = max_length, len(rows)
            rows.append([place])
        if left > length:
            insort(room, (left - length, row))
    return rows


class Windows:
    """The rows of every window of every epoch."""

    def __init__(
        self, order: Order, lengths: Lengths, max_length: int, *, packing: bool, seed: int
    ) -> None:
        """Raise DataError if a document is longer than `max_length`."""
        longest = int(lengths.max(initial=0))
        if longest > max_length:
            raise DataError(
                f"document {int(lengths.argmax())} has {longest} tokens, rows have {max_length}; "
                "prepare the data for this length"
            )
        self.order = order
        self.lengths = lengths
        self.max_length = max_length
        self.packing = packing
        self.num_windows = -(-order.size // WINDOW)
        self._seed = seed

    def rows(self, epoch: int, window: int) -> list[Indices]:
        """Return the window's rows, each as the documents it holds."""
        documents = self.order.rows(epoch, window * WINDOW, (window + 1) * WINDOW)
        if not self.packing:
            return list(documents[:, None])
        packed = pack(self.lengths[documents].tolist(), self.max_length)
        # Packing puts long documents first; shuffled, no step sees one kind of length only.
        shuffle = Permutation(len(packed), self._seed, epoch, window)
        places = shuffle(np.arange(len(packed), dtype=np.int64))
        return [documents[packed[place]] for place in places]
