"""The forms of a difference on its way to other peers, and an exact account of what was not sent.

    none      the weights themselves, in fp32: their mean has no rounding of a difference in it
    int8      all numbers, 8 bits each
    sparse    of each CHUNK numbers the largest, 2 to 8 bits each, and their places

Numbers are multiples of a power of two, one for each chunk. A number that is sent then differs from
its original by a number that fp32 has: nothing is rounded away between the two. Numbers that would
be sent as 0 are not sent.

Places are coded as Elias and Fano did it: of n ascending numbers below N the low log2(N/n) bits are
written as they are, and the rest as a row of bits with a 1 for each. With 1 of 64 numbers that is
8 bits for each place, in place of 12 within a chunk.

Laws (tests/peers/test_compression.py)
    1. difference + error before == what is sent + error after: exactly, for every finite number.
    2. All peers read the same bits of one difference.
    3. Bytes that no peer has written are a Refusal, whatever they are; they are never larger in
       memory than the numbers that they stand for.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatrain.errors import NonFiniteStep

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
CHUNK = 4096
_LEAST_EXPONENT, _MOST_EXPONENT = -120, 120
_COUNT = struct.Struct("<Q")


class Refusal(Exception):
    """The reason why a difference does not enter a round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """The numbers of a piece as they are sent, and what is left of them."""

    data: bytes
    error: Floats | None
    """The part that was not sent; None: there is no such part."""


class Compression(Protocol):
    """A form of differences."""

    @property
    def name(self) -> str: ...

    @property
    def keeps_error(self) -> bool:
        """Whether a part of a difference is not sent, and goes with the next one."""

    def most_bytes(self, num_elements: int) -> int:
        """Return the most bytes that a piece takes."""

    def encode(self, anchor: Floats, weights: Floats, error: Floats | None) -> Encoded:
        """Return a piece of a difference, the part of an earlier one that was not sent included."""

    def decode(self, data: memoryview, num_elements: int) -> Sent:
        """Return the numbers of a piece. Raises Refusal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """Numbers of a piece that a peer has sent."""

    values: Floats
    places: NDArray[np.int64] | None = None
    """Places of the values; None: there is one for each place."""
    are_weights: bool = False
    """Whether they are weights, and not differences of an anchor from them."""

    def alone(self, num_elements: int) -> Doubles:
        """Return the numbers in their places, as the beginning of a sum; -0.0 stays what it is."""
        if self.places is None:
            return self.values.astype(np.float64)
        total = np.zeros(num_elements)
        self.add_to(total)
        return total

    def add_to(self, total: Doubles) -> None:
        """Add the numbers to a sum over peers."""
        if self.places is None:
            total += self.values
        else:
            total[self.places] += self.values  # each place occurs once

    def squared_norm(self, anchor: Floats) -> float:
        """Return the sum of squares of the difference."""
        found = self.values.astype(np.float64)
        if self.are_weights:
            found -= anchor
        return float(np.sum(np.square(found)))


def compression_of(name: str, *, density: float, bits: int) -> Compression:
    """Return the form of this name."""
    if name == "none":
        return Plain()
    return Dense() if name == "int8" else Sparse(density=density, bits=bits)


class Plain:
    """Weights in fp32."""

    name = "none"
    keeps_error = False

    def most_bytes(self, num_elements: int) -> int:
        return 4 * num_elements

    def encode(self, anchor: Floats, weights: Floats, error: Floats | None) -> Encoded:
        return Encoded(data=weights.astype("<f4").tobytes(), error=None)

    def decode(self, data: memoryview, num_elements: int) -> Sent:
        _require(len(data) == 4 * num_elements, "it has another length than the weights")
        values = np.frombuffer(data, "<f4")
        _require(bool(np.isfinite(values).all()), "it has numbers that are not finite")
        return Sent(values=values, are_weights=True)


class Dense:
    """Every number in 8 bits."""

    name = "int8"
    keeps_error = True
    _MOST = 127

    def most_bytes(self, num_elements: int) -> int:
        return num_elements + -(-num_elements // CHUNK)

    def encode(self, anchor: Floats, weights: Floats, error: Floats | None) -> Encoded:
        left = _wanted(anchor, weights, error)
        chunks = _in_chunks(left)
        exponents = _exponents(np.abs(chunks).max(axis=1) / np.float32(self._MOST), above=True)
        levels = np.rint(np.ldexp(chunks, -exponents[:, None]))
        codes = np.clip(levels, -self._MOST, self._MOST).astype(np.int8)
        sent = np.ldexp(codes.astype(np.float32), exponents[:, None]).reshape(-1)[: len(left)]
        data = exponents.astype(np.int8).tobytes() + codes.reshape(-1)[: len(left)].tobytes()
        return Encoded(data=data, error=left - sent)

    def decode(self, data: memoryview, num_elements: int) -> Sent:
        _require(len(data) == self.most_bytes(num_elements), "it has another length than it must")
        num_chunks = -(-num_elements // CHUNK)
        exponents = _read_exponents(data[:num_chunks])
        codes = np.frombuffer(data[num_chunks:], np.int8)
        chunks = _in_chunks(codes.astype(np.float32))
        values = np.ldexp(chunks, exponents[:, None]).reshape(-1)[:num_elements]
        return Sent(values=values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sparse:
    """The largest numbers of each chunk in few bits: one for the sign, the rest for the size."""

    density: float
    bits: int

    @property
    def name(self) -> str:
        return f"sparse {self.kept} of {CHUNK} in {self.bits} bits"

    keeps_error = True

    @property
    def kept(self) -> int:
        """Numbers of a chunk that are sent at most."""
        return max(1, round(self.density * CHUNK))

    def most_bytes(self, num_elements: int) -> int:
        num_chunks = -(-num_elements // CHUNK)
        count = min(num_chunks * self.kept, num_elements)
        low = _low_bits(num_elements, count)
        bits = count * (self.bits + 1 + low) + (num_elements >> low)
        return _COUNT.size + num_chunks + bits // 8 + 8

    def encode(self, anchor: Floats, weights: Floats, error: Floats | None) -> Encoded:
        left = _wanted(anchor, weights, error)
        chunks = _in_chunks(left)
        sizes = np.abs(chunks)
        chosen = self._largest(sizes)
        counts = np.maximum(chosen.sum(axis=1), 1)
        means = np.where(chosen, sizes, np.float32(0)).sum(axis=1, dtype=np.float64) / counts
        exponents = _exponents(means.astype(np.float32)) - (self.bits - 2)
        exponents = np.maximum(exponents, _LEAST_EXPONENT)
        rows, columns = np.nonzero(chosen)
        scale = exponents[rows]
        levels = np.rint(np.ldexp(sizes[rows, columns], -scale))
        is_sent = levels >= 1
        rows, columns, scale = rows[is_sent], columns[is_sent], scale[is_sent]
        levels = np.minimum(levels[is_sent], np.float32(1 << (self.bits - 1)))
        places = rows.astype(np.int64) * CHUNK + columns
        negative = left[places] < 0
        values = np.ldexp(np.where(negative, -levels, levels).astype(np.float32), scale)
        codes = (levels.astype(np.uint16) - 1) | (negative.astype(np.uint16) << (self.bits - 1))
        left[places] -= values
        data = b"".join(
            (
                _COUNT.pack(len(places)),
                exponents.astype(np.int8).tobytes(),
                _packed(codes, self.bits),
                _coded_places(places, len(left)),
            )
        )
        return Encoded(data=data, error=left)

    def _largest(self, sizes: Floats) -> NDArray[np.bool_]:
        """Return which numbers of each chunk are its largest; of equal ones the first."""
        kept = min(self.kept, sizes.shape[1])
        least = np.partition(sizes, CHUNK - kept, axis=1)[:, CHUNK - kept, None]
        chosen = (sizes >= least) & (sizes > 0)
        for row in np.flatnonzero(chosen.sum(axis=1) > kept):
            above = sizes[row] > least[row]
            equal = np.flatnonzero(sizes[row] == least[row])
            above[equal[: kept - int(above.sum())]] = True
            chosen[row] = above
        return chosen

    def decode(self, data: memoryview, num_elements: int) -> Sent:
        num_chunks = -(-num_elements // CHUNK)
        start = _COUNT.size + num_chunks
        _require(len(data) >= start, "it is cut off")
        (count,) = _COUNT.unpack_from(data)
        _require(count <= min(num_chunks * self.kept, num_elements), "it has too many numbers")
        exponents = _read_exponents(data[_COUNT.size : start])
        stop = start + -(-count * self.bits // 8)
        _require(len(data) >= stop, "it is cut off")
        codes = _unpacked(data[start:stop], count, self.bits)
        places = _read_places(data[stop:], count, num_elements)
        levels = (codes & ((1 << (self.bits - 1)) - 1)).astype(np.float32) + np.float32(1)
        signed = np.where(codes >> (self.bits - 1), -levels, levels)
        scale = exponents[places // CHUNK]
        return Sent(values=np.ldexp(signed, scale).astype(np.float32), places=places)


def _require(is_right: bool, reason: str) -> None:
    if not is_right:
        raise Refusal(reason)


def _wanted(anchor: Floats, weights: Floats, error: Floats | None) -> Floats:
    """Return the numbers that should be sent, as an array of its own."""
    found = anchor - weights
    if error is not None:
        found += error
    if not np.isfinite(found).all():
        raise NonFiniteStep("the difference from the anchor has numbers that are not finite")
    return found


def _in_chunks(numbers: Floats) -> Floats:
    """Return numbers as rows of CHUNK, the last one filled up with zeros."""
    padded = -len(numbers) % CHUNK
    if padded:
        numbers = np.concatenate([numbers, np.zeros(padded, numbers.dtype)])
    return numbers.reshape(-1, CHUNK)


def _exponents(sizes: Floats, *, above: bool = False) -> NDArray[np.int32]:
    """Return the powers of two next to each size: not above it, or not below it."""
    fractions, exponents = np.frexp(sizes)
    found = exponents.astype(np.int32) - (0 if above else 1)
    if above:
        found -= (fractions == 0.5).astype(np.int32)
    return np.clip(found, _LEAST_EXPONENT, _MOST_EXPONENT)


def _read_exponents(data: memoryview) -> NDArray[np.int32]:
    found = np.frombuffer(data, np.int8).astype(np.int32)
    is_right = not len(found) or (
        int(found.min()) >= _LEAST_EXPONENT and int(found.max()) <= _MOST_EXPONENT
    )
    _require(is_right, "it has numbers that are not finite")
    return found


def _low_bits(universe: int, count: int) -> int:
    return max(0, (universe // count).bit_length() - 1) if count else 0


def _coded_places(places: NDArray[np.int64], universe: int) -> bytes:
    """Return ascending places below `universe`."""
    count = len(places)
    low = _low_bits(universe, count)
    lows = _packed(places & ((1 << low) - 1), low)
    high = np.zeros(count + (universe >> low) + 1, np.uint8)
    high[(places >> low) + np.arange(count)] = 1
    return lows + np.packbits(high, bitorder="little").tobytes()


def _read_places(data: memoryview, count: int, universe: int) -> NDArray[np.int64]:
    """Return the places. Raises Refusal unless they ascend, and stay below `universe`."""
    low = _low_bits(universe, count)
    num_low = -(-count * low // 8)
    num_high = -(-(count + (universe >> low) + 1) // 8)
    _require(len(data) == num_low + num_high, "it has another length than its numbers")
    lows = _unpacked(data[:num_low], count, low)
    ones = np.flatnonzero(np.unpackbits(np.frombuffer(data[num_low:], np.uint8), bitorder="little"))
    _require(len(ones) == count, "its places are not as many as its numbers")
    places = ((ones - np.arange(count)) << low) | lows
    ascend = count == 0 or (bool((np.diff(places) > 0).all()) and int(places[-1]) < universe)
    _require(ascend, "its places are out of order")
    return places


def _packed(numbers: NDArray[Any], bits: int) -> bytes:
    """Return numbers of so many bits, by planes: all first bits, then all second ones."""
    planes = [((numbers >> bit) & 1).astype(np.uint8) for bit in range(bits)]
    found = np.concatenate(planes) if planes else np.zeros(0, np.uint8)
    return np.packbits(found, bitorder="little").tobytes()


def _unpacked(data: memoryview, count: int, bits: int) -> NDArray[np.int64]:
    found = np.unpackbits(
        np.frombuffer(data, np.uint8), count=count * bits, bitorder="little"
    ).reshape(bits, count)
    numbers = np.zeros(count, np.int64)
    for bit in range(bits):
        numbers |= found[bit].astype(np.int64) << bit
    return numbers
