"""The rows that a config names: prepared, held out and mixed, before they are cut into steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from megatrain.cache import writable_cache_folder
from megatrain.choices import PreferenceFormat
from megatrain.config import Config
from megatrain.config.sections import DataSource
from megatrain.data import optional
from megatrain.data.chat.choice import choose_template
from megatrain.data.rows.hub_rows import Where, located
from megatrain.data.rows.in_memory import GivenRows
from megatrain.data.rows.token_files import as_token_files
from megatrain.data.steps.answers import PairedAnswers, check_room, joined_answers, tokens_together
from megatrain.data.steps.order import MixedOrder
from megatrain.data.tokens.documents import Documents, JoinedDocuments, Subset, hold_out, num_rows
from megatrain.data.tokens.prepare import Enough, prepare
from megatrain.data.tokens.prepared import PreparedData, digest_of
from megatrain.errors import DataError
from megatrain.memory.host import num_cores
from megatrain.model_files import PROCESSOR_NAMES

if TYPE_CHECKING:
    from megatrain.data.media.processing import MediaSettings
    from megatrain.data.media.store import MediaStore

_SUMS = ("rows", "kept", "documents", "tokens", "trained_tokens")
_MOST_POSITIONS = 2**26
LEAST_HELD_OUT = 0.5
"""A fraction of a source that is fewer rows than this holds nothing out."""
_POSITIONS = 2**22
"""Positions of the order that are looked at in one go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The rows of one source in an epoch."""

    name: str
    num_rows: int
    """Held-out rows are not among them."""
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRows:
    """Documents to train on with their order, and documents to evaluate on."""

    sources: tuple[PreparedData, ...]
    train: Documents
    order: MixedOrder
    shares: tuple[Share, ...]
    held: tuple[Documents, ...]
    """The held-out rows of each source that has any, or of each file of data.eval."""
    held_names: tuple[str, ...] = ()
    """A short name for each of `held`."""
    held_sources: tuple[PreparedData, ...] = ()
    """The files of data.eval."""
    answers: PairedAnswers | None = None
    """Facts about the answers of `train`; None: the rows have no preferences."""
    held_answers: tuple[PairedAnswers, ...] = ()
    """The same of each of `held`."""
    media: MediaSettings | None = None
    """How media of rows are read; None: no row has any."""

    @property
    def prepared(self) -> tuple[PreparedData, ...]:
        """Every file that was prepared, those of data.eval too."""
        return (*self.sources, *self.held_sources)

    @property
    def media_digests(self) -> tuple[str, ...]:
        """Every item of media that a row has, once, in the order of the rows."""
        items = (item.digest for source in self.prepared for item in source.media_items)
        return tuple(dict.fromkeys(items))

    def media_store(self, tokenizer: Any) -> MediaStore:
        """Return what reads the media of the rows."""
        assert self.media is not None
        return optional.store.MediaStore(self.prepared, self.media, tokenizer)

    @property
    def preferences(self) -> PreferenceFormat | None:
        """Which preferences the rows have; None: they have none."""
        return self.sources[0].preferences

    @property
    def digest(self) -> str:
        """Digest of all rows of the sources that are trained on."""
        return digest_of([source.card["digest"] for source in self.sources])

    @property
    def held_digest(self) -> str:
        """Digest of the evaluation's rows: of the files of data.eval, or of which are held out."""
        lengths = [xxhash.xxh3_128_hexdigest(part.lengths.tobytes()) for part in self.held]
        return digest_of([*(one.card["digest"] for one in self.held_sources), *lengths])

    def card(self) -> dict[str, Any]:
        """Return the sources' cards as one: sums, and each of them if there are several."""
        cards = [source.card for source in self.sources]
        if len(cards) == 1:
            return dict(cards[0])
        card: dict[str, Any] = {name: sum(card[name] for card in cards) for name in _SUMS}
        return {card["source"]: card for card in cards} | card  # a source may be called rows

    @property
    def epoch_tokens(self) -> int:
        """Tokens of an epoch; of a source that comes in part, that part of its tokens."""
        rows = np.cumsum([0, *(share.num_rows for share in self.shares)])
        firsts = self.train.row_starts[rows[:-1]]
        sums = np.add.reduceat(self.train.lengths, firsts, dtype=np.int64)
        parts = zip(sums, self.order.counts, self.shares, strict=True)
        return sum(int(tokens) * count // share.num_rows for tokens, count, share in parts)

    def largest_step(self, batch_rows: int, num_epochs: int) -> int:
        """Return the tokens of the largest step of `batch_rows` rows in that many epochs.

        For very many rows it is estimated as that many of the longest row.
        """
        starts = self.train.row_starts
        tokens = np.add.reduceat(self.train.lengths, starts[:-1])
        if self.order.size * num_epochs > _MOST_POSITIONS:
            return batch_rows * int(tokens.max())
        stride = max(1, _POSITIONS // batch_rows) * batch_rows
        largest = 0
        for epoch in range(num_epochs):
            for first in range(0, self.order.size, stride):
                found = tokens[self.order.rows(epoch, first, first + stride)]
                steps = np.add.reduceat(found, np.arange(0, len(found), batch_rows))
                largest = max(largest, int(steps.max()))
        return largest


def gather(
    config: Config, tokenizer: Any, given: Mapping[str, GivenRows] = MappingProxyType({})
) -> TrainingRows:
    """Prepare the data of a config; `given` has rows of a program, by the path of their source.

    Raises DataError, with the file and line.
    """
    data = config.data
    choose_template(tokenizer, data.chat_template)
    sources = tuple(prepared_source(config, tokenizer, source, given) for source in data.train)
    judged: tuple[PreparedData, ...] = ()
    kept = [_whole(config, source) for source in sources]
    held: list[_Part] = []
    names: Sequence[str] = ()
    if isinstance(data.eval, float):
        split = [
            _held_out(part, data.eval, data.seed + number, source.card["source"])
            for number, (part, source) in enumerate(zip(kept, sources, strict=True))
        ]
        kept = [train for train, _ in split]
        held = [part for _, part in split if part is not None]
        own_names = source_names(data.train)
        names = [name for name, (_, part) in zip(own_names, split, strict=True) if part is not None]
        _check_judged(config, kept, held)
    elif data.eval is not None:
        judged = tuple(prepared_source(config, tokenizer, source, given) for source in data.eval)
        held = [_whole(config, source) for source in judged]
        names = source_names(data.eval)
    _check_alike((*sources, *judged))
    tokens = [int(part.documents.lengths.sum()) for part in kept]
    weights = weights_of(data.train, tokens)
    shares = tuple(
        Share(name=source.card["source"], num_rows=num_rows(part.documents), weight=weight)
        for source, part, weight in zip(sources, kept, weights, strict=True)
    )
    sizes = [share.num_rows for share in shares]
    answers = [part.answers for part in kept if part.answers is not None]
    has_media = any(source.media_items for source in (*sources, *judged))
    return TrainingRows(
        sources=sources,
        train=one_of([part.documents for part in kept]),
        order=MixedOrder(sizes, weights, data.seed, shuffle=data.shuffle),
        shares=shares,
        held=tuple(part.documents for part in held),
        held_names=tuple(names),
        held_sources=judged,
        answers=joined_answers(answers) if answers else None,
        held_answers=tuple(part.answers for part in held if part.answers is not None),
        media=row_media(config, tokenizer) if has_media else None,
    )


def row_media(config: Config, tokenizer: Any, where: str | None = None) -> MediaSettings | None:
    """Return how media of a config's rows are read; None: the model takes none.

    `where`: the folder that a source names for them.
    """
    data, folder = config.data, Path(str(tokenizer.name_or_path))
    if not any((folder / name).is_file() for name in PROCESSOR_NAMES):
        return None
    return optional.processing.media_settings(
        tokenizer, where=where, arguments=data.processor_kwargs
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A source, or some of its rows."""

    documents: Documents
    answers: PairedAnswers | None


def _whole(config: Config, source: PreparedData) -> _Part:
    """Return all rows of a source."""
    if source.preferences == "kto":
        length, rows = config.data.max_length, config.train.batch_rows
        documents = optional.mismatched.MismatchedDocuments(source, length, group_rows=rows)
        return _Part(documents=documents, answers=PairedAnswers(desirable=source.desirable))
    answers = None if source.preferences is None else PairedAnswers()
    return _Part(documents=source, answers=answers)


def _held_out(part: _Part, fraction: float, seed: int, where: str) -> tuple[_Part, _Part | None]:
    """Return the rows to train on, and those that are held out.

    None: the fraction is less than half a row, and every row is trained. To hold one out would cost
    a small set a large part of what it teaches.
    """
    if fraction * num_rows(part.documents) < LEAST_HELD_OUT:
        return part, None
    train, held = hold_out(part.documents, fraction, seed, where)
    return _some(part, train), _some(part, held)


def _check_judged(config: Config, kept: Sequence[_Part], held: Sequence[_Part]) -> None:
    """Raise DataError if nothing is held out and a setting needs evaluations."""
    if held or not config.keeps_best:
        return
    key = "save.best" if config.save.best else "eval.patience"
    count = sum(num_rows(part.documents) for part in kept)
    raise DataError(
        f"data.eval: {config.data.eval:g} of {count:,} rows is less than one row, so none is held "
        f"out, and {key} needs an evaluation. Raise data.eval, give a file, or remove {key}."
    )


def _some(part: _Part, chosen: Subset) -> _Part:
    answers = part.answers
    if answers is not None and answers.desirable is not None:
        answers = replace(answers, desirable=answers.desirable[chosen.rows])
    return _Part(documents=chosen, answers=answers)


def _check_alike(sources: Sequence[PreparedData]) -> None:
    """Raise DataError if some sources have preferences and others have not, or have others."""
    first = sources[0]
    for source in sources:
        if source.preferences != first.preferences:
            raise DataError(
                f"{first.card['source']} is {first.card['format']}, and "
                f"{source.card['source']} is {source.card['format']}: the rows of a run are all "
                "trained with one loss. Name the format of each source (data.train: "
                "{path, format}), or train on them one after the other."
            )


def weights_of(sources: Sequence[DataSource], tokens: Sequence[float]) -> list[float]:
    """Return how many times the rows of each source come in an epoch; `tokens` are theirs.

    With shares an epoch has as many tokens as all sources together, divided as they say.
    """
    shares = [one.share for one in sources if one.share is not None]
    if not shares:
        return [one.weight for one in sources]
    total = sum(tokens) / sum(shares)
    return [share * total / count for share, count in zip(shares, tokens, strict=True)]


def num_of_each(sizes: Sequence[int], most: int | None) -> list[int]:
    """Return how many rows of each source are evaluated on: as large a part of each.

    They are `most` together, or one of each source that has any, if there are more sources.
    """
    if most is None or sum(sizes) <= most:
        return list(sizes)
    counts = [min(size, max(1, most * size // sum(sizes))) for size in sizes]
    while sum(counts) > most and max(counts) > 1:
        counts[counts.index(max(counts))] -= 1
    return counts


def source_names(sources: Sequence[DataSource]) -> tuple[str, ...]:
    """Return a short name for each source: that of its file or dataset, or more if two share it."""
    full = ["/".join(filter(None, (one.path, one.name, one.split))) for one in sources]
    short = [Path(one.path).stem or one.path for one in sources]
    names = full if len(set(short)) < len(short) else short
    if len(set(names)) < len(names):  # the same rows twice
        names = [f"{name} {number}" for number, name in enumerate(names, 1)]
    return tuple(names)


def by_tokens(config: Config, rows: TrainingRows) -> Config:
    """Return the config with steps counted in tokens: those by rows are as long as the longest."""
    longest = with_longest_step(config, rows).train
    return config.model_copy(update={"train": longest.model_copy(update={"batch_rows": None})})


def with_longest_step(config: Config, rows: TrainingRows) -> Config:
    """Return the config for the planner: a step by rows has the tokens of the longest."""
    train, batch_rows = config.train, config.train.batch_rows
    if batch_rows is None:
        return config
    epochs = train.epochs or (train.steps or 1) * batch_rows / rows.order.size
    micro = 0 if train.micro_batch_tokens == "auto" else train.micro_batch_tokens
    largest = rows.largest_step(batch_rows, math.ceil(epochs))
    tokens = max(largest, config.data.max_length, micro)
    return config.model_copy(update={"train": train.model_copy(update={"batch_tokens": tokens})})


def with_room(config: Config, rows: TrainingRows) -> Config:
    """Return the config for the planner: a micro-batch has room for both answers of each row.

    Raises ConfigError if the config gives it less.
    """
    if rows.preferences is None:
        return config
    length, packing, train = config.data.max_length, config.packs, config.train
    needed = max(tokens_together(part, one_row=packing) for part in (rows.train, *rows.held))
    for key in ("micro_batch_tokens", "batch_tokens"):
        if isinstance(given := getattr(train, key), int) and train.batch_rows is None:
            check_room(given, needed, f"train.{key}")
    if train.batch_rows is not None and isinstance(train.batch_tokens, int):
        longest = max(train.batch_tokens, needed)
        train = train.model_copy(update={"batch_tokens": longest})
    data = config.data.model_copy(update={"max_length": max(length, needed)})
    return config.model_copy(update={"data": data, "train": train})


def one_of(parts: Sequence[Documents]) -> Documents:
    """Return several parts as one."""
    return parts[0] if len(parts) == 1 else JoinedDocuments(parts)


def prepared_source(
    config: Config, tokenizer: Any, source: DataSource, given: Mapping[str, GivenRows]
) -> PreparedData:
    """Prepare one source of a config. Raises DataError."""
    # Rows may have columns for several formats; a loss reads one.
    wanted = (config.loss.preferences or "auto") if source.format == "auto" else source.format
    rows = given.get(source.path)
    where: Where = rows or located(
        source.path, name=source.name, split=source.split, revision=source.revision
    )
    return prepare(
        as_token_files(
            where, tokenizer, config.data.max_length, dtype=source.dtype, eos=source.eos
        ),
        tokenizer,
        cache_dir=writable_cache_folder(),
        max_length=config.data.max_length,
        train_on=config.data.train_on,
        template_kwargs=config.data.template_kwargs,
        overlong=config.data.overlong,
        max_bad=config.data.max_bad,
        max_dropped=config.data.max_dropped,
        max_lost_thoughts=config.data.max_lost_thoughts,
        num_workers=num_cores(),
        wanted=wanted,
        columns=source.columns,
        roles=source.roles,
        max_rows=source.rows,
        media=row_media(config, tokenizer, source.media),
        enough=None if rows is None else _enough(config, is_judged=source not in config.data.train),
    )


def _enough(config: Config, *, is_judged: bool) -> Enough | None:
    """Return how much of a stream a run needs; None: all of it, because it counts epochs.

    A step has at most the tokens of a batch, so the rows of so many tokens fill all steps.
    """
    train, held = config.train, config.data.eval
    if is_judged:
        return Enough(rows=config.eval.max_rows)
    if train.steps is None:
        return None
    share = 1.0 - (held if isinstance(held, float) else 0.0)
    if isinstance(train.batch_tokens, int):
        return Enough(tokens=math.ceil(train.steps * train.batch_tokens / share))
    return Enough(rows=math.ceil(train.steps * (train.batch_rows or 1) / share))
