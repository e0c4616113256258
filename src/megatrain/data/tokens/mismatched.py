"""Completions that are marked good or bad, each beside another row's completion of its prompt.

KTO compares a completion with what the model has gained on average over the reference, and TRL
estimates that on prompts with completions that do not belong to them:

    (prompt 1, completion 1), ..., (prompt n, completion n)
    (prompt 1, completion n), (prompt 2, completion 1), ..., (prompt n, completion n - 1)

for the n rows of a batch in the order of the file. Nothing of it is stored: the second document of
a row is put together from the tokens of two rows whenever it is asked for. One that is longer than
`max_length` is cut, as in TRL, whatever becomes of rows that are too long by themselves.

Laws (tests/data/tokens/test_preferences.py)
    1. Row n is documents 2n, its own, and 2n + 1: its prompt with the completion of the row before
       it, or of the last of its group.
    2. Each completion of a group is the second of exactly one row; no row has its own twice.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatrain.data.media.placed import DocumentMedia
from megatrain.data.steps.order import Indices
from megatrain.data.tokens.documents import Lengths
from megatrain.data.tokens.prepared import PreparedData
from megatrain.errors import ConfigError, DataError


class MismatchedDocuments:
    """Two documents for each of a source's."""

    def __init__(
        self, prepared: PreparedData, max_length: int, group_rows: int | None = None
    ) -> None:
        """`group_rows`: completions are exchanged among so many rows; None: among all.

        Raises DataError if there is one row only, and ConfigError if a group has only one.
        """
        lengths, begins = prepared.lengths, prepared.prompt_lengths
        if group_rows == 1:
            raise ConfigError(
                "train.batch_rows is 1: kto compares with completions of other rows. Set it to 2 "
                "or more."
            )
        if len(lengths) < 2:
            raise DataError(
                f"{prepared.card['source']} has one row to train on: kto compares with "
                "completions of other rows, so it needs at least two"
            )
        self._prepared, self._begins, self._max_length = prepared, begins, max_length
        self._others = others_of(len(lengths), group_rows or len(lengths))
        second = np.minimum(begins + (lengths - begins)[self._others], max_length)
        self.lengths: Lengths = np.stack([lengths, second], axis=1).reshape(-1)
        self.row_starts: Indices = np.arange(0, len(self.lengths) + 1, 2)

    def tokens(self, document: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Return a document's tokens, and which of them are trained."""
        row, is_second = divmod(document, 2)
        ids, trained = self._prepared.tokens(row)
        if not is_second:
            return ids, trained
        other = int(self._others[row])
        other_ids, other_trained = self._prepared.tokens(other)
        prompt, begin = int(self._begins[row]), int(self._begins[other])
        both = np.concatenate([ids[:prompt], other_ids[begin:]])
        marks = np.concatenate([np.zeros(prompt, dtype=np.bool_), other_trained[begin:]])
        return both[: self._max_length], marks[: self._max_length]

    def media(self, document: int) -> DocumentMedia | None:
        """Return the media of a document: those of its prompt, and of the completion."""
        row, is_second = divmod(document, 2)
        own = self._prepared.media(row)
        if not is_second:
            return own
        other = int(self._others[row])
        prompt, begin = int(self._begins[row]), int(self._begins[other])
        lengths, theirs = self._prepared.lengths, self._prepared.media(other)
        before, after = _types(own, int(lengths[row])), _types(theirs, int(lengths[other]))
        found = [*_between(own, 0, prompt, 0), *_between(theirs, begin, None, prompt - begin)]
        if not found:
            return None
        return DocumentMedia(
            digests=tuple(digest for digest, _ in found),
            begins=tuple(place for _, place in found),
            token_types=np.concatenate([before[:prompt], after[begin:]])[: self._max_length],
        )


def _types(media: DocumentMedia | None, length: int) -> NDArray[np.uint8]:
    return np.zeros(length, dtype=np.uint8) if media is None else media.token_types


def _between(
    media: DocumentMedia | None, begin: int, end: int | None, move: int
) -> list[tuple[str, int]]:
    """Return the media that begin there, each with its place in the new document."""
    if media is None:
        return []
    found = zip(media.digests, media.begins, strict=True)
    return [(one, at + move) for one, at in found if begin <= at and (end is None or at < end)]


def others_of(num_rows: int, group_rows: int) -> Indices:
    """Return the row whose completion is the second of each row.

    It is the row before it; for the first of a group, the last of it. A last group of one row,
    which has no other, takes the row before that.
    """
    rows = np.arange(num_rows, dtype=np.int64)
    others = rows - 1
    firsts = rows[::group_rows]
    others[firsts] = np.minimum(firsts + group_rows, num_rows) - 1
    if num_rows % group_rows == 1:
        others[-1] = num_rows - 2
    return others
