"""Exact answers: the model writes each answer greedily, and it is compared with its row.

    asked = questions(documents)                      # prompts, with the answers of the rows
    matches = answer_all(engine, asked, eos_token_ids(tokenizer), tokenizer.decode)
    matches.num_exact, matches.num_asked, matches.misses

Every stretch of trained tokens is an answer; the text before it, earlier answers included, is
its prompt. Prompts of like length are answered together, so that a row waits for few others.

Laws (tests/run/evaluation/test_answers.py)
    1. An answer is exact if its text is the row's, thoughts apart, and it ends where the row's
       ends.
    2. Grouping changes no answer of a model whose scores differ clearly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatrain.data.media.placed import DocumentMedia, media_before, media_of
from megatrain.data.steps.micro_batches import ReadItem
from megatrain.data.tokens.documents import Documents, num_rows
from megatrain.engine.engine import Engine
from megatrain.engine.sampling import continue_texts
from megatrain.errors import DataError
from megatrain.media import TextMedia

GROUP_TOKENS = 8192
"""Tokens of texts that are written together."""
END_OF_THOUGHT = "</think>"

Decode = Callable[[list[int]], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt and the answer that a row gives."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    media: DocumentMedia | None = None
    """Of the prompt; None: it is text alone."""

    def read_media(self, read: ReadItem | None) -> TextMedia | None:
        """Return the items of the prompt, which `read` returns by their digests."""
        if self.media is None:
            return None
        assert read is not None, "a prompt has media, which nothing reads"
        items = [read(digest) for digest in self.media.digests]
        return TextMedia(items=items, token_types=self.media.token_types.tolist())


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """An answer that is not the row's."""

    prompt: str
    expected: str
    written: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactMatches:
    """The result over all questions."""

    num_asked: int
    misses: tuple[Miss, ...]

    @property
    def num_exact(self) -> int:
        return self.num_asked - len(self.misses)

    @property
    def exact_share(self) -> float:
        return self.num_exact / self.num_asked

    def in_words(self, most: int = 3) -> str:
        """Return the share of exact answers, and the first few misses."""
        lines = [f"exact answers {self.num_exact:,} of {self.num_asked:,} ({self.exact_share:.1%})"]
        for miss in self.misses[:most]:
            lines.append(f"  {miss.prompt!r}: {miss.written!r}, expected {miss.expected!r}")
        return "\n".join(lines)


def questions(documents: Documents, max_rows: int | None = None) -> list[Question]:
    """Return each answer of the first `max_rows` rows with its prompt. Raises DataError if none."""
    found: list[Question] = []
    rows = num_rows(documents)
    last = rows if max_rows is None else min(max_rows, rows)
    for number in range(int(documents.row_starts[last])):
        ids, trained = documents.tokens(number)
        tokens = [int(token) for token in ids]
        media = media_of(documents, number)
        edges = np.flatnonzero(np.diff(trained, prepend=False, append=False))
        for begin, end in zip(edges[::2], edges[1::2], strict=True):
            if begin > 0:
                question = Question(
                    prompt=tuple(tokens[:begin]),
                    answer=tuple(tokens[begin:end]),
                    media=media_before(media, int(begin)),
                )
                found.append(question)
    if not found:
        raise DataError(
            "no row has a prompt followed by an answer. Exact answers need rows of chats, or of "
            "prompts and completions"
        )
    return found


def answer_all(
    engine: Engine,
    asked: Sequence[Question],
    eos_token_ids: frozenset[int],
    decode: Decode,
    read: ReadItem | None = None,
) -> ExactMatches:
    """Let the model answer, and compare each answer with that of its row.

    `read` returns media of prompts by their digests.
    """
    missed: dict[int, Miss] = {}
    for group in question_groups(asked, GROUP_TOKENS):
        prompts = [asked[number].prompt for number in group]
        media = [asked[number].read_media(read) for number in group]
        most = max(len(asked[number].answer) for number in group)
        for number, made in zip(
            group, continue_texts(engine, prompts, most, eos_token_ids, media=media), strict=True
        ):
            miss = judge(asked[number], made, eos_token_ids, decode)
            if miss is not None:
                missed[number] = miss
    misses = tuple(missed[number] for number in sorted(missed))
    return ExactMatches(num_asked=len(asked), misses=misses)


def judge(
    question: Question, made: Sequence[int], eos_token_ids: frozenset[int], decode: Decode
) -> Miss | None:
    """Return None if `made` is exact. An answer without an end is judged by its own length.

    What the model thinks before it answers is not judged.
    """
    expected = _until_end(question.answer, eos_token_ids)
    ends = expected[-1] in eos_token_ids
    written = _until_end(made if ends else made[: len(expected)], eos_token_ids)
    texts = _without_thought(decode(expected)), _without_thought(decode(written))
    if written == expected or (texts[0] == texts[1] and (written[-1] in eos_token_ids) == ends):
        return None
    return Miss(prompt=decode(list(question.prompt)), expected=texts[0], written=texts[1])


def question_groups(asked: Sequence[Question], most_tokens: int) -> Iterator[list[int]]:
    """Yield the questions' numbers, those of like length together, the longest first."""
    lengths = [len(question.prompt) + len(question.answer) for question in asked]
    group: list[int] = []
    for number in sorted(range(len(asked)), key=lambda number: (-lengths[number], number)):
        if group and (len(group) + 1) * lengths[group[0]] > most_tokens:
            yield group
            group = []
        group.append(number)
    if group:
        yield group


def _without_thought(text: str) -> str:
    return text.rpartition(END_OF_THOUGHT)[2].strip()


def _until_end(tokens: Sequence[int], eos_token_ids: frozenset[int]) -> list[int]:
    """Return the tokens up to the first that ends a text, and that one."""
    for place, token in enumerate(tokens):
        if token in eos_token_ids:
            return list(tokens[: place + 1])
    return list(tokens)
