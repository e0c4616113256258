"""Pieces of the head: parts of the vocabulary whose gradient adds up and drains one after another.

The head then projects first for the log-probabilities alone, and once more by pieces.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatrain.planning.levers.lever import Lever, as_tokens
from megatrain.planning.model.shapes import ModelShape
from megatrain.planning.workload import Workload
from megatrain.step.settings import StepSettings, vocabulary_pieces

if TYPE_CHECKING:
    from megatrain.planning.search import Search

PIECES = (1, 2, 4, 8, 16)
_MOST_PIECES = 1 << 12


class HeadPieces(Lever):
    """The parts of the vocabulary that take turns."""

    name = "head_pieces"
    is_kept = True
    changes_forward = True
    turns = (1, 3, 2)

    def choices(self, search: Search) -> tuple[int, ...]:
        """Return one alone: a plan does not cut the vocabulary."""
        return PIECES[:1]

    def least(self, search: Search) -> list[int]:
        """Return one piece, and the most: pieces save memory in most cases, not in all."""
        allowed = self.allowed(search)
        return list(dict.fromkeys([allowed[0], allowed[-1]]))

    def reason(self, search: Search, settings: StepSettings) -> str:
        if settings.head_pieces > 1:
            fewer = settings.changed(head_pieces=settings.head_pieces // 2)
            return f"{fewer.head_pieces} {search.compared(settings, fewer)}"
        if search.workload.model.tied:
            return "the embedding adds to the table's gradient too"
        return "the gradient of the full vocabulary fits"

    def read(self, training: Mapping[str, Any]) -> int:
        return as_tokens(training.get("head_pieces", 1), most=_MOST_PIECES)


def num_pieces(settings: StepSettings) -> int:
    return settings.head_pieces


def piece_elements(model: ModelShape, count: int) -> list[int]:
    """Return the elements of the head's params that add up with each piece, padding included."""
    if not model.head.is_trained:
        return []
    others = max(0, model.head.trained_elements() - model.vocab * model.hidden)
    pieces = vocabulary_pieces(model.vocab, count)
    sizes = [(tokens.stop - tokens.start) * model.hidden for tokens in pieces]
    return [*sizes[:-1], sizes[-1] + others]  # with the last: norm and bias


def waiting_rows_bytes(workload: Workload, settings: StepSettings, tokens: int) -> int:
    """Return the fp32 gradients of rows that wait for the last piece, beside one micro-batch's."""
    if settings.head_pieces == 1:
        return 0
    others = sum(workload.micro_sizes(settings.micro_batch_tokens)) - tokens
    return 4 * workload.model.hidden * others
