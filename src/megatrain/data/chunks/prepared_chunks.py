"""Prepared rows as chunks, so that they can be mixed with data that is read in chunks."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatrain.data.chunks.chunks import Chunk
from megatrain.data.tokens.prepared import PreparedData

_CHUNK_DOCUMENTS = 64


class PreparedChunks:
    """The documents of a prepared source, so many in each chunk."""

    def __init__(self, prepared: PreparedData) -> None:
        self.prepared = prepared
        self._size = len(prepared.lengths)
        self.num_chunks = -(-self._size // _CHUNK_DOCUMENTS)
        self.num_tokens = int(prepared.card["tokens"])
        self.card: dict[str, Any] = prepared.card

    def require_below(self, vocab_size: int) -> None:
        """The largest id of prepared rows is on their card, which is compared with it."""

    def read(self, chunk: int) -> Chunk:
        """Return the documents of a chunk."""
        first = chunk * _CHUNK_DOCUMENTS
        numbers = range(first, min(first + _CHUNK_DOCUMENTS, self._size))
        lengths = self.prepared.lengths[numbers.start : numbers.stop]
        found = [self.prepared.tokens(number) for number in numbers]
        return Chunk(
            lengths=lengths,
            starts=np.cumsum(lengths) - lengths,
            ids=np.concatenate([ids for ids, _ in found]),
            runs=tuple(
                np.flatnonzero(np.diff(trained, prepend=False, append=False)).astype(np.int32)
                for _, trained in found
            ),
        )

    def close(self) -> None:
        """Nothing works ahead."""
