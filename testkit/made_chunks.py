"""Chunks made of their number: data of any size, without a file."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatrain.data.chunks.chunks import Chunk


class MadeChunks:
    """A source whose chunk n is a function of n and the seed: four documents or more."""

    def __init__(self, num_chunks: int, seed: int = 0, longest: int = 12) -> None:
        self.num_chunks, self._seed, self._longest = num_chunks, seed, longest
        self.num_tokens = num_chunks * 5 * longest // 2
        self.seen: set[int] = set()
        self.card: dict[str, Any] = {
            "source": f"made {seed}",
            "format": "made",
            "tokens": self.num_tokens,
            "chunks": num_chunks,
            "digest": f"{num_chunks}-{seed}-{longest}",
        }

    def require_below(self, vocab_size: int) -> None:
        """Ids are below 1,000."""

    def read(self, chunk: int) -> Chunk:
        self.seen.add(chunk)
        drawn = np.random.default_rng((self._seed, chunk))
        lengths = drawn.integers(2, self._longest + 1, 4 + chunk % 3)
        ids = drawn.integers(0, 1000, int(lengths.sum())).astype(np.uint16)
        return Chunk(lengths=lengths, starts=np.cumsum(lengths) - lengths, ids=ids)

    def close(self) -> None:
        """Nothing works ahead."""
