"""Answers: the two documents of a row stay together, with what belongs to them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatrain.batch import MicroBatch, step_part
from megatrain.data.steps.answers import PairedAnswers, joined_answers, tokens_together
from megatrain.data.steps.order import InOrder, MixedOrder, ShuffledOrder
from megatrain.data.steps.steps import Position, Steps
from megatrain.data.tokens.documents import JoinedDocuments, hold_out
from megatrain.errors import ConfigError, DataError
from megatrain.losses.preferences import Dpo
from megatrain.ranks.ownership import Owner
from testkit.made_documents import SPAN, MadeDocuments, documents_in

LAYOUTS = [
    {"packing": True, "flat": True},
    {"packing": True, "flat": False},
    {"packing": False, "flat": True},
    {"packing": False, "flat": False},
]
Lengths = st.lists(st.tuples(st.integers(2, 32), st.integers(2, 32)), min_size=1, max_size=60)


def _pairs(lengths: Iterable[tuple[int, int]]) -> MadeDocuments:
    flat = [length for pair in lengths for length in pair]
    return MadeDocuments(flat, counts=[2] * (len(flat) // 2))


def _answers(documents: MadeDocuments) -> PairedAnswers:
    """Each document's reference is its own number, each third row is desirable."""
    count = len(documents.lengths)
    return PairedAnswers(
        references=np.arange(count, dtype=np.float32), desirable=np.arange(count // 2) % 3 == 0
    )


def _steps(documents: Any, answers: PairedAnswers, order: Any = None, **changes: Any) -> Steps:
    settings: dict[str, Any] = {
        "batch_tokens": 256, "micro_batch_tokens": 64, "max_length": 32, "seed": 3, **changes
    }  # fmt: skip
    order = order or ShuffledOrder(len(documents.lengths) // 2, 3)
    return Steps(documents, order, answers=answers, **settings)


def _epoch(steps: Steps, epoch: int = 0) -> list[list[MicroBatch]]:
    position, found = Position(epoch=epoch), []
    while position.epoch == epoch:
        batch, position = steps.batch(position)
        found.append(batch)
    return found


def _faults(micro: MicroBatch) -> list[str]:
    """What a micro-batch breaks of the laws; documents say which they are."""
    answers, found = micro.loss_tensors["answers"], []
    real = torch.ones_like(answers) if micro.attention_mask is None else micro.attention_mask
    owners = micro.input_ids // SPAN
    numbers = [
        torch.unique(owners[(answers == n) & (real == 1)]) for n in range(int(answers.max()) + 1)
    ]
    if any(len(number) != 1 for number in numbers):
        return ["positions of other documents"]
    documents = torch.cat(numbers)
    firsts, seconds = documents[::2], documents[1::2]
    if len(firsts) != len(seconds) or not bool(((firsts % 2 == 0) & (seconds == firsts + 1)).all()):
        found.append("answers of other rows")
    if micro.loss_tensors["reference"].tolist() != documents.tolist():
        found.append("references of other documents")
    if micro.loss_tensors["desirable"].tolist() != [int(n) // 2 % 3 == 0 for n in firsts]:
        found.append("marks of other rows")
    return found


@pytest.mark.few(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@given(lengths=Lengths, shuffle=st.booleans(), rows=st.sampled_from([None, 7]))
def test_answers_of_a_row_share_a_micro_batch(
    layout: dict[str, bool], lengths: list[tuple[int, int]], shuffle: bool, rows: int | None
) -> None:
    documents = _pairs(lengths)
    order = ShuffledOrder(len(lengths), 3) if shuffle else InOrder(len(lengths))
    tokens = None if rows else 256
    steps = _steps(
        documents, _answers(documents), order, shuffle=shuffle, batch_rows=rows,
        batch_tokens=tokens, **layout,
    )  # fmt: skip
    batches = _epoch(steps, epoch=1)
    assert [_faults(micro) for batch in batches for micro in batch if _faults(micro)] == []
    seen = sum((documents_in(batch) for batch in batches), Counter())
    assert seen == dict.fromkeys(range(2 * len(lengths)), 1)
    for batch in batches:
        assert max(micro.input_ids.numel() for micro in batch) <= 64
        for rank in range(3):  # a rank has complete micro-batches, so complete rows
            part = step_part(_for_pair_loss(batch), Dpo(), Owner(rank=rank, size=3))
            assert sum(len(micro.loss_tensors["reference"]) for micro in part.batch) % 2 == 0


def _for_pair_loss(batch: list[MicroBatch]) -> list[MicroBatch]:
    names = Dpo.required_tensors
    return [
        replace(micro, loss_tensors={name: micro.loss_tensors[name] for name in names})
        for micro in batch
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_separated_and_swapped_answers_would_be_noticed(layout: dict[str, bool]) -> None:
    documents = _pairs([(5, 9), (9, 5), (7, 7), (3, 4)])
    answers = _answers(documents)
    (micro,) = _epoch(_steps(documents, answers, **layout))[0][:1]
    assert _faults(micro) == []
    swapped = replace(
        micro, loss_tensors={**micro.loss_tensors, "answers": micro.loss_tensors["answers"] ^ 1}
    )
    assert "answers of other rows" in _faults(swapped)
    assert answers.references is not None
    moved = replace(answers, references=np.roll(answers.references, 1))
    (other,) = _epoch(_steps(documents, moved, **layout))[0][:1]
    assert _faults(other) == ["references of other documents"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_stopped_run_sees_the_same_answers(layout: dict[str, bool]) -> None:
    lengths = np.random.default_rng(0).integers(2, 33, (150, 2)).tolist()
    documents = _pairs(lengths)
    steps, position, whole = _steps(documents, _answers(documents), **layout), Position(), []
    while position.epoch < 2:
        at = position
        batch, position = steps.batch(position)
        whole.append((at, batch))
    for at, expected in whole[:: len(whole) // 7]:
        fresh = _steps(documents, _answers(documents), **layout)
        batch, _ = fresh.batch(fresh.position(json.loads(json.dumps(steps.state(at)))))
        for one, other in zip(batch, expected, strict=True):
            assert torch.equal(one.input_ids, other.input_ids)
            assert one.loss_tensors.keys() == other.loss_tensors.keys()
            assert all(
                torch.equal(one.loss_tensors[name], other.loss_tensors[name])
                for name in one.loss_tensors
            )


def test_a_position_among_single_documents_is_no_position_among_pairs() -> None:
    documents = _pairs([(5, 9)] * 30)
    alone = Steps(
        documents, ShuffledOrder(30, 3), batch_tokens=256, micro_batch_tokens=64, max_length=32,
        seed=3,
    )  # fmt: skip
    with pytest.raises(DataError, match="belongs to other data"):
        _steps(documents, _answers(documents)).position(alone.state(Position()))


@pytest.mark.parametrize(
    ("layout", "needed"),
    [
        ({"packing": True, "flat": False}, 41),
        ({"packing": False, "flat": True}, 41),
        ({"packing": False, "flat": False}, 62),
    ],
    ids=str,
)
def test_answers_that_fit_no_micro_batch_together_are_refused(
    layout: dict[str, bool], needed: int
) -> None:
    documents = _pairs([(5, 5), (10, 31), (25, 15)])
    assert tokens_together(documents, one_row=any(layout.values())) == needed
    room: dict[str, Any] = {"batch_tokens": needed, "micro_batch_tokens": needed}
    assert len(_epoch(_steps(documents, _answers(documents), **layout, **room))) > 1
    with pytest.raises(ConfigError, match=rf"need up to {needed} tokens.*Raise it to {needed}"):
        _steps(documents, _answers(documents), **layout, micro_batch_tokens=needed - 1)


def test_a_mixture_of_held_out_pairs_keeps_rows_whole() -> None:
    parts = [_pairs([(5, 9)] * 20), _pairs([(8, 3)] * 10)]
    kept = [hold_out(part, 0.2, seed)[0] for seed, part in enumerate(parts)]
    documents = JoinedDocuments(kept)
    given_answers = joined_answers(
        [PairedAnswers(desirable=np.full(len(k.lengths) // 2, True)) for k in kept]
    )
    order = MixedOrder([16, 8], [1, 2.5], 3)
    batches = _epoch(_steps(documents, given_answers, order))
    seen: Counter[int] = Counter()
    for batch in batches:
        for micro in batch:
            assert micro.loss_tensors["desirable"].shape == (
                (int(micro.loss_tensors["answers"].max()) + 1) // 2,
            )
            assert set(micro.loss_tensors) == {"answers", "lengths", "desirable"}
            assert micro.position_ids is not None
            seen += Counter(torch.eq(micro.position_ids, 0).flatten().tolist())
    assert seen[True] == 2 * order.size


def test_the_first_rows_have_the_first_answers() -> None:
    answers = _answers(_pairs([(2, 2)] * 5)).first(2)
    assert answers.references is not None
    assert answers.desirable is not None
    assert answers.references.tolist() == [0, 1, 2, 3]
    assert answers.desirable.tolist() == [True, False]
