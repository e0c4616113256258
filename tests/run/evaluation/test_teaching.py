"""Scores of a teacher: those of the resident model, computed once, of one vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatrain import load_model
from megatrain.data.steps.micro_batches import laid_out
from megatrain.data.steps.teacher import TeacherScores, first_targets
from megatrain.engine.engine import Engine
from megatrain.errors import DiskFull
from megatrain.losses.head import IGNORED
from megatrain.losses.leaves import TokenOutputSpec
from megatrain.run.evaluation.references import document_groups
from megatrain.run.evaluation.teaching import is_consistent, write_scores, written
from testkit.families import save_tiny
from testkit.faulty_os import faulty
from testkit.made_documents import MadeDocuments
from testkit.plain import load_plain

LENGTHS = (9, 5, 23, 14, 14, 3, 40, 8)
MICRO, TOP_K, TEMPERATURE = 40, 5, 2.0


class Drawn(MadeDocuments):
    """The same with tokens of a small vocabulary."""

    def tokens(self, document: int) -> tuple[Any, Any]:
        tokens, trained = super().tokens(document)
        return tokens * 7 % 300, trained


def scored(folder: Path, one_row: bool) -> TeacherScores:
    """Write the scores of a tiny model."""
    home, documents = load_model(folder, dtype="fp32"), Drawn(LENGTHS)
    scores = TeacherScores(
        path=folder / "teacher.bin", top_k=TOP_K, starts=first_targets(documents)
    )
    wanted = TokenOutputSpec(top_k=TOP_K, logsumexp=True, temperature=TEMPERATURE)
    sizes = {"micro_batch_tokens": MICRO, "pass_tokens": 100}
    with Engine(home.decoder, home.store) as engine, written(scores, "a key") as fd:
        write_scores(
            engine, documents, scores, fd, wanted, **sizes, one_row=one_row, pad_id=0, shown=False
        )
    return scores


@pytest.mark.parametrize("one_row", [True, False])
def test_they_are_those_of_the_resident_model(one_row: bool, tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", torch.float32)
    scores, documents = scored(tmp_path, one_row), Drawn(LENGTHS)
    plain = load_plain(tmp_path, torch.float32).eval()
    for group in document_groups(documents, MICRO, one_row=one_row):
        for number in group:
            micro = laid_out(np.array([number]), documents, one_row=True, pad_id=0)
            with torch.no_grad():
                logits = plain(input_ids=micro.input_ids).logits / TEMPERATURE
            has_target = micro.loss_inputs().targets != IGNORED
            expected = logits.log_softmax(-1)[has_target].topk(TOP_K)
            found = torch.from_numpy(scores.read(int(number)))
            assert torch.equal(found[:, :TOP_K], expected.indices.int())
            logprobs = found[:, TOP_K:].contiguous().view(torch.float32)
            torch.testing.assert_close(logprobs, expected.values, rtol=0, atol=2e-6)


def test_a_damaged_or_foreign_file_is_not_used(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", torch.float32)
    scores = scored(tmp_path, one_row=True)
    assert is_consistent(scores, "a key")
    assert not is_consistent(scores, "another")
    data = scores.path.read_bytes()
    for damaged in (data[:-1], data[:-1] + bytes([data[-1] ^ 1]), b""):
        scores.path.write_bytes(damaged)
        assert not is_consistent(scores, "a key")
    scores.path.unlink()
    assert not is_consistent(scores, "a key")


def test_a_full_disk_is_said_with_what_is_needed(tmp_path: Path) -> None:
    scores = TeacherScores(path=tmp_path / "teacher.bin", top_k=2, starts=np.array([0, 3]))
    said = r"no room for the scores of the teacher, \d.*MEGATRAIN_CACHE.*loss\.top_k"
    with faulty(fail_at=1), pytest.raises(DiskFull, match=said), written(scores, "a key"):
        pass
    assert not list(tmp_path.iterdir())
