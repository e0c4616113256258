"""Moments in fp32 and as a store keeps them, in torch: one code for each entry of STATES["adamw"].

Muon keeps the momentum of a matrix in the code of m, alone.

    fp32   m, v                       the moments themselves
    bf16   m, v                       the upper half of the fp32 bits
    8bit   m, m_scale, v, v_scale     a code of 8 bits times the scale of its SHARED elements

The codes of 8 bits are small floating-point numbers, cut from the bits of fp32:

    m   a sign and 7 bits: 8 codes in each of 16 octaves, evenly spaced around zero
    v   8 bits: 16 codes in each of the upper 4 octaves, 8 in each of the 24 below. Code 0 is
        1.125 * 2**-28 of the scale and not zero: a v of zero beside an m that is not would make
        a huge update

The largest new moment of SHARED elements sets their scale, and so has the largest code. A bound
that is known before the update is not enough: with beta2 = 0.999 it grows to several times the
largest v, and most elements leave the upper octaves.

Rounding is stochastic: up with the probability of the part cut off. An update moves v by a part in
a thousand and less, and bf16 has steps of a part in 128: rounded to nearest, v would never fall.

The tensors tell the code by their dtypes. kernel.c does the same inside an update, bit for bit;
these functions are for torch_kernel.py, and for checkpoints that change from one code to another.

Laws (tests/optim/test_state_codes.py)
    1. Decoding zero bytes gives zeros.
    2. A moment that the code can hold stays as it is; others are right on average.
    3. Encoded moments are finite.
    4. The largest m and the largest v of a block have the largest code.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatrain.optim.rounding import Rounding
from megatrain.optim.states import SHARED

_EXPONENT, _SIGN = 0x7F800000, -0x80000000
_SMALLEST_NORMAL = 2.0**-126

_LARGEST = 2.0**126
_M_ZERO, _M_OFFSET = 1024 << 20, 2.0
_M_LARGEST = 1.875 * 2.0**16 - _M_OFFSET
_V_FINE, _V_COARSE = 1777 << 19, 793 << 19


def decode(states: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return m and v in fp32: the states themselves where they are fp32, else new tensors."""
    if len(states) == 2:
        return states[0].float(), states[1].float()
    m, m_scale, v, v_scale = states
    n = m.numel()
    return _decode_m(_blocks(m), m_scale)[:n], _decode_v(_blocks(v), v_scale)[:n]


def encode(m: Tensor, v: Tensor, states: Sequence[Tensor], rounding: Rounding) -> None:
    """Write m and v, fp32, into the states. v is not negative.

    In bf16 and 8 bits, a magnitude beyond 2**126 counts as 2**126; updates do not reach it.
    To convert a checkpoint, give the number of updates so far as `rounding.update`.
    """
    if states[0].dtype == torch.float32:
        for moment, state in zip((m, v), states, strict=True):
            state.copy_(moment)
        return
    m, v = m.clamp(-_LARGEST, _LARGEST), v.clamp(max=_LARGEST)
    bits = rounding.bits(0, m.numel())
    for_m, for_v = bits & 0xFFFF, (bits >> 16) & 0xFFFF
    if states[0].dtype == torch.bfloat16:
        _encode_bf16(m, for_m, states[0])
        _encode_bf16(v, for_v, states[1])
    else:
        _encode_m(m, for_m, states[0], states[1])
        _encode_v(v, for_v, states[2], states[3])


def decode_momentum(states: Sequence[Tensor]) -> Tensor:
    """Return a momentum that is kept alone, in fp32: the state itself where it is fp32."""
    if len(states) == 1:
        return states[0].float()
    m, m_scale = states
    return _decode_m(_blocks(m), m_scale)[: m.numel()]


def encode_momentum(m: Tensor, states: Sequence[Tensor], rounding: Rounding) -> None:
    """Write a momentum into its states, by the code of a first moment."""
    if states[0].dtype == torch.float32:
        states[0].copy_(m)
        return
    m = m.clamp(-_LARGEST, _LARGEST)
    random = rounding.bits(0, m.numel()) & 0xFFFF
    if states[0].dtype == torch.bfloat16:
        _encode_bf16(m, random, states[0])
    else:
        _encode_m(m, random, *states)


def _encode_bf16(moment: Tensor, random: Tensor, state: Tensor) -> None:
    """Add 16 random bits below the last bit of bf16, and cut."""
    bits = moment.view(torch.int32) + random
    bits.masked_fill_((bits & _EXPONENT) == 0, 0)
    state.view(torch.int16).copy_(bits >> 16)


def _decode_m(codes: Tensor, scale: Tensor) -> Tensor:
    codes = codes.int()
    bits = ((codes & 0x7F) << 20) | _M_ZERO
    x = (bits.view(torch.float32) - _M_OFFSET).mul_(scale[:, None])
    return (x.view(torch.int32) | (codes & _SIGN)).view(torch.float32).view(-1)


def _encode_m(m: Tensor, random: Tensor, state: Tensor, scale: Tensor) -> None:
    magnitudes = _blocks(m).abs()
    scale.copy_(_normal_or_zero(magnitudes.amax(1) / _M_LARGEST))
    x = (magnitudes * _inverse(scale)).add_(_M_OFFSET).view(torch.int32)
    magnitude = ((x.view(-1)[: m.numel()] + ((random << 4) | 8)) >> 20) - (_M_ZERO >> 20)
    state.copy_(torch.where(m.view(torch.int32) < 0, magnitude - 128, magnitude))


def _decode_v(codes: Tensor, scale: Tensor) -> Tensor:
    x = codes.int() << 19
    bits = torch.minimum(x + _V_FINE, 2 * x + 2 * _V_COARSE)
    return bits.view(torch.float32).mul(scale[:, None]).view(-1)


def _encode_v(v: Tensor, random: Tensor, state: Tensor, scale: Tensor) -> None:
    blocks = _blocks(v)
    scale.copy_(_normal_or_zero(blocks.amax(1)))
    x = (blocks * _inverse(scale)).view(torch.int32).view(-1)[: v.numel()]
    place = torch.maximum(x - (_V_FINE - 4), (x >> 1) - (_V_COARSE - 4))
    state.copy_(((place + (random << 3)) >> 19).clamp_(min=0))


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale > 0, 1 / scale, torch.zeros_like(scale))[:, None]


def _normal_or_zero(scale: Tensor) -> Tensor:
    return torch.where(scale >= _SMALLEST_NORMAL, scale, torch.zeros_like(scale))


def _blocks(x: Tensor) -> Tensor:
    """Return x as (blocks, SHARED), the last block filled up with zeros."""
    missing = -x.numel() % SHARED
    return torch.nn.functional.pad(x, (0, missing)).view(-1, SHARED)
