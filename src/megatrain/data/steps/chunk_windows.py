"""Windows of data that is read in chunks: a two-level order, without a list of rows.

The chunks of an epoch are in a seeded order, as rows of other data are (order.py). Each 32 of them
are a window. Its documents are packed together and its packed rows are shuffled, so the rows of a
step come from 32 places of the data, and which ones is a function of seed, epoch and window alone.
A window is packed when it is reached; the chunks of the next are read meanwhile.

Laws (tests/data/steps/test_chunk_windows.py)
    1. Every document of every chunk of the order comes exactly once per epoch.
    2. The same window gives the same packed rows, whatever was read before.
    3. To reach a window, its own chunks are read and no others.
"""

from __future__ import annotations

import numpy as np

from megatrain.data.chunks.chunks import WINDOW_CHUNKS, ChunkedDocuments, Kept
from megatrain.data.steps.order import Indices, MixedOrder, Order
from megatrain.data.steps.packing import pack, pack_in_order, shuffled


class ChunkOrder:
    """The chunk at each position of an epoch: sources by weight, without held-out chunks."""

    def __init__(
        self, kept: list[Kept], weights: list[float], seed: int, *, shuffle: bool = True
    ) -> None:
        self._kept = tuple(kept)
        self._firsts = np.cumsum([0, *(one.num_chunks for one in kept)])
        sizes = [one.num_chunks for one in kept]
        self._order = MixedOrder(sizes, weights, seed, shuffle=shuffle)
        self.size = self._order.size
        self.counts = self._order.counts

    def rows(self, epoch: int, start: int, stop: int) -> Indices:
        """Return the chunks at positions [start, stop) of `epoch`."""
        places = self._order.rows(epoch, start, stop)
        numbers = np.searchsorted(self._firsts, places, side="right") - 1
        chunks = np.empty_like(places)
        for number, kept in enumerate(self._kept):
            inside = numbers == number
            chunks[inside] = kept.chunks(places[inside] - self._firsts[number])
        return chunks


class ChunkWindows:
    """The packed rows of every window of every epoch."""

    def __init__(
        self,
        order: Order,
        documents: ChunkedDocuments,
        max_length: int,
        *,
        packing: bool,
        shuffle: bool,
        seed: int,
    ) -> None:
        self.order = order
        self.packing = packing
        self.num_windows = -(-order.size // WINDOW_CHUNKS)
        self._documents = documents
        self._max_length, self._shuffle, self._seed = max_length, shuffle, seed

    def rows(self, epoch: int, window: int) -> list[Indices]:
        """Return the window's packed rows, each as the documents it holds; waits for its chunks."""
        chunks = self._chunks(epoch, window)
        self._documents.expect(chunks)
        # A chunk may come twice, if its source has a weight over 1.
        numbers = np.concatenate([self._documents.numbers(int(chunk)) for chunk in chunks])
        self._documents.expect(self._chunks(epoch, window + 1))
        lengths = self._documents.lengths_of(numbers).tolist()
        if not self._shuffle:
            if not self.packing:
                return [numbers[place : place + 1] for place in range(len(numbers))]
            return [numbers[row] for row in pack_in_order(lengths, self._max_length)]
        packed = (
            pack(lengths, self._max_length)
            if self.packing
            else [[place] for place in range(len(numbers))]
        )
        if not packed:
            return []
        places = shuffled(len(packed), self._seed, epoch, window)
        return [numbers[packed[place]] for place in places]

    def contents(self) -> tuple[object, ...]:
        """Return everything that decides the rows of a position, but the seed."""
        order = self.order.size, self.order.rows(0, 0, 64).tolist()
        packed = self._max_length, self.packing, self._shuffle, WINDOW_CHUNKS
        return "chunks", order, self._documents.mark, packed

    def _chunks(self, epoch: int, window: int) -> Indices:
        if window >= self.num_windows:  # the first of the next epoch comes after the last
            epoch, window = epoch + 1, 0
        return self.order.rows(epoch, window * WINDOW_CHUNKS, (window + 1) * WINDOW_CHUNKS)
