"""Random bits for stochastic rounding: a function of seed, update and element, and of nothing else.

    key of SHARED elements   = mix64(stream(seed, update) + block number * step)        64 bits
    draw i of a key          = mix32(lower half of key + i, upper half of key)          32 bits
    bits of element k        = draw of k's place in its group of 32  XOR  draw of the group

Of the 40 draws of a block, 32 are for places and 8 for groups. Any three elements of a block have
independent bits.

No state is kept, so an update has the same bits for any number of threads, after any resume, and
for any cut of a segment into parts at multiples of SHARED elements. An element needs 32 bits: the
lower half rounds its first moment, the upper half its second.

kernel.c computes the same bits from `Rounding.stream` and `Rounding.first`. mix64 is the finalizer
of SplitMix64, mix32 a finalizer of two multiplications with a second key between them.

Laws (tests/optim/test_rounding.py)
    1. The bits of an element do not depend on where the run of elements begins or ends.
    2. They are uniform, and not correlated between halves, neighbors, updates or seeds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.optim.states import SHARED

_STEP = 0x9E3779B97F4A7C15
_MIX64 = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_MIX32 = (0x7FEB352D, 0x846CA68B)
_MASK64 = 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """Names the random bits of one update of a run of elements."""

    seed: int
    update: int
    """Number of the update of these elements."""
    first: int
    """Number of the run's first element in the store (Views.first)."""

    def __post_init__(self) -> None:
        assert self.first % SHARED == 0, self.first

    @property
    def stream(self) -> int:
        """64 bits of seed and update."""
        return _mix64(_mix64(self.seed + _STEP) + self.update * _STEP)

    def bits(self, begin: int, end: int) -> Tensor:
        """Return 32 bits for each of the run's elements from `begin`, a multiple of SHARED, on."""
        assert begin % SHARED == 0, begin
        first, num_blocks = (self.first + begin) // SHARED, -(-(end - begin) // SHARED)
        blocks = torch.arange(first, first + num_blocks)  # (blocks,)
        keys = _mix64_tensor(blocks * _signed(_STEP, 64) + _signed(self.stream, 64))
        lower, upper = keys.to(torch.int32)[:, None], (keys >> 32).to(torch.int32)[:, None]
        draws = _mix32_tensor(lower + torch.arange(40, dtype=torch.int32), upper)
        # (blocks, groups, pairs, 2): first the draws of all first elements of pairs
        places = draws[:, :32].view(-1, 1, 2, 16).transpose(2, 3)
        groups = draws[:, 32:].view(-1, 8, 1, 1)
        return (places ^ groups).reshape(-1)[: end - begin]


def _mix64(x: int) -> int:
    for shift, factor in _MIX64:
        x &= _MASK64
        x = (x ^ (x >> shift)) * factor
    x &= _MASK64
    return x ^ (x >> 31)


def _mix64_tensor(x: Tensor) -> Tensor:
    for shift, factor in _MIX64:
        x = (x ^ _shifted(x, shift)) * _signed(factor, 64)
    return x ^ _shifted(x, 31)


def _mix32_tensor(x: Tensor, key: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 16)) * _signed(_MIX32[0], 32)
    x = (x ^ _shifted(x, 15) ^ key) * _signed(_MIX32[1], 32)
    return x ^ _shifted(x, 16)


def _shifted(x: Tensor, places: int) -> Tensor:
    """Shift right with zeros: torch's shift copies the sign."""
    return (x >> places) & ((1 << (x.dtype.itemsize * 8 - places)) - 1)


def _signed(x: int, num_bits: int) -> int:
    x &= (1 << num_bits) - 1
    return x - (1 << num_bits) if x >> (num_bits - 1) else x
