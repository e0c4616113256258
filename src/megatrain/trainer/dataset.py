"""The data of a run: what is trained on, what is judged by, and prompts to answer."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatrain.cache import writable_cache_folder
from megatrain.config import Config
from megatrain.config.data_settings import Source
from megatrain.data.documents import Documents, Joined, Subset, hold_out, num_rows
from megatrain.data.hub_rows import located
from megatrain.data.loader import Loader
from megatrain.data.order import InOrder, Mixed, Order
from megatrain.data.prepare import prepare
from megatrain.data.prepared import Prepared, digest_of
from megatrain.data.steps import Position, State, Steps
from megatrain.data.template_choice import choose_template
from megatrain.errors import DataError, ModelFolderError
from megatrain.pipeline.batch import MicroBatch
from megatrain.pipeline.engine import Engine
from megatrain.trainer.resolve import Resolved


class TrainingData:
    """Steps to train on, batches to evaluate on, prompts. Close it when done."""

    def __init__(
        self,
        steps: Steps,
        evaluation: Steps | None,
        shown: Documents,
        card: dict[str, Any],
        digest: str,
    ) -> None:
        """`digest` is that of all rows that are trained on."""
        self._steps, self._evaluation, self._shown = steps, evaluation, shown
        self._digest = digest
        self._loader = Loader(steps)
        self.card = card

    def steps_of(self, epochs: float) -> int:
        """Return how many steps so many epochs have; a part of a step counts as one."""
        return math.ceil(self._steps.count() * epochs)

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

    def prompts(self, count: int) -> list[list[int]]:
        """Return the tokens of some rows up to where their answer begins."""
        found = []
        for number in range(min(count, len(self._shown.lengths))):
            ids, trained = self._shown.tokens(number)
            first = int(np.argmax(trained)) if trained.any() else len(ids)
            found.append([int(token) for token in ids[: max(1, first)]])
        return found

    def close(self) -> None:
        self._loader.close()


def open_data(config: Config, tokenizer: Any, resolved: Resolved) -> TrainingData:
    """Prepare what the config names. Raises DataError, with the file and line."""
    data = config.data
    choose_template(tokenizer, data.chat_template)
    sources = [_prepared(config, tokenizer, source) for source in data.train]
    kept: list[Documents] = [*sources]
    held: list[Documents] = []
    if isinstance(data.eval, float):
        split = [
            hold_out(source, data.eval, data.seed + number, source.card["source"])
            for number, source in enumerate(sources)
        ]
        kept, held = [train for train, _ in split], [judged for _, judged in split]
    elif data.eval is not None:
        held = [_prepared(config, tokenizer, source) for source in data.eval]
    sizes = [num_rows(part) for part in kept]
    weights = [source.weight for source in data.train]
    order = Mixed(sizes, weights, data.seed, shuffle=data.shuffle)
    steps = _steps(config, _one(kept), order, tokenizer, resolved)
    evaluation = _evaluation(config, held, tokenizer, resolved) if held else None
    digest = digest_of([source.card["digest"] for source in sources])
    return TrainingData(steps, evaluation, held[0] if held else kept[0], _card(sources), digest)


def _one(parts: Sequence[Documents]) -> Documents:
    return parts[0] if len(parts) == 1 else Joined(parts)


def _evaluation(
    config: Config, held: Sequence[Documents], tokenizer: Any, resolved: Resolved
) -> Steps:
    judged = _one(held)
    if (most := config.eval.max_rows) is not None:
        judged = Subset(judged, np.arange(min(most, num_rows(judged)), dtype=np.int64))
    return _steps(config, judged, InOrder(num_rows(judged)), tokenizer, resolved)


def load_tokenizer(folder: str | Path) -> Any:
    """Return the tokenizer of a model folder. Raises ModelFolderError, whatever goes wrong."""
    from transformers import AutoTokenizer

    if not Path(folder).is_dir():
        raise ModelFolderError(f"{folder} is not a directory. Give the folder of a model.")
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


def end_tokens(tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end a text."""
    end = tokenizer.eos_token_id
    return frozenset() if end is None else frozenset({int(end)})


def mean_loss(engine: Engine, batches: Iterable[list[MicroBatch]]) -> tuple[float, int] | None:
    """Return the mean loss over the trained tokens of all batches, and their number."""
    total, count = 0.0, 0
    for batch in batches:
        part, num = engine.evaluate(batch)
        total, count = total + part, count + num
    return (total / count, count) if count else None


def _prepared(config: Config, tokenizer: Any, source: Source) -> Prepared:
    return prepare(
        located(source.path, name=source.name, split=source.split, revision=source.revision),
        tokenizer,
        cache_dir=writable_cache_folder(),
        max_length=config.data.max_length,
        train_on=config.data.train_on,
        template_kwargs=config.data.template_kwargs,
        overlong=config.data.overlong,
        num_workers=len(os.sched_getaffinity(0)),
        wanted=source.format,
    )


def _steps(
    config: Config, documents: Documents, order: Order, tokenizer: Any, resolved: Resolved
) -> Steps:
    pad, micro = tokenizer.pad_token_id, resolved.micro_batch_tokens
    tokens, rows = config.train.batch_tokens, config.train.batch_rows
    if isinstance(order, InOrder):  # evaluation has no steps to match: only memory counts
        tokens, rows = config.step_tokens, None
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


def _card(sources: Sequence[Prepared]) -> dict[str, Any]:
    """Return the sources' cards as one: sums, and each of them if there are several."""
    if len(sources) == 1:
        return dict(sources[0].card)
    sums = ("rows", "documents", "tokens", "trained_tokens")
    card: dict[str, Any] = {name: sum(s.card[name] for s in sources) for name in sums}
    return card | {source.card["source"]: source.card for source in sources}
