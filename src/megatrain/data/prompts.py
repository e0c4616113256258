"""Prompts for a model that draws its own answers: rows of files, through the chat template.

A row has its prompt in `prompt`, as text or turns; or in `messages`, without the last answer; or in
`question`, `query`, `problem` or `instruction`; `columns` of a source names another. The whole row
goes to reward functions, so that they find what else it has: the right answer, tests.

Laws (tests/data/test_prompts.py)
    1. Tokens are those of the template with its generation prompt; without a template, of the text.
    2. A row that gives no prompt, or one without room for its answer, is counted with its place.
    3. The same rows give the same digest; any other row, order or prompt gives another.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatrain.config import Config
from megatrain.config.sections import DataSource
from megatrain.data.chat.choice import choose_template
from megatrain.data.chat.notes import Notes
from megatrain.data.chat.template import ChatTemplate, check_kwargs, open_text
from megatrain.data.rows.cells import MEDIA, read_text
from megatrain.data.rows.hub_rows import located
from megatrain.data.rows.in_memory import GivenRows
from megatrain.data.rows.rows import Row, columns_of, row_extras
from megatrain.data.rows.skipped import BadRow, SkippedRows
from megatrain.data.rows.source import raw_rows
from megatrain.data.rows.turns import (
    TALKS,
    Names,
    alpaca_prompt,
    plain_turn,
    read_turns,
    turn_keys,
    turns_in_text,
    with_system,
)
from megatrain.data.steps.order import Indices, MixedOrder
from megatrain.data.tokens.documents import Documents, Lengths, hold_out
from megatrain.data.tokens.encoding import TOO_LONG
from megatrain.data.tokens.limits import check_limits
from megatrain.data.tokens.prepared import PERCENTILES, digest_of
from megatrain.data.training_rows import LEAST_HELD_OUT, Share, num_of_each
from megatrain.errors import DataError

NO_PROMPT = "no prompt"
_TEXTS = ("prompt", "question", "query", "problem")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt in tokens, and the row that it is of."""

    tokens: tuple[int, ...]
    row: Mapping[str, Any]
    """As the file has it."""
    messages: tuple[Mapping[str, Any], ...] | None = None
    """Turns before the chat template; None: there is no template, and the prompt is one text."""
    text: str = ""
    """The prompt without a template."""


class PromptSource:
    """The prompts of a source, as documents of which no token is trained."""

    def __init__(self, prompts: Sequence[Prompt], card: Mapping[str, Any], room: int) -> None:
        self.prompts = tuple(prompts)
        self.card = card
        self._room = room

    @cached_property
    def lengths(self) -> Lengths:
        """Most tokens of each row, with its answer."""
        lengths = [len(one.tokens) + self._room for one in self.prompts]
        return np.array(lengths, dtype=np.int64)

    @property
    def row_starts(self) -> Indices:
        return np.arange(len(self.prompts) + 1, dtype=np.int64)

    def tokens(self, document: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        ids = np.array(self.prompts[document].tokens, dtype=np.int32)
        return ids, np.zeros(len(ids), dtype=np.bool_)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Prompts to train on with their order, and prompts to evaluate on."""

    sources: tuple[PromptSource, ...]
    train: tuple[Prompt, ...]
    order: MixedOrder
    shares: tuple[Share, ...]
    held: tuple[Prompt, ...]
    held_sources: tuple[PromptSource, ...] = ()
    longest: int
    """Most tokens of a row, with its answer."""

    @property
    def prepared(self) -> tuple[PromptSource, ...]:
        """Every file that was read, those of data.eval too."""
        return (*self.sources, *self.held_sources)

    @property
    def digest(self) -> str:
        """Digest of all rows of the sources that are trained on."""
        return digest_of([source.card["digest"] for source in self.sources])

    @property
    def held_digest(self) -> str:
        """Digest of the prompts to evaluate on."""
        return _digest(self.held)

    @property
    def epoch_tokens(self) -> int:
        """Most tokens of an epoch with one answer each."""
        return int(sum(source.lengths.sum() for source in self.sources))

    def card(self) -> dict[str, Any]:
        """Return the sources' cards as one."""
        cards = [dict(source.card) for source in self.sources]
        return cards[0] if len(cards) == 1 else {card["source"]: card for card in cards}


def gather_prompts(config: Config, tokenizer: Any, given: Mapping[str, GivenRows]) -> Prompts:
    """Return the prompts of a config; `given` has rows of a program, by the path of their source.

    Raises DataError, with the file and line.
    """
    data = config.data
    choose_template(tokenizer, data.chat_template)
    check_kwargs(tokenizer, data.template_kwargs)
    read = _Reader(config, tokenizer)
    sources = tuple(read.source(source, given) for source in data.train)
    kept: list[tuple[Prompt, ...]] = [source.prompts for source in sources]
    held: list[tuple[Prompt, ...]] = []
    judged: tuple[PromptSource, ...] = ()
    if isinstance(data.eval, float):
        parts = [
            _held_out(source, data.eval, data.seed + number)
            for number, source in enumerate(sources)
        ]
        kept = [train for train, _ in parts]
        held = [some for _, some in parts]
    elif data.eval is not None:
        judged = tuple(read.source(source, given) for source in data.eval)
        held = [source.prompts for source in judged]
    counts = num_of_each([len(part) for part in held], config.eval.max_rows)
    shares = tuple(
        Share(name=source.card["source"], num_rows=len(part), weight=one.weight)
        for source, part, one in zip(sources, kept, data.train, strict=True)
    )
    sizes, weights = [share.num_rows for share in shares], [share.weight for share in shares]
    return Prompts(
        sources=sources,
        train=tuple(one for part in kept for one in part),
        order=MixedOrder(sizes, weights, data.seed, shuffle=data.shuffle),
        shares=shares,
        held=tuple(one for part, num in zip(held, counts, strict=True) for one in part[:num]),
        held_sources=judged,
        longest=max(int(source.lengths.max()) for source in (*sources, *judged)),
    )


def _held_out(
    source: PromptSource, fraction: float, seed: int
) -> tuple[tuple[Prompt, ...], tuple[Prompt, ...]]:
    """Return the prompts to train on, and those that are held out."""
    if fraction * len(source.prompts) < LEAST_HELD_OUT:
        return source.prompts, ()
    documents: Documents = source
    train, held = hold_out(documents, fraction, seed, source.card["source"])
    return tuple(source.prompts[n] for n in train.rows), tuple(source.prompts[n] for n in held.rows)


class _Reader:
    """Rows to prompts, by one tokenizer and its chat template."""

    def __init__(self, config: Config, tokenizer: Any) -> None:
        data = config.data
        self._data, self._tokenizer = data, tokenizer
        self._room = config.rollouts.max_new_tokens
        has_template = bool(tokenizer.chat_template)
        self._template = ChatTemplate(tokenizer, data.template_kwargs) if has_template else None

    def source(self, source: DataSource, given: Mapping[str, GivenRows]) -> PromptSource:
        """Return the prompts of a source. Raises DataError."""
        place_of = {"name": source.name, "split": source.split, "revision": source.revision}
        where = given.get(source.path) or located(source.path, **place_of)
        name, rows = raw_rows(where, source.rows)
        names = _names(source)
        found: list[Prompt] = []
        bad, dropped, notes = SkippedRows(), SkippedRows(), Notes()
        num_rows, longest, longest_read, largest = 0, ("", 0), 0, ("", 0)
        most = self._data.max_length - self._room
        for place, value in rows:
            num_rows += 1
            try:
                prompt, row = self._prompt(value, names)
            except BadRow as refused:
                bad.add(place, refused)
                continue
            longest_read = max(longest_read, len(prompt.tokens) + self._room)
            if len(prompt.tokens) > most:
                text = f"{len(prompt.tokens)} tokens, and an answer of {self._room}"
                dropped.add(place, BadRow(TOO_LONG, text))
                continue
            found.append(prompt)
            notes.add(row, (), self._template)
            longest = max(longest, (place, len(prompt.tokens) + self._room), key=lambda one: one[1])
            largest = max(largest, (place, max(prompt.tokens)), key=lambda one: one[1])
        lengths = [len(one.tokens) for one in found] or [0]
        points = np.percentile(lengths, PERCENTILES)
        card = {
            "source": name,
            "format": "prompts" + ("" if self._template else ", without a chat template"),
            "rows": num_rows,
            "kept": len(found),
            "documents": len(found),
            "tokens": sum(lengths),
            "trained_tokens": 0,
            "turns_without_end": 0,
            "longest": longest[1],
            "longest_place": longest[0],
            "longest_read": longest_read,
            "largest_id": largest[1],
            "largest_id_place": largest[0],
            "percentiles": {str(p): int(x) for p, x in zip(PERCENTILES, points, strict=True)},
            "truncated": 0,
            "split": 0,
            "bad": bad.counts,
            "bad_places": bad.places,
            "dropped": dropped.counts,
            "dropped_places": dropped.places,
            **notes.card(),
            "digest": _digest(found),
        }
        data = self._data
        check_limits(
            card,
            max_bad=data.max_bad,
            max_dropped=data.max_dropped,
            max_lost_thoughts=data.max_lost_thoughts,
        )
        return PromptSource(found, card, self._room)

    def _prompt(self, value: object, names: Names | None) -> tuple[Prompt, Row]:
        """Return the prompt of a raw row. Raises BadRow."""
        columns = columns_of(value)
        named = columns if names is None else names.read(columns)
        row = row_extras(named, _turns(named))
        if self._template is not None and _is_text(named) and not row.media:
            self._template.check_unformatted(row.messages[-1]["content"])
        if row.media:
            raise BadRow(MEDIA, "answers are drawn from text alone")
        if self._template is None:
            if len(row.messages) > 1:
                raise DataError(
                    f"a row has {len(row.messages)} turns, but there is no chat template. Use the "
                    "tokenizer of the chat model, set data.chat_template, or give `prompt` as text."
                )
            text = row.messages[0]["content"]
            tokens, messages = open_text(self._tokenizer, text), None
        else:
            messages = tuple(row.messages)
            text = self._template.render(row, add_generation_prompt=True)
            tokens = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        if not tokens:
            raise BadRow(NO_PROMPT, "it has no tokens")
        prompt = Prompt(
            tokens=tuple(map(int, tokens)), row=columns, messages=messages, text=str(text)
        )
        return prompt, row


def _names(source: DataSource) -> Names | None:
    """Return the names of a source's columns and roles; None: they are ours."""
    if not source.columns and not source.roles:
        return None
    columns = dict(source.columns.items())
    return Names(
        columns=tuple(
            (tuple(str(theirs).split(".")), ours)
            for ours, theirs in columns.items()
            if ours not in ("role", "content")
        ),
        role=columns.get("role"),
        content=columns.get("content"),
        roles=tuple((name.lower(), ours) for ours, given in source.roles.items() for name in given),
    )


def _text_column(value: Mapping[str, Any]) -> str | None:
    """Return the column with the prompt; None: it is in turns, or in those of alpaca."""
    return next((name for name in _TEXTS if value.get(name)), None)


def _is_text(value: Mapping[str, Any]) -> bool:
    """Return whether a prompt is one text."""
    name = _text_column(value)
    return name is not None and isinstance(value[name], str) and turns_in_text(value[name]) is None


def _turns(value: Mapping[str, Any]) -> list[Any]:
    """Return the turns of a prompt. Raises BadRow."""
    name = _text_column(value)
    if name is not None and _is_text(value):
        return with_system(value, [plain_turn("user", read_text(value[name], name))])
    if name is None and value.get("instruction"):
        return alpaca_prompt(value)
    name = name or next((name for name in TALKS if value.get(name)), None)
    if name is None:
        there = ", ".join(map(str, value)) or "none"
        raise BadRow(NO_PROMPT, f"columns {there:.80}; data.train: {{columns: {{prompt: ...}}}}")
    turns = with_system(value, read_turns(value[name], name, turn_keys(value[name])))
    while name in TALKS and turns and turns[-1].message["role"] == "assistant":
        turns.pop()  # the answer of the row: the model draws its own
    if not turns:
        raise BadRow(NO_PROMPT, f"{name} has answers alone")
    return turns


def _digest(prompts: Sequence[Prompt]) -> str:
    """Return a digest of tokens and rows."""
    digest = xxhash.xxh3_128()
    for one in prompts:
        digest.update(np.array([len(one.tokens), *one.tokens], dtype=np.int32).tobytes())
        digest.update(json.dumps(one.row, sort_keys=True, default=str).encode())
    return digest.hexdigest()
