"""Facts about the two answers of each row that a micro-batch has besides their tokens.

A row of preferences is two documents: of pairs the chosen and the rejected answer, of kto its own
completion and that of another row after the same prompt. A loss compares the two, so both are
always in one micro-batch: documents 2n and 2n + 1 there are those of one row.

Laws (tests/data/steps/test_answers.py)
    1. The documents of a row are in one micro-batch, the first before the second.
    2. Each document has its own reference log-probability, and each row its own mark, wherever
       order and packing put them.
    3. PairedAnswers that no micro-batch can hold together are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatrain.data.steps.order import Indices
from megatrain.data.tokens.documents import Documents
from megatrain.errors import ConfigError
from megatrain.losses.head import IGNORED

PER_ROW = 2
"""Documents of a row of preferences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedAnswers:
    """Arrays by the numbers of documents and rows; a row's documents are 2n and 2n + 1."""

    desirable: NDArray[np.bool_] | None = None
    """Whether the completion of each row is desirable, for kto. (rows,)"""
    references: NDArray[np.float32] | None = None
    """Log-probability of each document's trained tokens under the reference model. (documents,)"""

    def first(self, num_rows: int) -> PairedAnswers:
        """Return the arrays of the first rows."""
        of_rows, of_documents = self.desirable, self.references
        return replace(
            self,
            desirable=None if of_rows is None else of_rows[:num_rows],
            references=None if of_documents is None else of_documents[: PER_ROW * num_rows],
        )

    def extra(self, documents: Indices, places: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return what a micro-batch of these documents holds for the loss.

        `places`: the number of the document at each position, counted in the micro-batch.
        """
        trained = places[labels != IGNORED]
        found = {"answers": places, "lengths": torch.bincount(trained, minlength=len(documents))}
        if self.references is not None:
            found["reference"] = torch.from_numpy(self.references[documents])
        if self.desirable is not None:
            found["desirable"] = torch.from_numpy(self.desirable[documents[::PER_ROW] // PER_ROW])
        return found


def joined_answers(parts: Sequence[PairedAnswers]) -> PairedAnswers:
    """Return the answers of several sources as one, numbered through."""
    desirable = [part.desirable for part in parts if part.desirable is not None]
    references = [part.references for part in parts if part.references is not None]
    return PairedAnswers(
        desirable=np.concatenate(desirable) if desirable else None,
        references=np.concatenate(references) if references else None,
    )


def tokens_together(documents: Documents, *, one_row: bool) -> int:
    """Return the tokens that a micro-batch must hold for the longest row, padding counted.

    `one_row`: both answers are in one row, flat or packed.
    """
    lengths = documents.lengths.reshape(-1, PER_ROW)
    needed = lengths.sum(1) if one_row else PER_ROW * lengths.max(1)
    return int(needed.max(initial=0))


def check_room(given: int, needed: int, key: str = "train.micro_batch_tokens") -> None:
    """Raise ConfigError if the two answers of a row do not fit together; `key` sets the room."""
    if needed > given:
        raise ConfigError(
            f"{key} is {given}, and the two answers of a row need up to {needed} tokens: they are "
            f"compared, so one micro-batch holds both. Raise it to {needed} or more, or lower "
            f"data.max_length to {given // PER_ROW}."
        )
