"""A teacher's scores: each target has its own, wherever order and packing put it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatrain.data.steps.order import ShuffledOrder
from megatrain.data.steps.steps import Position, Steps
from megatrain.data.steps.teacher import MARK_BYTES, TeacherScores, first_targets
from megatrain.errors import DataError
from megatrain.losses.head import IGNORED
from testkit.made_documents import SPAN, MadeDocuments

LENGTHS = (9, 2, 23, 14, 14, 3, 32, 8, 17, 2, 11, 30)
TOP_K = 3


def made(folder: Path, documents: MadeDocuments) -> TeacherScores:
    """Write scores that say of which target they are: token j is target + j, at -target - j."""
    rows = []
    for number in range(len(documents.lengths)):
        tokens, trained = documents.tokens(number)
        for target in tokens[1:][trained[1:]]:
            own = target + np.arange(TOP_K, dtype=np.int32)
            rows.append(np.concatenate([own, (-own).astype(np.float32).view(np.int32)]))
    path = folder / "teacher.bin"
    path.write_bytes(b"x" * MARK_BYTES + np.stack(rows).astype("<i4").tobytes())
    return TeacherScores(path=path, top_k=TOP_K, starts=first_targets(documents))


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("packing", [True, False])
def test_each_target_has_its_own_scores(packing: bool, flat: bool, tmp_path: Path) -> None:
    documents = MadeDocuments(LENGTHS)
    sizes: dict[str, Any] = {"batch_tokens": 128, "micro_batch_tokens": 64, "max_length": 32}
    order = ShuffledOrder(len(LENGTHS), 3)
    steps = Steps(documents, order, packing=packing, flat=flat, seed=3, **sizes)
    steps.teacher = made(tmp_path, documents)
    position, seen = Position(), 0
    while position.epoch == 0:
        batch, position = steps.batch(position)
        for micro in batch:
            targets = micro.loss_inputs().targets
            has_target = targets != IGNORED
            expected = targets[has_target][:, None] + torch.arange(TOP_K)
            assert torch.equal(micro.loss_tensors["teacher_tokens"][has_target], expected)
            assert torch.equal(
                micro.loss_tensors["teacher_logprobs"][has_target], -expected.float()
            )
            assert not micro.loss_tensors["teacher_tokens"][~has_target].any()
            seen += len(expected)
    assert seen == steps.teacher.starts[-1]


def test_a_part_is_numbered_from_its_first_document(tmp_path: Path) -> None:
    whole = made(tmp_path, MadeDocuments(LENGTHS))
    part = whole.part(4)
    assert np.array_equal(part.read(1), whole.read(5))
    assert part.read(1)[0, 0] // SPAN == 5


def test_a_file_that_is_short_or_gone_is_named(tmp_path: Path) -> None:
    scores = made(tmp_path, MadeDocuments(LENGTHS))
    scores.path.write_bytes(scores.path.read_bytes()[:-1])
    scores.read(0)
    with pytest.raises(
        DataError, match=r"teacher.bin: .* cannot be read: it is too short\. Resume"
    ):
        scores.read(len(LENGTHS) - 1)
    scores.path.unlink()
    with pytest.raises(DataError, match=r"teacher.bin: the teacher's scores cannot be read: .*"):
        scores.read(0)
