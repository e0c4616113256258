"""The choice of a token from logits, where the logits are.

A drawn token is the one at which the shares of all tokens, added up in their order, pass a number
between 0 and 1. The host gives that number, so a text is drawn as it would be alone, whatever texts
are beside it. Shares are added up as integers: exact, and the same in any order, as deterministic
kernels want it.

Laws (tests/engine/compute/test_drawing.py)
    1. Each token is drawn as often as its share says; with `top_p` only the likeliest are.
    2. The same logits and number give the same token, whatever rows are beside it.
    3. A token whose share is 0 is never drawn.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.errors import ConfigError

_ONE = 2.0**40
"""A share of 1 as an integer: 2**22 rows of it could be added up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The choice of a token among the likely ones."""

    temperature: float = 0.0
    """0 takes the likeliest token."""
    top_p: float = 1.0
    """Only the likeliest tokens that together have this share are drawn from."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature is {self.temperature:g}; give 0 or more.")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top-p is {self.top_p:g}; give a number above 0, up to 1.")
        if self.top_p < 1 and self.temperature == 0:
            raise ConfigError(
                "top-p has no effect at temperature 0, the most likely token. Also give a "
                "temperature, like 1."
            )


GREEDY = SamplingParams()


def choose(logits: Tensor, drawing: SamplingParams, numbers: Tensor) -> Tensor:
    """Return a token for each row of logits in fp32, by its number from 0 up to 1. (rows,)

    The logits are divided by the temperature already.
    """
    if drawing.temperature == 0:
        return logits.argmax(1)
    shares = torch.softmax(logits, dim=1)
    if drawing.top_p == 1:
        return _passed(shares, numbers)
    likeliest, tokens = shares.sort(dim=1, descending=True, stable=True)
    before = _added_up(likeliest) - _integers(likeliest)
    kept = likeliest.where(before < int(drawing.top_p * _ONE), 0.0)
    return tokens.gather(1, _passed(kept, numbers)[:, None])[:, 0]


def _passed(shares: Tensor, numbers: Tensor) -> Tensor:
    """Return where the sum of shares passes a number's part of all."""
    sums = _added_up(shares)
    total = sums[:, -1:]
    part = (total.double() * numbers.double()[:, None]).long().minimum(total - 1)
    return torch.searchsorted(sums, part, right=True)[:, 0]


def _added_up(shares: Tensor) -> Tensor:
    return _integers(shares).cumsum(1)


def _integers(shares: Tensor) -> Tensor:
    return (shares * _ONE).long()
