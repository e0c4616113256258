"""A chunk of raw rows to documents: what each worker of `prepare` does, with nothing of its own.

Laws (tests/data/test_prepare.py)
    1. No document is longer than `max_length` or without a target.
    2. Every row is bad, or each of its documents is kept or counted as dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megatrain.data.formats import Format
from megatrain.data.masks import Encoder, Tokens
from megatrain.data.rows import Row, canonical
from megatrain.data.skipped import BadRow, Skipped
from megatrain.errors import DataError

Overlong = Literal["drop", "truncate", "split"]
NoTarget = Literal["drop", "error"]

TOO_LONG = "longer than max_length"
NO_TARGET = "no trained token"


@dataclass(slots=True, kw_only=True)
class Encoded:
    """The documents of a chunk, end to end, and what became of its other rows."""

    num_rows: int = 0
    num_truncated: int = 0
    num_split: int = 0
    lengths: list[int] = field(default_factory=list)
    ids: list[NDArray[np.int32]] = field(default_factory=list)
    runs: list[NDArray[np.int32]] = field(default_factory=list)
    """For each document begin and end of each run of trained tokens."""
    num_trained: int = 0
    num_open: int = 0
    """Trained turns that no control token ends."""
    bad: Skipped = field(default_factory=Skipped)
    dropped: Skipped = field(default_factory=Skipped)


class ChunkEncoder:
    """Chunks of raw rows to documents, under fixed settings."""

    def __init__(
        self,
        encoder: Encoder,
        shape: Format,
        *,
        max_length: int,
        overlong: Overlong,
        no_target: NoTarget,
    ) -> None:
        self._encoder = encoder
        self._shape = shape
        self._max_length = max_length
        self._overlong = overlong
        self._no_target = no_target

    def encode(self, chunk: Sequence[tuple[str, object]]) -> Encoded:
        """Return the chunk's documents in the order of its rows."""
        encoded = Encoded(num_rows=len(chunk))
        for place, value in chunk:
            try:
                row = canonical(value, self._shape)
                documents = self._encoder.encode(row, place)
            except BadRow as bad:
                encoded.bad.add(place, bad)
                continue
            self._add(encoded, place, row, documents)
        return encoded

    def _add(self, encoded: Encoded, place: str, row: Row, documents: Sequence[Tokens]) -> None:
        for document in documents:
            encoded.num_open += document.num_open
            if document.num_trained == 0 and self._no_target == "error":
                raise DataError(_no_target_text(place, document, "is trained"))
            for piece in self._pieces(encoded, place, row, document):
                if piece.num_trained > 0:
                    encoded.lengths.append(len(piece.input_ids))
                    encoded.ids.append(np.array(piece.input_ids, dtype=np.int32))
                    encoded.runs.append(runs_of(np.array(piece.trained)))
                    encoded.num_trained += piece.num_trained
                elif self._no_target == "error" and self._overlong == "truncate":
                    raise DataError(_no_target_text(place, document, "is left to train"))
                else:
                    encoded.dropped.add(place, BadRow(NO_TARGET, f"{len(piece.input_ids)} tokens"))

    def _pieces(self, encoded: Encoded, place: str, row: Row, document: Tokens) -> Iterator[Tokens]:
        length, most = len(document.input_ids), self._max_length
        if length <= most:
            yield document
        elif self._overlong == "truncate":
            encoded.num_truncated += 1
            yield _cut(document, 0, most)
        elif self._overlong == "split" and row.text:
            encoded.num_split += 1
            # A single token left over has no successor to predict.
            for start in range(0, length - 1, most):
                yield _cut(document, start, start + most)
        else:
            encoded.dropped.add(place, BadRow(TOO_LONG, f"{length} tokens"))


def _no_target_text(place: str, document: Tokens, what: str) -> str:
    return (
        f"{place}: no token of {len(document.input_ids)} {what}; were answers truncated away? "
        "Raise max_length, or let such rows be dropped."
    )


def _cut(document: Tokens, start: int, stop: int) -> Tokens:
    return Tokens(input_ids=document.input_ids[start:stop], trained=document.trained[start:stop])


def runs_of(trained: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Return begin and end of each run of True, one after another."""
    edges = np.diff(np.concatenate([[0], trained.astype(np.int8), [0]]))
    return np.flatnonzero(edges).astype(np.int32)


def mask_of(runs: NDArray[np.int32], length: int) -> NDArray[np.bool_]:
    """Return the mask that `runs_of` was given."""
    edges = np.zeros(length + 1, dtype=np.int8)
    edges[runs[0::2]] += 1
    edges[runs[1::2]] -= 1
    return np.cumsum(edges[:-1]).astype(np.bool_)
