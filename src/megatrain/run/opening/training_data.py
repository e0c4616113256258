"""The data of a run: rows to train on, rows to evaluate on, and prompts to answer.

Rows are compared with the model's limits, its vocabulary and its positions, before the weights are
read. A token id beyond the embedding and a position beyond a table of positions would end a run at
the first batch that has one, maybe hours in; on a GPU with an assertion of the device. Rotary
positions have no such end: the model only was never trained there, which days of training would
show too late. A run does not begin so unless model.rope says it.

Laws (tests/run/opening/test_model_limits.py)
    1. Accepted rows can be trained; rows that would fail in the model are refused with their place.
    2. No run begins with rows beyond rotary positions that model.rope could declare.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self, overload

import numpy as np
from torch import nn

from megatrain.batch import MicroBatch
from megatrain.cache import writable_cache_folder
from megatrain.config import Config
from megatrain.data.media.placed import media_before, media_of
from megatrain.data.rows.in_memory import GivenRows
from megatrain.data.steps.answers import PER_ROW, PairedAnswers, joined_answers
from megatrain.data.steps.loader import Loader
from megatrain.data.steps.micro_batches import ReadItem
from megatrain.data.steps.order import Indices, InOrder, Order
from megatrain.data.steps.steps import Position, State, Steps
from megatrain.data.tokens.documents import Documents, Subset, num_rows
from megatrain.data.tokens.prepared import PreparedData
from megatrain.data.training_rows import (
    TrainingRows,
    by_tokens,
    gather,
    num_of_each,
    one_of,
    with_longest_step,
    with_room,
)
from megatrain.errors import ConfigError, DataError
from megatrain.models.decoder import Decoder
from megatrain.models.rope import line_for, num_positions
from megatrain.ranks.ranks import ALONE, Ranks
from megatrain.run.opening import optional
from megatrain.step.settings import StepSettings

if TYPE_CHECKING:
    from megatrain.data.prompts import Prompts, PromptSource
    from megatrain.data.steps.teacher import TeacherScores
    from megatrain.run.evaluation.answers import Question
    from megatrain.run.external_steps import ExternalSteps, OpenExternal


class TrainingData:
    """Steps to train on, batches to evaluate on, prompts. Close it when done."""

    def __init__(
        self,
        config: Config,
        steps: Steps,
        evaluation: Steps | None,
        rows: TrainingRows,
    ) -> None:
        self._train = config.train
        self._packs = config.packs
        self.held_fraction = config.data.eval if isinstance(config.data.eval, float) else None
        """The fraction that data.eval holds out; None: rows of files, or nothing."""
        self._steps = steps
        self._evaluation = evaluation
        self.rows = rows
        self._shown = rows.held[0] if rows.held else rows.train
        self._digest = rows.digest
        self.eval_names = rows.held_names if len(rows.held) > 1 else ()
        """Names of the sources that are evaluated on, if there are several."""
        self._loader = Loader(steps)

    @property
    def card(self) -> dict[str, Any]:
        """The sources' cards as one."""
        return self.rows.card()

    @property
    def num_judged(self) -> int:
        """Rows that an evaluation looks at, eval.max_rows at most."""
        if self._evaluation is None:
            return 0
        return num_rows(self._evaluation.documents)

    @property
    def step_tokens(self) -> int | None:
        """Most tokens of a step; None: rows are counted, or padded."""
        tokens = self._train.batch_tokens
        if not isinstance(tokens, int) or not self._packs:
            return None
        return min(tokens, int(self._steps.documents.lengths.sum()))

    @cached_property
    def steps_in_epoch(self) -> int:
        """Steps of the first epoch; by tokens, others may have a few more or less."""
        return self._steps.count()

    @cached_property
    def num_steps(self) -> int:
        """Steps of the run."""
        return self._train.steps or self.steps_of(self._train.epochs or 1.0)

    def steps_of(self, epochs: float) -> int:
        """Return how many steps so many epochs have; a part of a step counts as one."""
        return math.ceil(self.steps_in_epoch * epochs)

    def next_batch(self) -> list[MicroBatch]:
        return next(self._loader)

    def state(self) -> State:
        """Return where the next batch begins, and of which rows."""
        state = self._loader.state()
        return state | {"order": f"{state['order']}-{self._digest}"}

    @property
    def epoch(self) -> int:
        """Passes over the rows that are complete."""
        return int(self._loader.state()["epoch"])

    @property
    def is_at_start(self) -> bool:
        """Whether the next batch is the first of an epoch."""
        state = self._loader.state()
        return bool(state["window"] == 0 and state["row"] == 0)

    def seek(self, state: State) -> None:
        """Go to a saved state. Raises DataError if it belongs to other data."""
        order, _, digest = str(state["order"]).partition("-")
        if digest != self._digest:
            raise DataError(
                "the rows differ from those of the run: their tokens, their order or the trained "
                "tokens have changed. Resume with the same files, tokenizer, "
                "data settings and version of MegaTrain, or start a new run from the exported "
                "model with another save.dir."
            )
        self._loader.seek(state | {"order": order})

    def eval_batches(self) -> Iterator[list[MicroBatch]]:
        """Yield the evaluation's rows, all of them, in order; nothing if there are none."""
        position = Position()
        while self._evaluation is not None and position.epoch == 0:
            batch, position = self._evaluation.batch(position)
            yield batch

    def take_references(self, rows: TrainingRows) -> None:
        """Train and evaluate with what `rows` know of the reference model, from the first batch.

        They are those that it was made of, with references.
        """
        self.rows, self._steps.answers = rows, rows.answers
        if self._evaluation is not None:
            held = joined_answers(rows.held_answers)
            self._evaluation.answers = held.first(self.num_judged)

    def take_teacher(self, scores: TeacherScores) -> None:
        """Train and evaluate with what a teacher says of all documents, from the first batch."""
        self._steps.teacher = scores
        if self._evaluation is not None:
            self._evaluation.teacher = scores.part(len(self.rows.train.lengths))

    @property
    def items(self) -> ReadItem | None:
        """What returns the media of rows; None: they have none."""
        return self._steps.items

    def take_over(self, before: TrainingData) -> None:
        """Train and evaluate with the scores of the teacher that `before` was given, if any."""
        if before._steps.teacher is not None:
            self.take_teacher(before._steps.teacher)

    def questions(self, count: int) -> list[Question]:
        """Return the first prompts of some rows, with the answers that the rows give."""
        found = []
        # Of preferences the first answer alone: nobody wants the second to be written.
        every = 1 if self.rows.answers is None else PER_ROW
        for number in range(0, len(self._shown.lengths), every)[:count]:
            ids, trained = self._shown.tokens(number)
            first = max(1, int(np.argmax(trained)) if trained.any() else len(ids))
            stop = np.argmin(np.append(trained[first:], False))
            tokens = [int(token) for token in ids[: first + stop]]
            media = media_before(media_of(self._shown, number), first)
            prompt, answer = tuple(tokens[:first]), tuple(tokens[first:])
            found.append(optional.answers.Question(prompt=prompt, answer=answer, media=media))
        return found

    def close(self) -> None:
        self._loader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_rows(
    config: Config,
    tokenizer: Any,
    decoder: Decoder,
    notes: list[str],
    given: Mapping[str, GivenRows] = MappingProxyType({}),
    *,
    resumes: bool,
    ranks: Ranks = ALONE,
) -> TrainingRows | Prompts:
    """Return the rows that the config names, as tokens that the model can read.

    `given` has those that a program gives, by the path that the config has for them.

    A run that `resumes` keeps its rows, whatever the model declares. Of ranks with one cache, one
    prepares the rows for all.
    """
    if config.loss.draws:
        prompts = optional.prompts.gather_prompts(config, tokenizer, given)
        notes += check_rows(prompts.prepared, decoder, begins=not resumes)
        return prompts
    rows = ranks.once_per_folder(writable_cache_folder(), lambda: gather(config, tokenizer, given))
    notes += check_rows(rows.prepared, decoder, begins=not resumes)
    return rows


def planned_config(config: Config, rows: TrainingRows | Prompts) -> Config:
    """Return the config for the planner: steps of rows have the tokens of the longest.

    Answers that are to be drawn are as long as they may be. Raises ConfigError.
    """
    if isinstance(rows, TrainingRows):
        return with_room(with_longest_step(config, rows), rows)
    num_answers = (config.train.batch_rows or 1) * config.rollouts.samples
    given = config.train.micro_batch_tokens
    least = max(config.data.max_length, 0 if given == "auto" else given)
    tokens = max(num_answers * rows.longest, least)
    train = config.train.model_copy(update={"batch_tokens": tokens})
    return config.model_copy(update={"train": train})


@overload
def open_data(
    config: Config,
    tokenizer: Any,
    settings: StepSettings,
    rows: TrainingRows,
    *,
    flat: bool,
    ranks: Ranks = ALONE,
) -> TrainingData: ...


@overload
def open_data(
    config: Config,
    tokenizer: Any,
    settings: StepSettings,
    rows: TrainingRows | Prompts,
    *,
    flat: bool,
    ranks: Ranks = ALONE,
    external: OpenExternal | None = None,
) -> TrainingData | ExternalSteps: ...


def open_data(
    config: Config,
    tokenizer: Any,
    settings: StepSettings,
    rows: TrainingRows | Prompts,
    *,
    flat: bool,
    ranks: Ranks = ALONE,
    external: OpenExternal | None = None,
) -> TrainingData | ExternalSteps:
    """Cut the rows into steps; of prompts an `external` trainer makes them.

    `flat`: the model packs flat (models/isolation.py).
    """
    if not isinstance(rows, TrainingRows):
        if external is None:
            raise ConfigError(
                f"loss.name is {config.loss.name} and nothing rewards the answers. Give a function "
                "of a file: megatrain train RUN.yaml --rewards rewards.py:correct"
            )
        return external(config, tokenizer, settings, rows)
    steps = _steps(config, rows.train, rows.order, tokenizer, settings, flat, rows.answers)
    # An evaluation has no number of steps to match: only its memory counts.
    judged = by_tokens(config, rows)
    evaluation = None
    if rows.held:
        most, parts = config.eval.max_rows, rows.held
        if rows.held_answers or config.loss.teacher is not None:
            # Answers and a teacher's scores are kept by the numbers of the first rows.
            documents = one_of(parts)
            if most is not None and most < num_rows(documents):
                documents = _first(documents, most)
        else:
            parts = _of_each(parts, most)
            documents = one_of(parts)
        size = num_rows(documents)
        answers = joined_answers(rows.held_answers).first(size) if rows.held_answers else None
        evaluation = _steps(
            judged,
            documents,
            InOrder(size),
            tokenizer,
            settings,
            flat,
            answers,
            _numbers_of_sources(parts, documents),
        )
    if rows.media is not None:
        store = rows.media_store(tokenizer)
        for one in (steps, evaluation):
            if one is not None:
                one.items = store.read
    return TrainingData(config, steps, evaluation, rows)


def _numbers_of_sources(held: Sequence[Documents], judged: Documents) -> Indices | None:
    """Return the source of each document that is evaluated on; None if there is one source."""
    if len(held) == 1:
        return None
    sizes = [len(part.lengths) for part in held]
    numbers = np.repeat(np.arange(len(held), dtype=np.int64), sizes)
    return numbers[: len(judged.lengths)]  # eval.max_rows takes the first


def _of_each(held: tuple[Documents, ...], most: int | None) -> tuple[Documents, ...]:
    """Return the first rows of each source, `most` together: as large a part of each."""
    sizes = [num_rows(part) for part in held]
    counts = num_of_each(sizes, most)
    return tuple(
        part if count == size else _first(part, count)
        for part, size, count in zip(held, sizes, counts, strict=True)
    )


def _first(documents: Documents, count: int) -> Subset:
    return Subset(documents, np.arange(count, dtype=np.int64))


def _steps(
    config: Config,
    documents: Documents,
    order: Order,
    tokenizer: Any,
    settings: StepSettings,
    flat: bool,
    answers: PairedAnswers | None,
    sources: Indices | None = None,
) -> Steps:
    pad = tokenizer.pad_token_id
    tokens, rows = config.train.batch_tokens, config.train.batch_rows
    assert tokens != "auto", "the plan has decided"
    return Steps(
        documents,
        order,
        batch_tokens=None if tokens is None else max(tokens, settings.micro_batch_tokens),
        batch_rows=rows,
        micro_batch_tokens=settings.micro_batch_tokens,
        max_length=config.data.max_length,
        packing=config.packs,
        flat=flat,
        shuffle=config.data.shuffle,
        pad_id=0 if pad is None else int(pad),
        seed=config.data.seed,
        answers=answers,
        sources=sources,
    )


_TABLE = re.compile(r"(wpe|pos\w*)$", re.IGNORECASE)


def check_rows(
    sources: Iterable[PreparedData | PromptSource],
    decoder: Decoder,
    *,
    begins: bool = False,
) -> list[str]:
    """Return the remarks about the rows and the model; a run `begins` with them, or only reads.

    Raises DataError if the model has no embedding for a token, or no place for a position.
    """
    notes = []
    for source in sources:
        check_vocabulary(source, decoder.text_config.vocab_size)
        notes += check_positions(source, decoder, begins=begins)
    return notes


def check_vocabulary(source: PreparedData | PromptSource, vocab_size: int) -> None:
    """Raise DataError if a token id is beyond the model's embedding."""
    card = source.card
    if card["largest_id"] >= vocab_size:
        raise DataError(
            f"{card['source']}: {card['largest_id_place']} has token id {card['largest_id']:,}, "
            f"but the model's embedding has {vocab_size:,} rows (vocab_size of config.json). The "
            "tokenizer has tokens that the model does not know: use the tokenizer of this model."
        )


def check_positions(
    source: PreparedData | PromptSource, decoder: Decoder, *, begins: bool
) -> list[str]:
    """Return a warning if rows are longer than what the model was made for.

    Raises DataError if the model has a table of positions, which they exceed, and for a run that
    `begins` if model.rope can make the model reach them.
    """
    most, card = num_positions(decoder.text_config), source.card
    if most is None or card["longest"] <= most:
        return []
    count = int((source.lengths > most).sum())
    text = (
        f"{card['source']}: {count:,} of {len(source.lengths):,} documents are longer than the "
        f"{most:,} positions of the model (max_position_embeddings); the longest has "
        f"{card['longest']:,} tokens ({card['longest_place']})"
    )
    if has_position_table(decoder.model):
        raise DataError(f"{text}. It has no embedding beyond them: set data.max_length to {most}.")
    line = line_for(decoder.config, card["longest"])
    if begins and line is not None:
        raise DataError(
            f"{text}. The model was not trained there. Give `{line}` to scale its positions (with "
            f"type default they stay as they are), or data.max_length: {most}."
        )
    return [f"{text}. The model was not trained there; a max_length of {most} leaves them out"]


def has_position_table(model: nn.Module) -> bool:
    """Return whether positions are looked up in a table, which has an end."""
    tables = (name for name, part in model.named_modules() if isinstance(part, nn.Embedding))
    # Sines that GPT-J and its kin compute once and then look up.
    sines = (name for name, _ in model.named_buffers() if name.endswith("embed_positions"))
    return any(_TABLE.search(name) for name in (*tables, *sines))
