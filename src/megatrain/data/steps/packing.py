"""Complete documents combined into packed rows of at most `max_length` tokens.

Best fit, longest first, within a window: each document goes where least room is left over. A window
is a stretch of consecutive positions of the order and holds all documents of the rows there, so its
packed rows are a function of seed, epoch and window alone: nothing has to be replayed to know them.
No document is cut; isolation comes from position ids that restart at each document
(micro_batches.py). If the order of rows is kept, a packed row takes the next documents as
long as they fit.

Laws (tests/data/steps/test_packing.py)
    1. Every document of a window is in exactly one packed row; none is longer than `max_length`.
    2. Packed rows of log-normal documents are at least 97 % full.
    3. The same window gives the same packed rows, in any process.
    4. Without shuffling, documents come in the order of the rows.
    5. Documents that belong together are neighbors in one packed row.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

from megatrain.data.steps.order import Indices, Order, Permutation
from megatrain.data.tokens.documents import Documents, documents_of
from megatrain.errors import DataError

WINDOW_ROWS = 2048
"""Rows in a window: enough documents to fill packed rows, packed in some 6 ms."""


def pack(lengths: Sequence[int], max_length: int) -> list[list[int]]:
    """Return packed rows as lists of places in `lengths`, longest document first."""
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


def pack_in_order(lengths: Sequence[int], max_length: int) -> list[list[int]]:
    """Return packed rows of consecutive places."""
    rows: list[list[int]] = []
    left = 0
    for place, length in enumerate(lengths):
        if length > left:
            rows.append([])
            left = max_length
        rows[-1].append(place)
        left -= length
    return rows


class Windows:
    """The packed rows of every window of every epoch."""

    def __init__(
        self,
        order: Order,
        documents: Documents,
        max_length: int,
        *,
        packing: bool,
        shuffle: bool = True,
        num_rows: int,
        seed: int,
        together: int = 1,
    ) -> None:
        """`num_rows` per window; `together`: how many documents of a row are never separated.

        Packed rows are then as long as the longest of them together, if `max_length` is less.
        Raises DataError if a document is longer than `max_length`.
        """
        lengths = documents.lengths
        longest = int(lengths.max(initial=0))
        if longest > max_length:
            raise DataError(
                f"document {int(lengths.argmax())} has {longest} tokens, rows have {max_length}; "
                "prepare the data with this max_length"
            )
        self.order = order
        self.lengths = lengths
        self.max_length = max_length
        units = lengths.reshape(-1, together).sum(1) if together > 1 else lengths
        self._room = max(max_length, int(units.max(initial=0)))
        self._together = together
        self.packing = packing
        self.shuffle = shuffle
        self.num_rows = num_rows
        self.num_windows = -(-order.size // num_rows)
        self._row_starts = documents.row_starts
        self._seed = seed

    def rows(self, epoch: int, window: int) -> list[Indices]:
        """Return the window's packed rows, each as the documents it holds."""
        rows = self.order.rows(epoch, window * self.num_rows, (window + 1) * self.num_rows)
        units = documents_of(rows, self._row_starts).reshape(-1, self._together)
        if not self.packing:
            return list(units)
        lengths = self.lengths[units].sum(1).tolist()
        if not self.shuffle:
            return [units[row].reshape(-1) for row in pack_in_order(lengths, self._room)]
        packed = pack(lengths, self._room)
        # Packing puts long documents first; shuffled, no step sees one kind of length only.
        places = Permutation(len(packed), self._seed, epoch, window)(
            np.arange(len(packed), dtype=np.int64)
        )
        return [units[packed[place]].reshape(-1) for place in places]

    def contents(self) -> tuple[object, ...]:
        """Return everything that decides the rows of a position, but the seed."""
        order = self.order
        kind = type(order).__name__, order.size, order.rows(0, 0, 64).tolist()
        lengths = hashlib.blake2b(self.lengths.tobytes())
        lengths.update(self._row_starts.tobytes())
        packed = (self.max_length, self.packing, self.shuffle, self.num_rows)
        return kind, lengths.hexdigest(), packed
