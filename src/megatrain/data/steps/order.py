"""The order of rows, computed by position: no list of indices, nothing to replay.

A seeded permutation of [0, n) is a Feistel network over the next power of two; a result outside
[0, n) is permuted again until it is inside (at most twice on average). Position k of epoch e
is known in microseconds for any k, so the state of an order is the position itself.

A mixture repeats the rows of each source as often as its weight says, and shuffles all of them as
one. With weight 2.5 each row comes twice, and a half of them once more. That half is chosen by
position too: the rows are divided into as many short stretches as needed, and each stretch gives
one row. Epoch by epoch a stretch gives all of its rows before it gives one again.

Laws (tests/data/steps/test_order.py)
    1. Each epoch is a permutation; other epochs and seeds give others.
    2. rows(epoch, a, c) is rows(epoch, a, b) followed by rows(epoch, b, c).
    3. With weight w each row of a source comes floor(w) or ceil(w) times in every epoch.
    4. With all weights 1 a mixture is the shuffled concatenation of its sources.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megatrain.errors import ConfigError

Indices = NDArray[np.int64]
_Words = NDArray[np.uint64]

_ROUNDS = 6


class Order(Protocol):
    """The row at each position of an epoch."""

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
        """A bijection of [0, 2**bits): halves swap, one mixed with a hash of the other."""
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
    """A well-mixing hash of 64 bits (multiply, shift, xor); arithmetic wraps on purpose."""
    values = (values ^ key) * np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return values ^ (values >> np.uint64(29))


class ShuffledOrder:
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
    """All rows once per epoch, in the order of the file."""

    def __init__(self, size: int) -> None:
        self.size = size

    def rows(self, epoch: int, start: int, stop: int) -> Indices:
        return np.arange(start, min(stop, self.size), dtype=np.int64)


class MixedOrder:
    """Several sources by weight. Rows are numbered through: source 0 first, then source 1...

    Without `shuffle` the rows come in this order, a source of weight 2 twice in a row.
    """

    def __init__(
        self, sizes: Sequence[int], weights: Sequence[float], seed: int, *, shuffle: bool = True
    ) -> None:
        if len(sizes) != len(weights) or not sizes:
            raise ConfigError(f"{len(sizes)} sources to mix, but {len(weights)} weights")
        if min(sizes) < 1:
            raise ConfigError(f"source {list(sizes).index(min(sizes))} has no rows to mix in")
        if min(weights) <= 0:
            raise ConfigError(f"weights must be positive: {list(weights)}")
        parts = zip(sizes, weights, strict=True)
        self._parts = [_part(*part, seed, number) for number, part in enumerate(parts)]
        # Rows of each source in an epoch, repeated ones counted each time.
        self.counts = tuple(part.num_slots for part in self._parts)
        self.size = sum(self.counts)
        self._slots: Order = ShuffledOrder(self.size, seed) if shuffle else InOrder(self.size)
        self._first_slots = np.cumsum([0, *self.counts])
        self._first_rows = np.cumsum([0, *sizes])

    def rows(self, epoch: int, start: int, stop: int) -> Indices:
        slots = self._slots.rows(epoch, start, stop)
        numbers = np.searchsorted(self._first_slots, slots, side="right") - 1
        rows = np.empty_like(slots)
        for number, part in enumerate(self._parts):
            inside = numbers == number
            found = part.rows(slots[inside] - self._first_slots[number], epoch)
            rows[inside] = self._first_rows[number] + found
        return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One source of a mixture: all its rows `num_whole` times, then `num_extra` of them."""

    size: int
    num_whole: int
    num_extra: int
    key: np.uint64

    @property
    def num_slots(self) -> int:
        return self.num_whole * self.size + self.num_extra

    def rows(self, slots: Indices, epoch: int) -> Indices:
        """Return the rows, numbered within the source, at these slots."""
        rows = slots % self.size
        extra = slots >= self.num_whole * self.size
        if extra.any():
            rows[extra] = self._chosen(slots[extra] - self.num_whole * self.size, epoch)
        return rows

    def _chosen(self, stretches: Indices, epoch: int) -> Indices:
        """Return one row of each stretch; the first `longer` stretches have a row more."""
        width, longer = divmod(self.size, self.num_extra)
        widths = width + (stretches < longer)
        firsts = stretches * width + np.minimum(stretches, longer)
        rounds = (epoch // widths).astype(np.uint64)
        drawn = _stirred(_stirred(stretches.astype(np.uint64), self.key) + rounds, self.key)
        return firsts + ((drawn >> np.uint64(2)).astype(np.int64) + epoch) % widths


def _part(size: int, weight: float, seed: int, number: int) -> _Part:
    num_whole = int(weight)
    # Every source has at least one row, however small its weight.
    num_extra = max(round((weight - num_whole) * size), int(num_whole == 0))
    digest = hashlib.blake2b(repr((size, seed, number)).encode(), digest_size=8).digest()
    key = np.frombuffer(digest, dtype=np.uint64)[0]
    return _Part(size=size, num_whole=num_whole, num_extra=num_extra, key=key)
