"""The rows of a config whose data is read in chunks: token files, large files of rows, and others.

Laws (tests/data/test_chunked_rows.py)
    1. A fraction that is held out is whole chunks of each source; no token of them is trained on.
    2. With shares, the tokens of an epoch are divided among the sources as they say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatrain.config import Config
from megatrain.config.sections import DataSource
from megatrain.data.chat.choice import choose_template
from megatrain.data.chat.template import check_kwargs
from megatrain.data.chunks.choice import is_during, is_token_path
from megatrain.data.chunks.chunks import (
    ChunkedDocuments,
    ChunkSource,
    HeldDocuments,
    Kept,
    without_held,
)
from megatrain.data.chunks.prepared_chunks import PreparedChunks
from megatrain.data.chunks.row_chunks import RowChunks
from megatrain.data.chunks.token_files import open_token_files
from megatrain.data.rows.hub_rows import located
from megatrain.data.rows.in_memory import GivenRows
from megatrain.data.rows.source import open_source
from megatrain.data.steps.chunk_windows import ChunkOrder
from megatrain.data.tokens.documents import Documents
from megatrain.data.tokens.encoding import Settings
from megatrain.data.tokens.prepare import probe
from megatrain.data.tokens.prepared import PreparedData, digest_of
from megatrain.data.training_rows import (
    LEAST_HELD_OUT,
    Share,
    digest_of_held,
    prepared_source,
    source_names,
    weights_of,
)
from megatrain.errors import ConfigError, DataError
from megatrain.memory.host import num_cores
from megatrain.text import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedRows:
    """Documents to train on with the order of their chunks, and documents to evaluate on."""

    sources: tuple[ChunkSource, ...]
    train: ChunkedDocuments
    order: ChunkOrder
    shares: tuple[Share, ...]
    held: tuple[Documents, ...]
    """The held-out documents of each source that has any, or those of each file of data.eval."""
    held_names: tuple[str, ...] = ()
    """A short name for each of `held`."""
    held_sources: tuple[PreparedData | ChunkSource, ...] = ()
    """The files of data.eval."""
    judged: ChunkedDocuments | None = None
    """Those of them that are in chunks."""

    preferences = None
    answers = None
    held_answers = ()

    @property
    def prepared(self) -> tuple[PreparedData | ChunkSource, ...]:
        """Every source, those of data.eval too."""
        own = (one.prepared if isinstance(one, PreparedChunks) else one for one in self.sources)
        return (*own, *self.held_sources)

    @property
    def digest(self) -> str:
        """Digest of everything that decides the documents that are trained on."""
        return digest_of([source.card["digest"] for source in self.sources])

    @property
    def held_digest(self) -> str:
        """Digest of the evaluation's rows."""
        return digest_of_held(self.held, self.held_sources)

    @property
    def epoch_tokens(self) -> int:
        """Tokens of an epoch; of a source that comes in part, that part of its tokens."""
        parts = zip(self.sources, self.order.counts, strict=True)
        return sum(int(one.num_tokens) * count // one.num_chunks for one, count in parts)

    @property
    def length_in_words(self) -> str:
        """The length of an epoch, before its steps are counted."""
        return f"{self.epoch_tokens:,} tokens in {counted(self.order.size, 'chunk')}"

    @property
    def shown(self) -> Documents:
        """Documents of which the first are shown to the user."""
        return self.held[0] if self.held else self.train.chunk(0)

    def card(self) -> dict[str, Any]:
        """Return the sources' cards as one."""
        cards = [source.card for source in self.sources]
        if len(cards) == 1:
            return dict(cards[0])
        sums = {"tokens": sum(card["tokens"] for card in cards)}
        return {card["source"]: card for card in cards} | sums

    def close(self) -> None:
        """End what reads ahead."""
        for documents in (self.train, self.judged):
            if documents is not None:
                documents.close()


def gather_chunks(config: Config, tokenizer: Any, given: Mapping[str, GivenRows]) -> ChunkedRows:
    """Open the data of a config whose rows are read in chunks.

    `given` has rows of a program, by the path of their source. Raises DataError, with the file and
    the place, or ConfigError.
    """
    _check_config(config)
    data = config.data
    choose_template(tokenizer, data.chat_template)
    sources = [_source(config, tokenizer, source, given) for source in data.train]
    documents = ChunkedDocuments(sources)
    kept: list[Kept] = []
    first = 0
    for number, source in enumerate(sources):
        count = _num_held(config, source)
        kept.append(without_held(first, source.num_chunks, count, data.seed + number))
        first += source.num_chunks
    held: list[Documents] = []
    judged: tuple[PreparedData | ChunkSource, ...] = ()
    apart: ChunkedDocuments | None = None
    names: Sequence[str] = ()
    if isinstance(data.eval, float):
        most = config.eval.max_rows
        held = [
            HeldDocuments(documents, one.first + one.held, most) for one in kept if len(one.held)
        ]
        own_names = source_names(data.train)
        names = [name for name, one in zip(own_names, kept, strict=True) if len(one.held)]
        _check_judged(config, held)
    elif data.eval is not None:
        judged, apart, held = _judged(config, tokenizer, given)
        names = source_names(data.eval)
    tokens = [
        source.num_tokens * one.num_chunks / source.num_chunks
        for one, source in zip(kept, sources, strict=True)
    ]
    weights = weights_of(data.train, tokens)
    shares = tuple(
        Share(name=source.card["source"], num_rows=one.num_chunks, weight=weight, unit="chunk")
        for source, one, weight in zip(sources, kept, weights, strict=True)
    )
    return ChunkedRows(
        sources=tuple(sources),
        train=documents,
        order=ChunkOrder(kept, weights, data.seed, shuffle=data.shuffle),
        shares=shares,
        held=tuple(held),
        held_names=tuple(names),
        held_sources=judged,
        judged=apart,
    )


def _check_config(config: Config) -> None:
    """Raise ConfigError for what needs all rows before the run begins."""
    source = next(
        one.path for one in config.data.train if is_token_path(one.path) or is_during(config, one)
    )
    reason = f"{source} is read in chunks while the run goes on"
    if config.train.batch_rows is not None:
        raise ConfigError(
            f"train.batch_rows is {config.train.batch_rows}, and {reason}: its rows are not "
            "counted before. Set train.batch_tokens instead."
        )
    if config.loss.preferences or config.loss.teacher or config.loss.draws:
        raise ConfigError(
            f"loss.name is {config.loss.name}, which needs all rows before the run begins, and "
            f"{reason}. Token files are for loss.name next_token."
        )


def _source(
    config: Config, tokenizer: Any, source: DataSource, given: Mapping[str, GivenRows]
) -> ChunkSource:
    if is_token_path(source.path):
        return token_source(config, tokenizer, source)
    if source.path not in given and is_during(config, source):
        return _row_source(config, tokenizer, source)
    prepared = prepared_source(config, tokenizer, source, given)
    if prepared.media_items:
        raise ConfigError(
            f"{source.path} has rows with images or sound, and cannot be mixed with data that is "
            "read in chunks. Train on it alone, with data.prepare: first."
        )
    return PreparedChunks(prepared)


def _row_source(config: Config, tokenizer: Any, source: DataSource) -> RowChunks:
    """Return the rows of a source, tokenized when they are reached. Raises DataError."""
    data = config.data
    opened = open_source(
        located(source.path), source.format, columns=source.columns, roles=source.roles
    )
    settings: Settings = {
        "max_length": data.max_length,
        "train_on": data.train_on,
        "template_kwargs": dict(data.template_kwargs),
        "overlong": data.overlong,
        "no_target": "drop",
    }
    if opened.format.is_conversation:
        check_kwargs(tokenizer, settings["template_kwargs"])
    num_workers = num_cores()
    probe(opened, tokenizer, settings["template_kwargs"], num_workers)
    return RowChunks(
        opened.name,
        list(opened.files),
        tokenizer,
        opened.format,
        settings,
        limits={
            "max_bad": data.max_bad,
            "max_dropped": data.max_dropped,
            "max_lost_thoughts": data.max_lost_thoughts,
        },
        num_workers=num_workers,
    )


def token_source(config: Config, tokenizer: Any, source: DataSource) -> ChunkSource:
    """Return the token files of a source. Raises DataError or ConfigError."""
    asked: dict[str, object] = {
        "name": source.name,
        "split": source.split,
        "revision": source.revision,
    }
    asked |= {"rows": source.rows, "columns": source.columns or None, "roles": source.roles or None}
    if wrong := [key for key, value in asked.items() if value is not None]:
        raise ConfigError(
            f"{source.path} has token ids and no rows with columns, so {' and '.join(wrong)} of "
            "this source mean nothing. Remove them."
        )
    end = source.eos if source.eos is not None else tokenizer.eos_token_id
    return open_token_files(
        source.path,
        max_length=config.data.max_length,
        dtype=source.dtype,
        end=None if end is None else int(end),
    )


def _num_held(config: Config, source: ChunkSource) -> int:
    """Return how many chunks of a source are held out. Raises DataError if that is all of them."""
    fraction = config.data.eval
    if not isinstance(fraction, float) or fraction * source.num_chunks < LEAST_HELD_OUT:
        return 0
    count = math.ceil(fraction * source.num_chunks)
    if count >= source.num_chunks:
        raise DataError(
            f"{source.card['source']}: {source.num_chunks} chunks are too few to hold out {count} "
            "of them. Give a file as data.eval."
        )
    return count


def _check_judged(config: Config, held: list[Documents]) -> None:
    """Raise DataError if nothing is held out and a setting needs evaluations."""
    if held or not config.keeps_best:
        return
    key = "save.best" if config.save.best else "eval.patience"
    raise DataError(
        f"data.eval: {config.data.eval:g} of the data is less than one chunk, so nothing is held "
        f"out, and {key} needs an evaluation. Raise data.eval, give a file, or remove {key}."
    )


def _judged(
    config: Config, tokenizer: Any, given: Mapping[str, GivenRows]
) -> tuple[tuple[PreparedData | ChunkSource, ...], ChunkedDocuments | None, list[Documents]]:
    """Return the sources of data.eval, those of them that are in chunks, and all documents."""
    assert isinstance(config.data.eval, tuple)
    found: list[PreparedData | ChunkSource] = [
        token_source(config, tokenizer, one)
        if is_token_path(one.path)
        else prepared_source(config, tokenizer, one, given)
        for one in config.data.eval
    ]
    in_chunks = [one for one in found if not isinstance(one, PreparedData)]
    apart = ChunkedDocuments(in_chunks) if in_chunks else None
    held: list[Documents] = []
    first = 0
    for one in found:
        if isinstance(one, PreparedData):
            held.append(one)
            continue
        assert apart is not None
        chunks = range(first, first + one.num_chunks)
        held.append(HeldDocuments(apart, chunks, config.eval.max_rows))
        first += one.num_chunks
    return tuple(found), apart, held
