"""Moments in fp32 and as a store keeps them, in torch: one code for each entry of STATES["adamw"].

    fp32   m, v                  the moments themselves
    bf16   m, v                  rounded stochastically: up with the probability of the part cut off

The tensors tell the code by their dtypes. kernel.c does the same inside an update, bit for bit;
these functions are for torch_kernel.py, and for checkpoints that change from one code to another.

Rounding is stochastic because an update moves v by a part in a thousand and less, and bf16 has
steps of a part in 128: rounded to nearest, v would never fall.

Laws (tests/optim/test_state_codes.py)
    1. Decoding zero bytes gives zeros.
    2. A moment that the code can hold stays as it is; others are right on average.
    3. Encoded moments are finite: what is too large becomes the largest number of the code.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatrain.optim.rounding import Rounding

_MAGNITUDE = 0x7FFFFFFF
_LARGEST_BF16 = 0x7F7F0000


def decode(states: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return m and v in fp32: the states themselves where they are fp32, else new tensors."""
    m, v = states
    return m.float(), v.float()


def encode(m: Tensor, v: Tensor, states: Sequence[Tensor], rounding: Rounding) -> None:
    """Write m and v, fp32, into the states. m is finite, v is not negative, neither is a denormal.

    To convert a checkpoint, give the updates so far as `rounding.update`.
    """
    if states[0].dtype == torch.float32:
        for moment, state in zip((m, v), states, strict=True):
            state.copy_(moment)
        return
    bits = rounding.bits(0, m.numel())
    _encode_bf16(m, bits & 0xFFFF, states[0])
    _encode_bf16(v, (bits >> 16) & 0xFFFF, states[1])


def _encode_bf16(moment: Tensor, random: Tensor, state: Tensor) -> None:
    """Add 16 random bits below the last bit of bf16, and cut."""
    bits = moment.view(torch.int32)
    magnitude = (bits & _MAGNITUDE).clamp_(max=_LARGEST_BF16).add_(random)
    state.view(torch.int16).copy_((magnitude | (bits & ~_MAGNITUDE)) >> 16)
