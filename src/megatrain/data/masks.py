"""Rendered text as tokens, and which tokens are trained.

A token is trained if it holds a trained character. White space that a template writes after an
end-of-turn token belongs to no turn: the model is never asked to generate it, so it is not trained.

Laws (tests/data/test_chat.py)
    1. Tags and prefixes agree to the token, or a DataError shows the first token they differ in.
    2. The end-of-turn token of each trained turn is trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from megatrain.data.chat import (
    Rendered,
    Span,
    TrainOn,
    has_generation_tags,
    render_all,
    render_assistant,
)
from megatrain.data.rows import Row
from megatrain.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """A document, ready to train on."""

    input_ids: list[int]
    trained: list[bool]
    num_open: int = 0
    """Trained turns that no control token ends: a model of them may never stop."""

    @property
    def num_trained(self) -> int:
        """Targets: the first token has nothing before it that could predict it."""
        return sum(self.trained[1:])


class Encoder:
    """Rows to tokens, by one tokenizer and its chat template."""

    def __init__(self, tokenizer: Any, train_on: TrainOn = "assistant") -> None:
        """Raise DataError for a tokenizer that cannot say which characters a token stands for."""
        if not tokenizer.is_fast:
            raise DataError(
                f"{type(tokenizer).__name__} keeps no offsets, so no mask can be derived; "
                "load the fast tokenizer of this model"
            )
        self.tokenizer = tokenizer
        self.train_on = train_on
        self.template: str | None = tokenizer.chat_template and tokenizer.get_chat_template()
        self._marks = set(tokenizer.added_tokens_decoder) | set(tokenizer.all_special_ids)
        self._has_tags = self.template is not None and has_generation_tags(self.template)

    def encode(self, row: Row, place: str = "the row") -> list[Tokens]:
        """Return the row's documents: one, or several where turns need contexts of their own.

        Raises BadRow for a row that the template refuses, DataError where tags and prefixes differ
        or a conversation meets a tokenizer without template.
        """
        if row.text:
            return [self._text(row.text)]
        if self.template is None:
            return [self._plain(row, place)]
        if self.train_on == "all":
            return [self._masked(render_all(self.tokenizer, row.messages))[0]]
        documents = []
        for rendered in render_assistant(self.tokenizer, row.messages):
            document, ranges = self._masked(rendered)
            if self._has_tags:
                self._check_tags(rendered, document, ranges, place)
            documents.append(document)
        return documents

    def _text(self, text: str) -> Tokens:
        """Tokens as the tokenizer begins them, and an end of sequence; all are trained."""
        ids = list(self.tokenizer(text, verbose=False)["input_ids"])
        end = self.tokenizer.eos_token_id
        if end is not None and ids[-1:] != [end]:
            ids.append(end)
        return Tokens(input_ids=ids, trained=[True] * len(ids), num_open=int(end is None))

    def _plain(self, row: Row, place: str) -> Tokens:
        """A prompt and its answer put together as they are, for tokenizers without template."""
        if not row.plain:
            raise DataError(
                f"{place}: a conversation, but the tokenizer has no chat template. Use the "
                "tokenizer of the chat model, set a template, or give prompt / completion or text."
            )
        prompt, answer = (message["content"] for message in row.messages)
        document, _ = self._masked(
            Rendered(
                text=prompt + answer,
                messages=row.messages,
                spans=((0 if self.train_on == "all" else len(prompt), len(prompt + answer)),),
                begins_at=0,
            )
        )
        first, last = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        # Only some tokenizers that know a first token also use it.
        before = [first] if self.tokenizer("")["input_ids"][:1] == [first] else []
        after = [] if last is None else [last]
        return Tokens(
            input_ids=[*before, *document.input_ids, *after],
            trained=[
                *[self.train_on == "all" for _ in before],
                *document.trained,
                *[True for _ in after],
            ],
            num_open=int(not after),
        )

    def _masked(self, rendered: Rendered) -> tuple[Tokens, list[Span]]:
        """Return a text's tokens, and the characters each of them stands for."""
        encoded = self.tokenizer(
            rendered.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        ids, ranges = list(encoded["input_ids"]), list(_ranges(encoded["offset_mapping"]))
        trained = [self.train_on == "all"] * len(ids)
        num_open = 0
        for span in rendered.spans:
            inside = [n for n, (a, b) in enumerate(ranges) if a < span[1] and b > span[0]]
            turn = self._without_tail(inside, rendered.text, ids, ranges)
            for number in turn:
                trained[number] = True
            num_open += not turn or ids[turn[-1]] not in self._marks
        return Tokens(input_ids=ids, trained=trained, num_open=num_open), ranges

    def _without_tail(
        self, inside: list[int], text: str, ids: Sequence[int], ranges: Sequence[Span]
    ) -> list[int]:
        """Leave out white space after the last control token of a turn."""
        for count in range(len(inside), 0, -1):
            number = inside[count - 1]
            if ids[number] in self._marks:
                return inside[:count]
            if text[slice(*ranges[number])].strip():
                return inside
        return inside

    def _check_tags(
        self, rendered: Rendered, document: Tokens, ranges: Sequence[Span], place: str
    ) -> None:
        """Raise DataError if the template's own tags name other tokens than the prefixes do."""
        encoded = self.tokenizer.apply_chat_template(
            list(rendered.messages),
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        ids = list(encoded["input_ids"])
        by_tags = [False] * len(document.input_ids)
        if ids == document.input_ids:
            mask = [
                bool(one) and range_[1] > rendered.begins_at
                for one, range_ in zip(encoded["assistant_masks"], ranges, strict=True)
            ]
            for turn in _runs(mask):
                for number in self._without_tail(turn, rendered.text, ids, ranges):
                    by_tags[number] = True
        if by_tags != document.trained:
            raise DataError(_disagreement(place, by_tags, document, self.tokenizer))


def _ranges(offsets: Iterable[tuple[int, int]]) -> Iterator[Span]:
    """Yield each token's characters. Tokenizers may trim a lone space to nothing: give it back."""
    before = 0
    for start, end in offsets:
        yield (start if end > start else min(before, start), end)
        before = end


def _runs(mask: Sequence[bool]) -> Iterator[list[int]]:
    for value, run in groupby(range(len(mask)), key=lambda number: mask[number]):
        if value:
            yield list(run)


def _disagreement(place: str, by_tags: list[bool], document: Tokens, tokenizer: Any) -> str:
    at = next(i for i, (a, b) in enumerate(zip(by_tags, document.trained, strict=True)) if a != b)
    token = tokenizer.convert_ids_to_tokens(document.input_ids[at])
    who, other = ("tags", "prefixes") if by_tags[at] else ("prefixes", "tags")
    return (
        f"{place}: the chat template contradicts itself: its generation {who} train token {at} "
        f"({token!r}), its {other} do not. {sum(by_tags)} tokens by tags, "
        f"{sum(document.trained)} by prefixes. Put the answer and its end-of-turn token, and "
        "nothing else, between {% generation %} and {% endgeneration %}."
    )
