"""Parity with TRL: the comparison notices every difference, and runs where trl is installed."""

from __future__ import annotations

import copy
import importlib.util

import pytest
import torch

from proofs.parity.steps import IGNORED, Document, History, documents_of, faults_of

SHORT = ("chat, several turns, short last step", "prompt and completion", "tools", "chat, packed")


@pytest.mark.skipif(
    importlib.util.find_spec("trl") is None,
    reason="trl is not installed; `python -m proofs.parity` runs in an environment of its own",
)
@pytest.mark.parametrize("name", SHORT)
def test_the_same_rows_give_the_same_targets_losses_and_steps_as_in_trl(name: str) -> None:
    from proofs.parity.__main__ import compare

    assert compare(name)["faults"] == []


PADDED = {
    "input_ids": torch.tensor([[5, 6, 7], [8, 9, 0]]),
    "labels": torch.tensor([[5, 6, IGNORED], [IGNORED, 9, IGNORED]]),
    "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
}
PACKED = {
    "input_ids": torch.tensor([[5, 6, 7, 8, 9]]),
    "labels": torch.tensor([[IGNORED, 6, IGNORED, IGNORED, 9]]),
    "position_ids": torch.tensor([[0, 1, 2, 0, 1]]),
}


@pytest.mark.parametrize("inputs", [PADDED, PACKED])
def test_padded_and_packed_rows_give_the_same_documents(inputs: dict[str, torch.Tensor]) -> None:
    expected = [((5, 6, 7), (False, True, False)), ((8, 9), (False, True))]
    assert list(documents_of(inputs)) == expected


def _history() -> History:
    document: Document = ((1, 2, 3), (False, True, True))
    return History(documents=[[document], [document]], losses=[2.0, 1.0], planned_steps=2)


def _other_steps(history: History) -> None:
    history.planned_steps = 3


def _other_target(history: History) -> None:
    history.documents[1] = [((1, 2, 3), (False, True, False))]


def _lost_document(history: History) -> None:
    history.documents[0] = []


def _other_loss(history: History) -> None:
    history.losses[1] += 2e-5


def _no_loss(history: History) -> None:
    history.losses = []


@pytest.mark.parametrize(
    "change", [_other_steps, _other_target, _lost_document, _other_loss, _no_loss]
)
def test_each_difference_would_be_noticed(change: object) -> None:
    other = copy.deepcopy(_history())
    assert callable(change)
    change(other)
    assert faults_of(_history(), other)
