"""Laws of drawn.py."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from megatrain.losses.policy_gradient import group_advantages
from megatrain.rewards.drawn import Drawn
from megatrain.rewards.functions import Rewards
from megatrain.rewards.rollouts import Rollout

LAYOUT = {"micro_batch_tokens": 16, "pad_token": 0}
REWARDS = Rewards(total=(1.0, 0.0, 0.25, 0.5), means={"right": 0.4375})


def rollouts() -> list[Rollout]:
    lengths = (3, 1, 2, 5)
    return [
        Rollout(
            prompt=(7, 8),
            tokens=tuple(range(10, 10 + length)),
            logprobs=tuple(-0.1 * (n + 1) / 3 for n in range(length)),
            ended=length != 5,
        )
        for length in lengths
    ]


def drawn(**changes: Any) -> Drawn:
    return Drawn.of(rollouts(), REWARDS, 2, **{"scaled": True, "mask_truncated": False} | changes)


def test_a_draw_through_json_gives_the_same_batch() -> None:
    found = drawn().used()
    again = Drawn.from_json(json.loads(json.dumps(found.to_json())))
    assert again == found
    for one, other in zip(found.batch(**LAYOUT), again.batch(**LAYOUT), strict=True):
        assert torch.equal(one.input_ids, other.input_ids)
        assert all(torch.equal(one.extra[name], other.extra[name]) for name in one.extra)


def test_answers_count_by_what_they_are_above_the_others_of_their_prompt() -> None:
    assert list(drawn().advantages) == group_advantages(REWARDS.total, 2)
    assert list(drawn(scaled=False).advantages) == [0.5, -0.5, -0.125, 0.125]
    figures = drawn().figures
    assert (figures["reward"], figures["reward/right"], figures["ended"]) == (0.4375, 0.4375, 0.75)


def test_answers_that_were_cut_off_are_left_out_but_counted() -> None:
    masked = drawn(mask_truncated=True)
    assert [len(one.tokens) for one in masked.rollouts] == [3, 1, 2]
    assert masked.advantages == drawn().advantages[:3]
    assert masked.figures == drawn().figures


def test_if_all_were_cut_off_nothing_is_trained() -> None:
    cut = [one for one in rollouts() if not one.ended] * 2
    found = Drawn.of(cut, Rewards(total=(1.0, 0.0), means={}), 2, scaled=True, mask_truncated=True)
    assert found.advantages == (0.0, 0.0)


def _changed(**changes: Any) -> dict[str, Any]:
    return {**drawn().to_json(), **changes}


@pytest.mark.parametrize(
    "value",
    [
        {},
        _changed(advantages=[1.0]),
        _changed(rollouts=[[1]]),
        _changed(rollouts=[], advantages=[]),
        _changed(figures={"reward": "good"}),
    ],
)
def test_what_no_run_wrote_is_refused(value: dict[str, Any]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        Drawn.from_json(value)
