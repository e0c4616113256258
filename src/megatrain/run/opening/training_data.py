"""The data of a run: what is trained on, what is judged by, and prompts to answer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megatrain.config import Config
from megatrain.data.steps.loader import Loader
from megatrain.data.steps.order import InOrder, Order
from megatrain.data.steps.steps import Position, State, Steps
from megatrain.data.tokens.documents import Documents, Subset, num_rows
from megatrain.data.training_rows import TrainingRows, by_tokens, gather, one_of
from megatrain.engine.batch import MicroBatch
from megatrain.errors import DataError, ModelFolderError
from megatrain.model_files import VOCABULARY, is_lfs_pointer, lfs_pointer_text
from megatrain.run.evaluation.answers import Question
from megatrain.run.opening.resolve import Resolved


class TrainingData:
    """Steps to train on, batches to evaluate on, prompts. Close it when done."""

    def __init__(self, steps: Steps, evaluation: Steps | None, rows: TrainingRows) -> None:
        self._steps, self._evaluation, self.rows = steps, evaluation, rows
        self._shown = rows.held[0] if rows.held else rows.train
        self._digest = rows.digest
        self._loader = Loader(steps)

    @property
    def card(self) -> dict[str, Any]:
        """The sources' cards as one."""
        return self.rows.card()

    @property
    def num_judged(self) -> int:
        """Rows that an evaluation looks at, eval.max_rows at most."""
        return 0 if self._evaluation is None else num_rows(self._evaluation.documents)

    @cached_property
    def steps_in_epoch(self) -> int:
        """Steps of the first epoch; by tokens, others may have a few more or less."""
        return self._steps.count()

    def steps_of(self, epochs: float) -> int:
        """Return how many steps so many epochs have; a part of a step counts as one."""
        return math.ceil(self.steps_in_epoch * epochs)

    def next_batch(self) -> list[MicroBatch]:
        return next(self._loader)

    def state(self) -> State:
        """Return where the next batch begins, and of which rows."""
        state = self._loader.state()
        return state | {"order": f"{state['order']}-{self._digest}"}

    def seek(self, state: State) -> None:
        """Go to a saved state. Raises DataError if it belongs to other data."""
        order, _, digest = str(state["order"]).partition("-")
        if digest != self._digest:
            raise DataError(
                "the rows are not those that the run was trained on: their tokens, their order or "
                "what is trained of them has changed. Resume with the same files, tokenizer and "
                "data settings, or start a new run from the exported model with another save.dir."
            )
        self._loader.seek(state | {"order": order})

    def eval_batches(self) -> Iterator[list[MicroBatch]]:
        """Yield the evaluation's rows, all of them, in order; nothing if there are none."""
        position = Position()
        while self._evaluation is not None and position.epoch == 0:
            batch, position = self._evaluation.batch(position)
            yield batch

    def questions(self, count: int) -> list[Question]:
        """Return the first prompts of some rows, with the answers that the rows give."""
        found = []
        for number in range(min(count, len(self._shown.lengths))):
            ids, trained = self._shown.tokens(number)
            first = max(1, int(np.argmax(trained)) if trained.any() else len(ids))
            stop = np.argmin(np.append(trained[first:], False))
            tokens = [int(token) for token in ids[: first + stop]]
            found.append(Question(prompt=tuple(tokens[:first]), answer=tuple(tokens[first:])))
        return found

    def close(self) -> None:
        self._loader.close()


def open_data(
    config: Config, tokenizer: Any, resolved: Resolved, rows: TrainingRows | None = None
) -> TrainingData:
    """Cut the rows that the config names into steps. Raises DataError, with the file and line."""
    rows = rows or gather(config, tokenizer)
    steps = _steps(config, rows.train, rows.order, tokenizer, resolved)
    # An evaluation has no number of steps to match: only its memory counts.
    judged = by_tokens(config, rows)
    evaluation = _evaluation(judged, rows.held, tokenizer, resolved) if rows.held else None
    return TrainingData(steps, evaluation, rows)


def _evaluation(
    config: Config, held: Sequence[Documents], tokenizer: Any, resolved: Resolved
) -> Steps:
    judged = one_of(held)
    if (most := config.eval.max_rows) is not None:
        judged = Subset(judged, np.arange(min(most, num_rows(judged)), dtype=np.int64))
    return _steps(config, judged, InOrder(num_rows(judged)), tokenizer, resolved)


def load_tokenizer(folder: str | Path) -> Any:
    """Return the tokenizer of a model folder. Raises ModelFolderError, whatever goes wrong."""
    from transformers import AutoTokenizer

    if not Path(folder).is_dir():
        raise ModelFolderError(f"{folder} is not a directory. Give the folder of a model.")
    _require_vocabulary(Path(folder))
    try:
        return AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=False, local_files_only=True
        )
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # tokenizers raise some that are no Exception
        raise ModelFolderError(
            f"{folder}: its tokenizer cannot be read: {type(error).__name__}: {str(error)[:300]}"
        ) from error


def _require_vocabulary(folder: Path) -> None:
    """Raise ModelFolderError where transformers would make up an empty tokenizer."""
    files = [path for path in sorted(folder.iterdir()) if VOCABULARY.fullmatch(path.name)]
    if not files:
        raise ModelFolderError(
            f"{folder}: has no tokenizer: no tokenizer.json, tokenizer.model or vocabulary. Copy "
            "the tokenizer's files there from where the model came from."
        )
    for path in files:
        if path.is_file() and is_lfs_pointer(path):
            raise ModelFolderError(lfs_pointer_text(path))


def _steps(
    config: Config, documents: Documents, order: Order, tokenizer: Any, resolved: Resolved
) -> Steps:
    pad, micro = tokenizer.pad_token_id, resolved.micro_batch_tokens
    tokens, rows = config.train.batch_tokens, config.train.batch_rows
    return Steps(
        documents,
        order,
        batch_tokens=None if tokens is None else max(tokens, micro),
        batch_rows=rows,
        micro_batch_tokens=micro,
        max_length=config.data.max_length,
        packing=config.data.packing,
        shuffle=config.data.shuffle,
        pad_id=0 if pad is None else int(pad),
        seed=config.data.seed,
    )
