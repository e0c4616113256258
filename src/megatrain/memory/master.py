"""The split master: an fp32 value kept as a bf16 weight plus a 16-bit remainder.

    bits(master) = (hi << 16) + sign_extend(lo)        hi = master rounded half up to bf16

`hi` is what compute sees and what export writes; `lo` is the signed remainder. Rounding half up and
not half to even, because with ties to even 32 bits could not show which side a tie came from.

Laws (tests/memory/test_master.py)
    1. join(split(x)) has the bits of x, for every finite x.
    2. A bf16 value splits into itself and a remainder of zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

_HALF = 1 << 15


def split_into(master: Tensor, hi: Tensor, lo: Tensor) -> None:
    """Write the two halves of `master` (fp32) into `hi` (bf16) and `lo` (int16), of equal shape."""
    bits = master.view(torch.int32)
    lo.copy_(bits)  # keeps the low 16 bits
    hi.view(torch.int16).copy_((bits + _HALF) >> 16)


def join(hi: Tensor, lo: Tensor) -> Tensor:
    """Return the fp32 master of `hi` and `lo`, as a new tensor."""
    bits = (hi.view(torch.int16).to(torch.int32) << 16) + lo.to(torch.int32)
    return bits.view(torch.float32)
