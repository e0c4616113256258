"""The rows that a config names: prepared, held out and mixed, before they are cut into steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatrain.cache import writable_cache_folder
from megatrain.config import Config
from megatrain.config.data_settings import DataSource
from megatrain.data.chat.choice import choose_template
from megatrain.data.rows.hub_rows import located
from megatrain.data.steps.order import MixedOrder
from megatrain.data.tokens.documents import Documents, JoinedDocuments, hold_out, num_rows
from megatrain.data.tokens.prepare import prepare
from megatrain.data.tokens.prepared import PreparedData, digest_of
from megatrain.memory.host import num_cores

_SUMS = ("rows", "kept", "documents", "tokens", "trained_tokens")
_MOST_POSITIONS = 2**26
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
    """Of each source, or each file of data.eval."""

    @property
    def prepared(self) -> tuple[PreparedData, ...]:
        """Every file that was prepared, those of data.eval too."""
        return (*self.sources, *(part for part in self.held if isinstance(part, PreparedData)))

    @property
    def digest(self) -> str:
        """Of all rows of the sources that are trained on."""
        return digest_of([source.card["digest"] for source in self.sources])

    def card(self) -> dict[str, Any]:
        """Return the sources' cards as one: sums, and each of them if there are several."""
        cards = [source.card for source in self.sources]
        if len(cards) == 1:
            return dict(cards[0])
        card: dict[str, Any] = {name: sum(card[name] for card in cards) for name in _SUMS}
        return card | {card["source"]: card for card in cards}

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


def gather(config: Config, tokenizer: Any) -> TrainingRows:
    """Prepare the data of a config. Raises DataError, with the file and line."""
    data = config.data
    choose_template(tokenizer, data.chat_template)
    sources = tuple(_prepared(config, tokenizer, source) for source in data.train)
    kept: Sequence[Documents] = sources
    held: Sequence[Documents] = ()
    if isinstance(data.eval, float):
        split = [
            hold_out(source, data.eval, data.seed + number, source.card["source"])
            for number, source in enumerate(sources)
        ]
        kept, held = [train for train, _ in split], [judged for _, judged in split]
    elif data.eval is not None:
        held = [_prepared(config, tokenizer, source) for source in data.eval]
    shares = tuple(
        Share(name=source.card["source"], num_rows=num_rows(part), weight=given.weight)
        for source, part, given in zip(sources, kept, data.train, strict=True)
    )
    sizes, weights = [share.num_rows for share in shares], [share.weight for share in shares]
    return TrainingRows(
        sources=sources,
        train=one_of(kept),
        order=MixedOrder(sizes, weights, data.seed, shuffle=data.shuffle),
        shares=shares,
        held=tuple(held),
    )


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


def one_of(parts: Sequence[Documents]) -> Documents:
    """Return several parts as one."""
    return parts[0] if len(parts) == 1 else JoinedDocuments(parts)


def _prepared(config: Config, tokenizer: Any, source: DataSource) -> PreparedData:
    return prepare(
        located(source.path, name=source.name, split=source.split, revision=source.revision),
        tokenizer,
        cache_dir=writable_cache_folder(),
        max_length=config.data.max_length,
        train_on=config.data.train_on,
        template_kwargs=config.data.template_kwargs,
        overlong=config.data.overlong,
        max_bad=config.data.max_bad,
        max_dropped=config.data.max_dropped,
        num_workers=num_cores(),
        wanted=source.format,
    )
