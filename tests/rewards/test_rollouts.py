"""Laws of rollouts.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatrain.errors import BatchError
from megatrain.losses.policy_gradient import PolicyGradient
from megatrain.rewards.rollouts import Rollout, rollout_batch

LENGTHS = ((2, 3), (1, 1), (4, 6), (2, 2), (3, 3))
"""Of prompts and answers."""


def rollout(number: int, num_prompt: int, num_tokens: int) -> Rollout:
    first = 10 * number + 1
    return Rollout(
        prompt=tuple(range(first, first + num_prompt)),
        tokens=tuple(range(first + num_prompt, first + num_prompt + num_tokens)),
        logprobs=tuple(-0.5 - token for token in range(num_tokens)),
        ended=True,
    )


ROLLOUTS = [rollout(number, *lengths) for number, lengths in enumerate(LENGTHS)]
ADVANTAGES = [0.5, -1.0, 2.0, 0.25, -3.0]


@pytest.mark.parametrize("most_tokens", [1, 12, 20, 8192])
def test_every_token_of_an_answer_is_trained_with_what_belongs_to_it(most_tokens: int) -> None:
    trained = {}
    for micro in rollout_batch(ROLLOUTS, ADVANTAGES, micro_batch_tokens=most_tokens):
        inputs = micro.loss_inputs()
        assert PolicyGradient().count(inputs) == micro.num_trained
        for row, place in (inputs.targets >= 0).nonzero().tolist():
            before, token = int(micro.input_ids[row, place]), int(inputs.targets[row, place])
            assert token == before + 1
            trained[token] = (
                float(inputs.extra["advantages"][row, place]),
                float(inputs.extra["old_logprobs"][row, place]),
            )
    assert trained == {
        token: (advantage, logprob)
        for one, advantage in zip(ROLLOUTS, ADVANTAGES, strict=True)
        for token, logprob in zip(one.tokens, one.logprobs, strict=True)
    }


def test_a_log_probability_at_its_own_token_would_be_noticed() -> None:
    (micro,) = rollout_batch(ROLLOUTS[:1], [0.5])
    moved = micro.extra["old_logprobs"].roll(1, 1)
    seen = micro.with_extra(old_logprobs=moved).loss_inputs()
    assert not torch.equal(
        seen.extra["old_logprobs"][seen.targets >= 0], torch.tensor([-0.5, -1.5, -2.5])
    )


@pytest.mark.parametrize("most_tokens", [10, 12, 20])
def test_no_micro_batch_is_too_large_and_padding_is_masked(most_tokens: int) -> None:
    batch = rollout_batch(ROLLOUTS, ADVANTAGES, micro_batch_tokens=most_tokens, pad_token=99)
    assert all(micro.input_ids.numel() <= most_tokens for micro in batch)
    assert sum(len(micro.input_ids) for micro in batch) == len(ROLLOUTS)
    for micro in batch:
        mask = micro.attention_mask
        assert (mask is None) == bool((micro.input_ids != 99).all())
        assert mask is None or torch.equal(mask == 0, micro.input_ids == 99)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": ()}, "rollout 0 has 0 tokens of prompt, 3 of answer and 3 log-prob"),
        ({"tokens": (), "logprobs": ()}, "rollout 0 has 2 tokens of prompt, 0 of answer"),
        ({"logprobs": (-1.0,)}, "rollout 0 has .* 3 of answer and 1 log-probabilities"),
    ],
)
def test_a_rollout_that_cannot_be_trained_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        rollout_batch([replace(ROLLOUTS[0], **change)], [1.0])


def test_as_many_advantages_as_rollouts() -> None:
    with pytest.raises(BatchError, match="5 rollouts and 4 advantages"):
        rollout_batch(ROLLOUTS, ADVANTAGES[:4])
