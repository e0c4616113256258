"""Losses: one weight per token, known beforehand or taken from the log-probabilities."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatrain.errors import ConfigError
from megatrain.losses.head import IGNORED, head_logprobs, trained_rows
from megatrain.losses.loss import NEXT_TOKEN, Loss, LossInputs, LossValue
from testkit.live_bytes import LiveBytes
from tests.losses.test_head import make, peak_beyond_the_rows

INPUTS = LossInputs(targets=torch.tensor([[IGNORED, 3], [0, IGNORED]]), loss_tensors={})
LOGPROBS = torch.tensor([[0.0, -1.5], [-0.25, 0.0]])


class Squared(Loss):
    """Rows that are as likely as possible, counted twice where they are not."""

    def num_items(self, inputs: LossInputs) -> int:
        return len(inputs.targets)

    def compute_loss(self, inputs: LossInputs, logprobs: Tensor) -> LossValue:
        sums = logprobs.sum(1)
        return LossValue(loss_sum=(sums * sums).sum(), metrics={"unlikely": (sums < -1).sum()})


class Bare(Squared):
    def compute_loss(self, inputs: LossInputs, logprobs: Tensor) -> LossValue:
        return logprobs.sum()  # type: ignore[return-value]


def test_a_loss_that_returns_a_tensor_is_told_what_to_return() -> None:
    logprobs = torch.zeros(INPUTS.targets.shape)
    with pytest.raises(ConfigError, match=r"^Bare\.value returned a Tensor; it must return mt"):
        Bare().logprob_grads(INPUTS, logprobs, 4)
    assert Squared().logprob_grads(INPUTS, logprobs, 4).loss == 0


def test_the_weight_of_a_trained_token_is_its_share_of_the_step() -> None:
    found = NEXT_TOKEN.logprob_grads(INPUTS, None, 4)
    assert found.logprob_grads.dtype is torch.float32
    assert found.logprob_grads.tolist() == [[0.0, -0.25], [-0.25, 0.0]]
    assert (found.loss, found.metrics) == (None, {})


def test_next_token_counts_trained_tokens_and_sums_their_log_probabilities() -> None:
    assert NEXT_TOKEN.num_items(INPUTS) == 2
    assert float(NEXT_TOKEN.compute_loss(INPUTS, LOGPROBS).loss_sum) == 1.75


def test_next_token_weights_are_the_gradient_of_its_value() -> None:
    """Loss.logprob_grads derives them by autograd, NextToken writes them down."""
    derived = Loss.logprob_grads(NEXT_TOKEN, INPUTS, LOGPROBS, 8)
    known = NEXT_TOKEN.logprob_grads(INPUTS, None, 8)
    trained = INPUTS.targets != IGNORED
    assert torch.equal(derived.logprob_grads[trained], known.logprob_grads[trained])
    assert derived.loss == (known.logprob_grads * LOGPROBS).sum()


def test_a_loss_written_as_a_value_gets_its_gradient() -> None:
    found = Squared().logprob_grads(INPUTS, LOGPROBS, 2)
    assert found.loss is not None
    assert float(found.loss) == (1.5**2 + 0.25**2) / 2
    assert found.logprob_grads.tolist() == [[-1.5, -1.5], [-0.25, -0.25]]
    assert not found.logprob_grads.requires_grad
    assert not found.loss.requires_grad
    assert int(found.metrics["unlikely"]) == 1
    assert not LOGPROBS.requires_grad


# The first pass.


def first_peak(tokens: int, chunk_tokens: int) -> int:
    """Return the peak of the first pass, without its result."""
    world = make(tokens=tokens)
    trained = trained_rows(world.targets, chunk_tokens)
    with LiveBytes() as count:
        found = head_logprobs(world.rows, trained, world.projection)
    return int(count.peak - found.nbytes)


def test_the_first_pass_holds_one_chunk_and_less_than_the_second() -> None:
    chunk = 256
    small, large = (first_peak(chunk * number, chunk) for number in (2, 16))
    assert small == large
    assert large <= peak_beyond_the_rows(16 * chunk, chunk)
