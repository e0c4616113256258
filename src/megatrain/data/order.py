"""The order of rows, computed by position: no list of indices, nothing to replay.

A seeded permutation of [0, n) is a Feistel network over the next power of two; what falls outside
[0, n) is sent through again until it falls inside (at most twice on average). Position k of epoch e
is known in microseconds for any k, so the state of an order is the position itself.

A mixture draws from several parts by weight. Positions come in blocks of 1,000; a block holds each
part in its exact share, in an order of its own. The j-th draw of a part is position j of the part's
own epochs, so each of its rows comes once before any comes twice.

Laws (tests/data/test_order.py)
    1. Each epoch is a permutation; other epochs and seeds give others.
    2. rows(epoch, a, c) is rows(epoch, a, b) followed by rows(epoch, b, c).
    3. A mixture keeps its weights in every block, and a part's rows come equally often, within one,
       at the end of each block.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megatrain.errors import ConfigError

Indices = NDArray[np.int64]
_Words = NDArray[np.uint64]

_ROUNDS = 6
_BLOCK = 1000


class Order(Protocol):
    """Which row stands at which position of an epoch."""

    size: int
    """Positions in an epoch."""

    def rows(self, epoch: int, start: int, stop: int) -> Indices:
        """Return the rows at positions [start, stop) of `epoch`."""


class Permutation:
    """A seeded permutation of [0, size)."""

    def __init__(self, size: int, *key: int) -> None:
        if size < 1:
            raise ConfigError(f"an order needs at least one row, not {size}")
        self.size = size
        bits = max(2, (size - 1).bit_length())
        self._low_bits, self._high_bits = bits // 2, bits - bits // 2
        digest = hashlib.blake2b(repr((size, *key)).encode(), digest_size=8 * _ROUNDS).digest()
        self._keys = np.frombuffer(digest, dtype=np.uint64)

    def __call__(self, positions: Indices) -> Indices:
        """Return where each of `positions` goes."""
        values = self._network(positions.astype(np.uint64))
        outside = np.flatnonzero(values >= self.size)
        while outside.size:
            values[outside] = self._network(values[outside])
            outside = outside[values[outside] >= self.size]
        return values.astype(np.int64)

    def _network(self, values: _Words) -> _Words:
        """A bijection of [0, 2**bits): halves change places, one stirred by the other."""
        low_bits, high_bits = self._low_bits, self._high_bits
        high, low = values >> np.uint64(low_bits), values & _mask(low_bits)
        for key in self._keys:
            high, low = low, (high ^ _stirred(low, key)) & _mask(high_bits)
            low_bits, high_bits = high_bits, low_bits
        # Rounds are even in number, so the halves have their own widths again.
        return (high << np.uint64(low_bits)) | low


def _mask(bits: int) -> np.uint64:
    return np.uint64((1 << bits) - 1)


def _stirred(values: _Words, key: np.uint64) -> _Words:
    """A well-mixing hash of 64 bits (multiply, shift, xor); arithmetic wraps as it should."""
    values = (values ^ key) * np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return values ^ (values >> np.uint64(29))


class Shuffled:
    """All rows once per epoch, in a new order each time."""

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        self._seed = seed
        self._last = (-1, Permutation(size, seed, -1))

    def rows(self, epoch: int, start: int, stop: int) -> Indices:
        last = self._last  # another thread may replace it at any time
        if last[0] != epoch:
            last = self._last = (epoch, Permutation(self.size, self._seed, epoch))
        return last[1](np.arange(start, min(stop, self.size), dtype=np.int64))


class InOrder:
    """All rows once per epoch, as they stand in the file: for evaluation."""

    def __init__(self, size: int) -> None:
        self.size = size

    def rows(self, epoch: int, start: int, stop: int) -> Indices:
        return np.arange(start, min(stop, self.size), dtype=np.int64)


class Mixed:
    """Several parts by weight. Rows are numbered through: part 0 first, then part 1...

    An epoch is as many positions as there are rows; a part of large weight is then repeated, one
    of small weight is not used up, and the next epoch goes on where this one ended.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int) -> None:
        if len(sizes) != len(weights) or not sizes:
            raise ConfigError(f"{len(sizes)} parts to mix, but {len(weights)} weights")
        if min(sizes) < 1:
            raise ConfigError(f"part {list(sizes).index(min(sizes))} has no rows to mix in")
        self.size = sum(sizes)
        self._seed = seed
        self._shares = _shares(weights)
        self._ends = np.cumsum(self._shares)
        self._sizes = tuple(sizes)
        self._first_rows = np.cumsum([0, *sizes])

    def rows(self, epoch: int, start: int, stop: int) -> Indices:
        first = epoch * self.size
        positions = np.arange(first + start, first + min(stop, self.size), dtype=np.int64)
        rows = np.empty_like(positions)
        for block in np.unique(positions // _BLOCK):
            inside = positions // _BLOCK == block
            rows[inside] = self._block_rows(int(block), positions[inside] % _BLOCK)
        return rows

    def _block_rows(self, block: int, slots: Indices) -> Indices:
        ranks = Permutation(_BLOCK, self._seed, block)(slots)
        parts = np.searchsorted(self._ends, ranks, side="right")
        rows = np.empty_like(slots)
        for part, share in enumerate(self._shares.tolist()):
            drawn = parts == part
            draws = block * share + ranks[drawn] - (self._ends[part] - share)
            rows[drawn] = self._first_rows[part] + self._drawn(part, draws)
        return rows

    def _drawn(self, part: int, draws: Indices) -> Indices:
        """Return the rows of a part, numbered within it, at these positions of its own epochs."""
        size = self._sizes[part]
        rows = np.empty_like(draws)
        for epoch in np.unique(draws // size).tolist():
            inside = draws // size == epoch
            rows[inside] = Permutation(size, self._seed, part, epoch)(draws[inside] % size)
        return rows


def _shares(weights: Sequence[float]) -> Indices:
    """Return how many of a block's positions each part gets: largest remainders."""
    total = float(sum(weights))
    if not total > 0 or min(weights) < 0:
        raise ConfigError(f"weights must be positive: {list(weights)}")
    exact = [_BLOCK * weight / total for weight in weights]
    shares = np.array([int(share) for share in exact], dtype=np.int64)
    by_rest = sorted(range(len(exact)), key=lambda n: (int(exact[n]) - exact[n], n))
    shares[by_rest[: _BLOCK - int(shares.sum())]] += 1
    if shares.min() < 1:
        raise ConfigError(f"a weight below 1/{_BLOCK} of the whole: {list(weights)}")
    return shares
