"""Experts are balanced over the full step, however its micro-batches are divided among ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatrain.engine.exchange import SharedRouting
from megatrain.optim.states import M
from testkit.rank_training import Found, RankCase, ranks_of


def case_of(size: int, **changes: Any) -> RankCase:
    return replace(
        RankCase(
            family="mixtral",
            dtype="fp32",
            num_steps=1,
            size=size,
            settings=(("router_aux_loss", 0.5),),
        ),
        **changes,
    )


def distance(found: list[Found], alone: Found) -> float:
    """Return how far the first moments, which a step makes of gradients, are from one process."""
    furthest = 0.0
    for name, whole in alone.state.items():
        if name.startswith(f"{M}."):
            parts = torch.cat([of_rank.state[name] for of_rank in found])
            furthest = max(furthest, float((parts - whole).abs().max() / whole.abs().max()))
    return furthest


@pytest.mark.parametrize(
    ("size", "changes"),
    [
        (2, {}),
        (4, {"form": "padded"}),  # one of them has no micro-batch
        (3, {"family": "gpt_oss", "update": "in_backward"}),
    ],
)
def test_loss_and_gradients_are_those_of_one_process(size: int, changes: dict[str, Any]) -> None:
    (alone,), found = ranks_of(case_of(1, **changes)), ranks_of(case_of(size, **changes))
    expected = alone.results[0].aux_loss
    assert expected is not None
    for of_rank in found:
        assert of_rank.results[0].aux_loss == found[0].results[0].aux_loss
        assert of_rank.results[0].aux_loss == pytest.approx(expected, rel=1e-6)
        assert of_rank.results[0].loss == pytest.approx(alone.results[0].loss, rel=1e-6)
    assert distance(found, alone) < 1e-5


def test_a_rank_that_balances_its_own_tokens_would_be_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (alone,) = ranks_of(case_of(1))
    monkeypatch.setattr(SharedRouting, "add_up", lambda *_: 0)
    found = ranks_of(case_of(3))
    assert found[0].results[0].aux_loss != pytest.approx(alone.results[0].aux_loss, rel=1e-4)
    assert distance(found, alone) > 1e-4
