"""Laws of the codes of moments: zero bytes are zeros, and rounding is right on average."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatrain.optim.rounding import Rounding
from megatrain.optim.state_codes import decode, encode
from megatrain.optim.states import SHARED, STATES

CODES = list(STATES["adamw"])


def zero_states(code: str, n: int) -> list[Tensor]:
    return [
        torch.zeros(-(-n // kind.elements_per_number), dtype=getattr(torch, str(kind.bf16)))
        for kind in STATES["adamw"][code]
    ]


def coded(code: str, m: Tensor, v: Tensor, update: int = 1) -> tuple[Tensor, Tensor]:
    """m and v after one way through the code."""
    states = zero_states(code, m.numel())
    encode(m, v, states, Rounding(seed=0, update=update, first=0))
    return decode(states)


@pytest.mark.parametrize("code", CODES)
def test_zero_bytes_are_zeros(code: str) -> None:
    for moment in decode(zero_states(code, 1000)):
        assert moment.dtype == torch.float32
        assert moment.shape == (1000,)
        assert not moment.any()


def test_fp32_states_are_the_moments_themselves() -> None:
    states = [torch.randn(300), torch.rand(300)]
    assert decode(states)[0] is states[0]
    assert decode(states)[1] is states[1]
    m, v = torch.randn(300), torch.rand(300)
    assert all(map(torch.equal, coded("fp32", m, v), (m, v)))


@pytest.mark.parametrize("code", CODES)
def test_coding_twice_changes_nothing_more(code: str) -> None:
    generator = torch.Generator().manual_seed(0)
    m = torch.randn(3 * SHARED + 100, generator=generator) * 1e-3
    once = coded(code, m, m.square())
    for again, before in zip(coded(code, *once, update=2), once, strict=True):
        torch.testing.assert_close(again, before, rtol=1e-6, atol=0)


def test_every_bf16_number_stays() -> None:
    bits = torch.arange(-(2**15), 2**15).short()
    numbers = bits.view(torch.bfloat16).float()
    numbers = numbers[(numbers.abs() <= 2.0**126) & (numbers.abs() >= 2.0**-126)]
    m, v = coded("bf16", numbers, numbers.abs())
    assert torch.equal(m, numbers)
    assert torch.equal(v, numbers.abs())


@pytest.mark.parametrize("code", CODES)
def test_the_largest_moments_stay_finite(code: str) -> None:
    largest = torch.finfo(torch.float32).max
    m = torch.tensor([largest, -largest, 1.0, 0.0]).repeat(SHARED // 4)
    for moment in coded(code, m, m.abs() * 2) if code != "fp32" else ():
        assert moment.isfinite().all()
        assert float(moment.max()) == pytest.approx(2.0**126)


@pytest.mark.parametrize("code", CODES)
def test_a_v_beside_larger_ones_is_never_zero(code: str) -> None:
    v = torch.full((SHARED,), 1e-20)
    v[0] = 1.0
    assert float(coded(code, v, v)[1].min()) > 0


def test_every_code_of_8_bits_stays() -> None:
    """In a block that only decays, codes stay as they are and the scales shrink."""
    codes = torch.arange(256, dtype=torch.int32)
    for scale in (1e-30, 3.3e-7, 1.0):
        states = [codes.to(torch.int8), torch.tensor([scale]), codes.to(torch.uint8)]
        states.append(states[1].clone())
        m, v = decode(states)
        for update in range(20):
            again = zero_states("8bit", 256)
            encode(m * 0.9, v * 0.999, again, Rounding(seed=0, update=update, first=0))
            assert torch.equal(again[0], states[0])
            assert torch.equal(again[2], states[2])


def error_in_deviations(code: str, n: int = 64, num_draws: int = 2000) -> Tensor:
    """The mean error of each moment over many draws, in deviations of that mean."""
    generator = torch.Generator().manual_seed(1)
    m = torch.randn(n, generator=generator) * 1e-4
    v = torch.rand(n, generator=generator).square() * 1e-8
    draws = [coded(code, m, v, update=update) for update in range(num_draws)]
    means = []
    for moment, values in zip((m, v), zip(*draws, strict=True), strict=True):
        errors = torch.stack(values).double() - moment.double()
        deviation = errors.std(0) / math.sqrt(num_draws)
        means.append(errors.mean(0) / deviation.clamp(min=1e-6 * float(moment.abs().max())))
    return torch.cat(means)


@pytest.mark.few(1)
@pytest.mark.parametrize("code", ["bf16", "8bit"])
def test_rounding_is_right_on_average(code: str) -> None:
    errors = error_in_deviations(code)
    assert float(errors.abs().max()) < 5
    assert 0.3 < float(errors.square().mean()) < 1.5
