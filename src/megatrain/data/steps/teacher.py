"""A teacher's scores of each trained token, which a micro-batch has besides the tokens.

    file    32 characters that name its bytes, then of each trained token of each document, in
            order: the numbers of k tokens in int32, and their log-probabilities in fp32

The file stays on disk. The rows of a step are read when its micro-batches are made, which is ahead
of the step.

Laws (tests/data/steps/test_teacher.py)
    1. Each target has the scores that were written for it, wherever order and packing put it.
    2. A file that is gone or too short is a DataError that names it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatrain.data.steps.order import Indices
from megatrain.data.tokens.documents import Documents
from megatrain.errors import DataError
from megatrain.losses.distillation import LOGPROBS, TOKENS
from megatrain.losses.head import IGNORED

MARK_BYTES = 32
"""Bytes at the beginning of the file that identify the rest."""
Scores = NDArray[np.int32]
"""Numbers of k tokens, then the bits of their k log-probabilities. (trained tokens, 2 k)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherScores:
    """Scores of documents, by their numbers."""

    path: Path
    top_k: int
    starts: Indices
    """Number of the first target of each document, and of all targets. (documents + 1,)"""

    def part(self, first: int) -> TeacherScores:
        """Return the scores of all documents from `first` on, numbered from 0."""
        return replace(self, starts=self.starts[first:])

    def offset(self, target: int) -> int:
        """Return where the scores of a target are in the file."""
        return MARK_BYTES + target * 8 * self.top_k

    def read(self, document: int) -> Scores:
        """Return the scores of a document's targets, in order. Raises DataError."""
        first, last = int(self.starts[document]), int(self.starts[document + 1])
        count, width = last - first, 2 * self.top_k
        try:
            found = np.fromfile(self.path, "<i4", count * width, offset=self.offset(first))
        except OSError as error:
            raise self._lost(str(error)) from error
        if len(found) < count * width:
            raise self._lost("it is too short")
        return found.reshape(count, width)

    def extra(self, documents: Indices, places: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return what a micro-batch of these documents holds for the loss.

        `places`: the number of the document at each position; documents are in this order.
        """
        scores = torch.zeros((labels.numel(), 2 * self.top_k), dtype=torch.int32)
        targets = (labels.reshape(-1) != IGNORED).nonzero().view(-1) - 1
        read = np.concatenate([self.read(int(number)) for number in documents])
        scores[targets] = torch.from_numpy(read)
        tokens, bits = scores.view(*labels.shape, 2, self.top_k).unbind(2)
        return {TOKENS: tokens.long(), LOGPROBS: bits.contiguous().view(torch.float32)}

    def _lost(self, why: str) -> DataError:
        return DataError(
            f"{self.path}: the teacher's scores cannot be read: {why}. Resume the run: they are "
            "computed again if the file is gone or damaged."
        )


def first_targets(documents: Documents) -> Indices:
    """Return the number of the first target of each document, and of all. (documents + 1,)"""
    trained = (documents.tokens(number)[1] for number in range(len(documents.lengths)))
    return np.cumsum([0, *(int(found[1:].sum()) for found in trained)])
