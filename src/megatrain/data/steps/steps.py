"""The rows of each step: a pure function from a position to a batch and the next position.

By tokens, a step takes packed rows in order until the next would exceed `batch_tokens`. By rows, a
step is a window of `batch_rows` rows with all of their documents, packed or not. Steps do not cross
epochs: the last one of an epoch may be short, and the mean over its trained tokens is still right.

Laws (tests/data/steps/test_steps.py)
    1. However often a run is stopped and resumed, it sees the steps of the uninterrupted run.
    2. Every document comes exactly once per epoch.
    3. By rows, each step but the last of an epoch has exactly `batch_rows` rows.
    4. Both answers of a row of preferences are in one micro-batch (test_answers.py there).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatrain.batch import MicroBatch
from megatrain.data.steps.answers import PER_ROW, PairedAnswers, check_room, tokens_together
from megatrain.data.steps.micro_batches import ReadItem, micro_batches
from megatrain.data.steps.order import Indices, Order
from megatrain.data.steps.packing import WINDOW_ROWS, Windows
from megatrain.data.tokens.documents import Documents
from megatrain.errors import ConfigError, DataError

if TYPE_CHECKING:
    from megatrain.data.steps.teacher import TeacherScores

State = dict[str, Any]
"""A position as JSON: epoch, window, row, and the mark of the order they belong to; and where
answers are drawn, those that are still to be trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The next packed row: `row` of `window` of `epoch`."""

    epoch: int = 0
    window: int = 0
    row: int = 0


class Steps:
    """The steps of a run, by position."""

    def __init__(
        self,
        documents: Documents,
        order: Order,
        *,
        batch_tokens: int | None = None,
        batch_rows: int | None = None,
        micro_batch_tokens: int,
        max_length: int,
        packing: bool = True,
        flat: bool = True,
        shuffle: bool = True,
        pad_id: int = 0,
        seed: int = 0,
        answers: PairedAnswers | None = None,
        sources: Indices | None = None,
    ) -> None:
        """Give one of `batch_tokens` and `batch_rows`. Without `shuffle` packing keeps order.

        `flat`: a micro-batch is one row (micro_batches.py). `answers`: the documents are the
        answers of preferences, two for each row. `sources`: as in micro_batches.py. Raises
        ConfigError if sizes do not fit into each other.
        """
        if (batch_tokens is None) == (batch_rows is None):
            raise ConfigError("give either batch_tokens or batch_rows")
        if not max_length <= micro_batch_tokens <= (batch_tokens or micro_batch_tokens):
            raise ConfigError(
                f"max_length {max_length} <= micro_batch_tokens {micro_batch_tokens} <= "
                f"batch_tokens {batch_tokens} is not true: a row must fit in a micro-batch, "
                "and a micro-batch in a step"
            )
        if answers is not None:
            check_room(micro_batch_tokens, tokens_together(documents, one_row=packing or flat))
        self.documents = documents
        self.answers = answers
        self.teacher: TeacherScores | None = None
        """What a teacher says of the documents, where a loss wants it."""
        self.items: ReadItem | None = None
        """What reads media of the documents, by digest."""
        self._sources = sources
        self._windows = Windows(
            order,
            documents,
            max_length,
            packing=packing,
            shuffle=shuffle,
            num_rows=batch_rows or WINDOW_ROWS,
            seed=seed,
            together=1 if answers is None else PER_ROW,
        )
        self._batch_tokens = batch_tokens
        self._micro_batch_tokens = micro_batch_tokens
        self._pad_id, self._flat = pad_id, flat
        self._seed = seed
        self._held: tuple[tuple[int, int], list[Indices]] | None = None
        self._mark = self._order_mark()

    def batch(self, position: Position) -> tuple[list[MicroBatch], Position]:
        """Return the step at `position`, and the position after it."""
        rows, after = self.rows(position)
        batch = micro_batches(
            rows,
            self.documents,
            micro_batch_tokens=self._micro_batch_tokens,
            packing=self._windows.packing,
            flat=self._flat,
            pad_id=self._pad_id,
            beside=self.answers if self.teacher is None else self.teacher,
            sources=self._sources,
            items=self.items,
        )
        return batch, after

    def rows(self, position: Position) -> tuple[list[Indices], Position]:
        """Return the step's packed rows without their tokens, and the position after it."""
        if self._batch_tokens is None:
            taken = self._window(position.epoch, position.window)[position.row :]
            return taken, self._after(position.epoch, position.window)
        taken = []
        tokens, window, number = 0, position.window, position.row
        while window < self._windows.num_windows:
            rows = self._window(position.epoch, window)
            for row in rows[number:]:
                tokens += int(self.documents.lengths[row].sum())
                if tokens > self._batch_tokens:
                    return taken, Position(epoch=position.epoch, window=window, row=number)
                taken.append(row)
                number += 1
            window, number = window + 1, 0
        return taken, Position(epoch=position.epoch + 1)

    def _after(self, epoch: int, window: int) -> Position:
        """Return the first position after a window."""
        if window + 1 < self._windows.num_windows:
            return Position(epoch=epoch, window=window + 1)
        return Position(epoch=epoch + 1)

    def count(self, epoch: int = 0) -> int:
        """Return the number of steps in an epoch; by tokens all its windows are packed for it."""
        if self._batch_tokens is None:
            return self._windows.num_windows
        position, count = Position(epoch=epoch), 0
        while position.epoch == epoch:
            _, position = self.rows(position)
            count += 1
        return count

    def _window(self, epoch: int, window: int) -> list[Indices]:
        held = self._held  # another thread may replace it at any time
        if held is None or held[0] != (epoch, window):
            held = self._held = ((epoch, window), self._windows.rows(epoch, window))
        return held[1]

    def state(self, position: Position) -> State:
        """Return the position for a checkpoint."""
        return {
            "epoch": position.epoch,
            "window": position.window,
            "row": position.row,
            "order": self._mark,
        }

    def position(self, state: State) -> Position:
        """Return the position a state names. Raises DataError if it belongs to another order."""
        if state.get("order") != self._mark:
            raise DataError(
                "the saved position belongs to other data or settings: rows, weights, seed, "
                "shuffle, max_length, packing and batch_rows must stay as they were (batch_tokens "
                "may change)"
            )
        epoch, window, row = (int(state[name]) for name in ("epoch", "window", "row"))
        is_window = min(epoch, window, row) >= 0 and window < self._windows.num_windows
        if not is_window or row >= len(self._window(epoch, window)):
            raise DataError(
                f"the saved position is invalid: epoch {epoch}, window {window}, row {row}"
            )
        return Position(epoch=epoch, window=window, row=row)

    def _order_mark(self) -> str:
        """Return a name for everything that decides the rows of a position."""
        of_answers = () if self.answers is None else ("answers",)
        mark = repr((*self._windows.contents(), self._seed, *of_answers))
        return hashlib.blake2b(mark.encode(), digest_size=8).hexdigest()
