"""The loss of each unit, by which sources are told apart: it adds up, and has its place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatrain.losses.head import IGNORED
from megatrain.losses.loss import Loss, LossInputs, NextToken
from megatrain.losses.preferences import ApoZero, Dpo, Ipo, Kto, Orpo, Robust, Simpo

DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [3, 3, 2, 2, 2, 2, 2]])
"""The document of each position: two rows of two answers."""
LOSSES: list[Loss] = [NextToken(), Dpo(), Ipo(sft=0.5), Orpo(), Simpo(), ApoZero(), Robust(), Kto()]


def inputs_of(loss: Loss) -> tuple[LossInputs, Tensor]:
    torch.manual_seed(0)
    targets = torch.full(DOCUMENTS.shape, 5)
    targets[:, ::3] = IGNORED
    trained = targets != IGNORED
    logprobs = torch.where(trained, -torch.rand(DOCUMENTS.shape, dtype=torch.float64), 0.0)
    extra = {
        "answers": DOCUMENTS,
        "lengths": torch.bincount(DOCUMENTS[trained], minlength=4),
        "reference": -torch.rand(4, dtype=torch.float64),
        "desirable": torch.tensor([True, False]),
    }
    extra = {name: tensor for name, tensor in extra.items() if name in loss.required_tensors}
    return LossInputs(targets=targets, loss_tensors=extra), logprobs


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: type(loss).__name__)
def test_the_losses_of_units_add_up_and_each_has_its_place(loss: Loss) -> None:
    inputs, logprobs = inputs_of(loss)
    value, places = loss.compute_loss(inputs, logprobs), loss.item_positions(inputs)
    assert value.per_item is not None
    assert places is not None
    assert len(value.per_item) == len(places) == loss.num_items(inputs)
    torch.testing.assert_close(value.per_item.sum(), value.loss_sum)
    if isinstance(loss, NextToken):
        assert torch.equal(-logprobs.view(-1)[places], value.per_item)
    else:
        assert DOCUMENTS.view(-1)[places].tolist() == [0, 2], "the first answers of both rows"


@pytest.mark.parametrize("loss", LOSSES[1:7], ids=lambda loss: type(loss).__name__)
def test_a_row_of_another_place_would_be_noticed(loss: Loss) -> None:
    """Other answers in the second row change the loss of that unit and of no other."""
    inputs, logprobs = inputs_of(loss)
    before = loss.compute_loss(inputs, logprobs).per_item
    after = loss.compute_loss(inputs, torch.where(DOCUMENTS == 2, 2 * logprobs, logprobs)).per_item
    assert before is not None
    assert after is not None
    assert (before == after).tolist() == [True, False]
