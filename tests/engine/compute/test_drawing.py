"""Laws of drawing.py."""

from __future__ import annotations

import pytest
import torch

from megatrain.engine.compute import drawing as module
from megatrain.engine.compute.drawing import GREEDY, SamplingParams, choose
from megatrain.errors import ConfigError

SHARES = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05])


def drawn(top_p: float, num: int = 2000) -> torch.Tensor:
    """Return how often each token is drawn by numbers that are evenly spread."""
    numbers = (torch.arange(num, dtype=torch.float64) + 0.5) / num
    tokens = choose(
        SHARES.log().repeat(num, 1), SamplingParams(temperature=1.0, top_p=top_p), numbers
    )
    return torch.bincount(tokens, minlength=len(SHARES)) / num


@pytest.mark.parametrize(("top_p", "num_kept"), [(0.4, 1), (0.7, 2), (0.9, 3), (1.0, 4)])
def test_tokens_are_drawn_as_often_as_their_shares_say(top_p: float, num_kept: int) -> None:
    kept = SHARES.where(SHARES.sort(descending=True).values[num_kept - 1] <= SHARES, 0.0)
    torch.testing.assert_close(drawn(top_p), kept / kept.sum(), atol=2e-3, rtol=0)


def test_sums_that_leave_a_token_out_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        module, "_added_up", lambda shares: module._integers(shares[:, 1:]).cumsum(1)
    )
    assert (drawn(1.0) - SHARES).abs().max() > 0.1


def test_a_token_without_a_share_is_never_drawn_at_either_end() -> None:
    shares = torch.tensor([[0.0, 0.6, 0.4, 0.0]])
    for number, token in ((0.0, 1), (1 - 2.0**-53, 2)):
        chosen = choose(
            shares.log(), SamplingParams(temperature=1.0), torch.tensor([number]).double()
        )
        assert chosen.tolist() == [token]


def test_a_row_is_drawn_as_it_would_be_alone() -> None:
    logits = torch.randn(40, 1000, generator=torch.Generator().manual_seed(1))
    numbers = torch.rand(40, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for drawing in (
        GREEDY,
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.3, top_p=0.8),
    ):
        together = choose(logits, drawing, numbers)
        alone = [choose(logits[n : n + 1], drawing, numbers[n : n + 1]) for n in range(40)]
        assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"temperature": -1.0}, "temperature is -1; give 0 or more"),
        ({"temperature": float("nan")}, "temperature is nan; give 0 or more"),
        ({"temperature": 1.0, "top_p": 0.0}, "top-p is 0; give a number above 0"),
        ({"temperature": 1.0, "top_p": 1.5}, "top-p is 1.5; give a number above 0"),
        ({"top_p": 0.9}, "top-p has no effect at temperature 0"),
    ],
)
def test_what_cannot_be_drawn_by_is_refused(settings: dict[str, float], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        SamplingParams(**settings)  # type: ignore[arg-type]
