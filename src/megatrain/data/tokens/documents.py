"""Tokenized documents, and the rows that they came from.

A row is a record of the file; a document is a training sequence. Most rows are one document. A chat
whose template rewrites earlier turns becomes several, and so does a text that is split. They are
consecutive, so `row_starts` describes them completely.

Laws (tests/data/tokens/test_documents.py)
    1. A subset and a join keep the documents of each row together, in order.
    2. No document of a held-out row is trained on, and every row is on one side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megatrain.data.media.placed import DocumentMedia, media_of
from megatrain.data.steps.order import Indices, Permutation
from megatrain.errors import DataError

Lengths = NDArray[np.int64]


class Documents(Protocol):
    """Documents by number."""

    @property
    def lengths(self) -> Lengths:
        """Tokens of each document. (documents,)"""

    @property
    def row_starts(self) -> Indices:
        """The first document of each row, and the number of documents. (rows + 1,)"""

    def tokens(self, document: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Return a document's tokens, and which of them are trained."""


def num_rows(documents: Documents) -> int:
    """Return how many rows have a document."""
    return len(documents.row_starts) - 1


def documents_of(rows: Indices, row_starts: Indices) -> Indices:
    """Return the documents of these rows, row after row."""
    firsts = row_starts[rows]
    counts = row_starts[rows + 1] - firsts
    before = np.cumsum(counts) - counts
    return np.repeat(firsts - before, counts) + np.arange(int(counts.sum()), dtype=np.int64)


class Subset:
    """The documents of some rows, numbered from 0."""

    def __init__(self, documents: Documents, rows: Indices) -> None:
        starts = documents.row_starts
        self._documents = documents
        self.rows = rows
        self._chosen = documents_of(rows, starts)
        self.lengths: Lengths = documents.lengths[self._chosen]
        self.row_starts: Indices = np.cumsum(np.append(0, starts[rows + 1] - starts[rows]))

    def tokens(self, document: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Return a document's tokens, and which of them are trained."""
        return self._documents.tokens(int(self._chosen[document]))

    def media(self, document: int) -> DocumentMedia | None:
        """Return the media of a document; None: it has none."""
        return media_of(self._documents, int(self._chosen[document]))


class JoinedDocuments:
    """Several sources as one, numbered through, in the numbering of `MixedOrder`."""

    def __init__(self, parts: Sequence[Documents]) -> None:
        self.parts = tuple(parts)
        self.lengths: Lengths = np.concatenate([part.lengths for part in parts])
        self._firsts = np.cumsum([0, *(len(part.lengths) for part in parts)])
        starts = [
            part.row_starts[:-1] + first for part, first in zip(parts, self._firsts, strict=False)
        ]
        self.row_starts: Indices = np.concatenate([*starts, self._firsts[-1:]])

    def tokens(self, document: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Return a document's tokens, and which of them are trained."""
        part = int(np.searchsorted(self._firsts, document, side="right")) - 1
        return self.parts[part].tokens(document - int(self._firsts[part]))

    def media(self, document: int) -> DocumentMedia | None:
        """Return the media of a document; None: it has none."""
        part = int(np.searchsorted(self._firsts, document, side="right")) - 1
        return media_of(self.parts[part], document - int(self._firsts[part]))


def hold_out(
    documents: Documents, fraction: float, seed: int, where: str = "the data"
) -> tuple[Subset, Subset]:
    """Return the documents to train on, and those of a random fraction of rows that is held out.

    Raises DataError if there are too few rows for that.
    """
    size = num_rows(documents)
    count = math.ceil(fraction * size)  # as datasets.train_test_split
    if count >= size:
        raise DataError(f"{where}: {size} rows are too few to hold out {count} of them")
    chosen = Permutation(size, seed, -2)(np.arange(size, dtype=np.int64))
    return Subset(documents, np.sort(chosen[count:])), Subset(documents, np.sort(chosen[:count]))
