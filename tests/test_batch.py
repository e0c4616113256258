"""Batches: what is counted is real, what cannot be trained on is refused with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.batch import MicroBatch, check_batch, check_loss
from megatrain.errors import BatchError
from megatrain.losses.loss import NEXT_TOKEN, Loss, LossInputs, LossValue

IDS = torch.tensor([[5, 6, 7, 8], [9, 4, 0, 0]])
LABELS = torch.tensor([[-100, 6, 7, 8], [9, 4, -100, -100]])
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])


def micro(**changes: Any) -> MicroBatch:
    given: dict[str, Any] = {"input_ids": IDS, "labels": LABELS, "attention_mask": MASK}
    return MicroBatch(**given | changes)


def test_padding_is_not_counted() -> None:
    assert micro().num_tokens == 6
    assert MicroBatch(input_ids=IDS, labels=LABELS).num_tokens == 8


def test_trained_tokens_are_those_that_are_predicted() -> None:
    """The first label of a row is nobody's target."""
    assert micro().num_valid_tokens == 3 + 1


def test_a_model_gets_what_there_is_and_nothing_else() -> None:
    assert list(micro().inputs) == ["input_ids", "attention_mask"]
    packed = MicroBatch(input_ids=IDS, labels=LABELS, position_ids=torch.arange(4).repeat(2, 1))
    assert list(packed.inputs) == ["input_ids", "position_ids"]


def test_the_lengths_of_documents_count_over_all_rows() -> None:
    places = torch.tensor([[0, 1, 0, 1], [0, 1, 2, 3]])
    packed = MicroBatch(input_ids=IDS, labels=LABELS, position_ids=places).document_lengths()
    ends = packed["cu_seq_lens_q"]
    assert isinstance(ends, Tensor)
    assert ends.dtype is torch.int32
    assert ends.tolist() == [0, 2, 4, 8]
    assert packed["cu_seq_lens_k"] is ends
    assert packed["max_length_q"] == packed["max_length_k"] == 4


def test_documents_are_rows_or_parts_of_packed_rows() -> None:
    places = torch.tensor([[0, 1, 0, 1], [0, 1, 2, 3]])
    packed = MicroBatch(input_ids=IDS, labels=LABELS, position_ids=places).documents()
    assert [one.input_ids.tolist() for one in packed] == [[[5, 6]], [[7, 8]], [[9, 4, 0, 0]]]
    assert [one.labels.tolist() for one in packed] == [[[-100, 6]], [[7, 8]], [[9, 4, -100, -100]]]
    padded = micro().documents()
    assert [one.attention_mask.tolist() for one in padded if one.attention_mask is not None] == [
        [[1, 1, 1, 1]],
        [[1, 1, 0, 0]],
    ]


def test_a_single_packed_row_has_documents() -> None:
    ids, places = torch.arange(1, 8)[None], torch.tensor([[0, 1, 0, 0, 1, 2, 3]])
    flat = MicroBatch(input_ids=ids, labels=ids, position_ids=places)
    found = flat.packed_documents()
    assert found is not None
    assert (found.lengths, found.longest, found.bounds.tolist()) == ((2, 1, 4), 4, [0, 2, 3, 7])
    assert flat.mapped(lambda tensor: tensor.repeat(2, 1)).packed_documents() is None
    assert micro().packed_documents() is None


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        ([], "a step needs at least one micro-batch"),
        (
            [micro(), micro(labels=LABELS[:, :3])],
            r"micro-batch 1: labels is \(2, 3\), input_ids \(2, 4\); both must be \(rows, length\)",
        ),
        (
            [micro(attention_mask=MASK[0])],
            r"micro-batch 0: attention_mask is \(4,\), input_ids \(2, 4\)",
        ),
        (
            [MicroBatch(input_ids=IDS[0], labels=LABELS[0])],
            r"micro-batch 0: input_ids is \(4,\), input_ids \(4,\); both must be \(rows, length\)",
        ),
        ([MicroBatch(input_ids=IDS[:0], labels=LABELS[:0])], r"micro-batch 0 is \(0, 4\): no tok"),
        (
            [micro(input_ids=IDS + 5)],
            "micro-batch 0: token 10 in input_ids is outside the vocabulary of 10",
        ),
        (
            [micro(), micro(input_ids=IDS - 1)],
            "micro-batch 1: token -1 in input_ids is outside the vocabulary of 10",
        ),
        (
            [micro(labels=torch.where(LABELS == 7, 77, LABELS))],
            "micro-batch 0: token 77 in labels is outside the vocabulary of 10",
        ),
        (
            [micro(labels=torch.where(LABELS == 7, -1, LABELS))],
            "micro-batch 0: token -1 in labels is outside the vocabulary of 10",
        ),
        (
            [micro(labels=torch.full_like(IDS, -100))] * 2,
            r"no token of the step is trained: every label is -100 \(were answers truncated away",
        ),
    ],
    ids=lambda value: "" if isinstance(value, list) else value[:40],
)
def test_what_cannot_be_trained_on_is_refused_with_the_reason(
    batch: list[MicroBatch], text: str
) -> None:
    with pytest.raises(BatchError, match=f"^{text}"):
        check_batch(batch, 10)


# Tensors for the loss.


class Scaled(Loss):
    """A loss that wants one factor per row."""

    required_tensors = ("factors",)

    def num_items(self, inputs: LossInputs) -> int:
        factors = inputs.loss_tensors["factors"]
        if factors.min() < 0:
            raise BatchError(f"factor {float(factors.min()):g} is negative")
        return int(factors.sum())

    def compute_loss(self, inputs: LossInputs, logprobs: Tensor) -> LossValue:
        raise NotImplementedError


def scaled(*factors: float) -> MicroBatch:
    return MicroBatch(input_ids=IDS, labels=LABELS, loss_tensors={"factors": torch.tensor(factors)})


def test_extra_tensors_go_where_the_others_go() -> None:
    moved = scaled(1.0, 2.0).mapped(lambda tensor: tensor + 1)
    assert moved.loss_tensors["factors"].tolist() == [2.0, 3.0]
    assert "factors" not in moved.inputs
    assert moved.loss_inputs().loss_tensors["factors"].tolist() == [2.0, 3.0]


def test_a_loss_sees_targets_row_by_row() -> None:
    assert micro().loss_inputs().targets.tolist() == [[6, 7, 8, -100], [4, -100, -100, -100]]


def test_a_batch_with_what_the_loss_needs_passes() -> None:
    check_loss([scaled(1.0, 2.0), scaled(0.0, 0.0)], Scaled())
    check_loss([micro()], NEXT_TOKEN)


@pytest.mark.parametrize(
    ("batch", "loss", "message"),
    [
        ([scaled(1.0), micro()], Scaled(), "micro-batch 1: loss_tensors has no 'factors', and the "
         "loss Scaled needs it"),
        ([scaled(1.0)], NEXT_TOKEN, "micro-batch 0: loss_tensors has 'factors', and the loss "
         "NextToken does not read it"),
        ([scaled(1.0), scaled(-3.0)], Scaled(), "micro-batch 1: factor -3 is negative"),
        ([scaled(0.0)], Scaled(), "the step has nothing for the loss Scaled to count"),
    ],
)  # fmt: skip
def test_a_batch_that_the_loss_cannot_use_is_refused(
    batch: list[MicroBatch], loss: Loss, message: str
) -> None:
    with pytest.raises(BatchError, match=f"^{message}$"):
        check_loss(batch, loss)
