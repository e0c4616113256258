"""Text from a model at home: streamed forward, one token at a time for all prompts at once.

For each token all weights cross the link to the device once, whatever the number of prompts, so
many prompts go together: those of equal length as rows of one micro-batch, others in separate
micro-batches, without padding. The first pass reads the prompts and keeps their keys and values;
each further pass reads one token. Models that keep more than keys and values read the full text
each time (models/key_values.py), and so do texts whose keys and values would not fit beside what
training has planned for. To serve a model, export it.

Laws (tests/run/evaluation/test_sampling.py)
    1. Greedy text is what transformers' `generate` gives greedily.
    2. A row that has ended stays as it is; all stop when all have ended.
    3. What a prompt gets does not depend on the prompts beside it, drawn text apart.
    4. Log-probabilities are those of `Engine.logprobs`, within rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatrain.batch import MicroBatch
from megatrain.engine.engine import Engine
from megatrain.errors import ConfigError
from megatrain.models.key_values import new_cache
from megatrain.step.settings import PART_ELEMENTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """The choice of a token among the likely ones."""

    temperature: float = 0.0
    """0 takes the likeliest token."""
    top_p: float = 1.0
    """Only the likeliest tokens that together have this share are drawn from."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature is {self.temperature:g}; give 0 or more.")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top-p is {self.top_p:g}; give a number above 0, up to 1.")
        if self.top_p < 1 and self.temperature == 0:
            raise ConfigError(
                "top-p has no effect at temperature 0, the most likely token. Also give a "
                "temperature, like 1."
            )


GREEDY = Drawing()


@dataclass(slots=True, kw_only=True)
class _Group:
    """Prompts of one length, which advance together."""

    numbers: list[int]
    """Numbers of the prompts."""
    texts: list[list[int]]
    cache: Any = None
    num_read: int = 0
    """Tokens of each text that the cache holds."""
    ended: set[int] = field(default_factory=set)

    @property
    def is_over(self) -> bool:
        return len(self.ended) == len(self.numbers)

    def batch(self) -> MicroBatch:
        ids = torch.tensor([text[self.num_read :] for text in self.texts])
        return MicroBatch(input_ids=ids, labels=ids)


@dataclass(slots=True, kw_only=True)
class Continuation:
    """The text of a model behind a prompt."""

    tokens: list[int] = field(default_factory=list)
    """With the end token, if one came."""
    logprobs: list[float] = field(default_factory=list)
    """Log-probability of each token at temperature 1, whatever it was drawn by."""


def continue_texts(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    end_tokens: frozenset[int],
    drawing: Drawing = GREEDY,
) -> list[list[int]]:
    """Return the new tokens of each prompt, the end token included."""
    found = continuations(engine, prompts, max_new_tokens, end_tokens, drawing)
    return [one.tokens for one in found]


def continuations(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    end_tokens: frozenset[int],
    drawing: Drawing,
    is_over: Callable[[Sequence[int]], bool] = lambda _: False,
) -> list[Continuation]:
    """Return what follows each prompt, with log-probabilities.

    `is_over` gets the new tokens of a text after each, and returns whether they are enough.
    """
    new = [Continuation() for _ in prompts]
    generator = torch.Generator().manual_seed(drawing.seed)
    for numbers in _rounds(engine, [len(prompt) + max_new_tokens for prompt in prompts]):
        groups = _groups(engine, numbers, prompts, max_new_tokens)
        for _ in range(max_new_tokens):
            groups = [group for group in groups if not group.is_over]
            if not groups:
                break
            _advance(engine, groups, new, end_tokens, drawing, generator, is_over)
    return new


def _advance(
    engine: Engine,
    groups: list[_Group],
    new: list[Continuation],
    end_tokens: frozenset[int],
    drawing: Drawing,
    generator: torch.Generator,
    is_over: Callable[[Sequence[int]], bool],
) -> None:
    """Add one token to each text that has not ended."""
    caches = [group.cache for group in groups]
    found = engine.predict([group.batch() for group in groups], caches)
    waiting: list[tuple[int, Tensor, _Group, int]] = []
    for group, logits in zip(groups, found, strict=True):
        for place, number in enumerate(group.numbers):
            if place in group.ended:
                group.texts[place].append(group.texts[place][-1])  # its row is still computed
            else:
                waiting.append((number, logits[place], group, place))
    waiting.sort(key=lambda item: item[0])
    chosen = _chosen([row for _, row, _, _ in waiting], drawing, generator)
    for (number, _, group, place), (token, logprob) in zip(waiting, chosen, strict=True):
        group.texts[place].append(token)
        new[number].tokens.append(token)
        new[number].logprobs.append(logprob)
        if token in end_tokens or is_over(new[number].tokens):
            group.ended.add(place)
    for group in groups:
        if group.cache is not None:
            group.num_read = len(group.texts[0]) - 1


def _rounds(engine: Engine, lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield prompts that are continued together: as many as can keep their keys and values."""
    together: list[int] = []
    total = 0
    for number, length in enumerate(lengths):
        if together and total + length > engine.cached_tokens:
            yield together
            together, total = [], 0
        together.append(number)
        total += length
    if together:
        yield together


def _groups(
    engine: Engine, numbers: Sequence[int], prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> list[_Group]:
    by_length: dict[int, list[int]] = {}
    for number in numbers:
        by_length.setdefault(len(prompts[number]), []).append(number)
    total = sum((length + max_new_tokens) * len(same) for length, same in by_length.items())
    caches = total <= engine.cached_tokens
    return [
        _Group(
            numbers=same,
            texts=[list(prompts[number]) for number in same],
            cache=new_cache(engine.model_config) if caches else None,
        )
        for same in by_length.values()
    ]


def _chosen(
    rows: Sequence[Tensor], drawing: Drawing, generator: torch.Generator
) -> Iterator[tuple[int, float]]:
    """Yield for each row of logits a token and its log-probability; some rows at a time."""
    together = max(1, PART_ELEMENTS // len(rows[0]))
    for first in range(0, len(rows), together):
        logits = torch.stack(list(rows[first : first + together]))
        tokens = _choose(logits, drawing, generator)
        logprobs = logits.log_softmax(1).gather(1, tokens[:, None])[:, 0]
        yield from zip(tokens.tolist(), logprobs.tolist(), strict=True)


def chosen_token(logits: Tensor, drawing: Drawing, generator: torch.Generator) -> int:
    """Return the token behind one text, from its logits. (vocabulary)"""
    return int(_choose(logits[None], drawing, generator))


def _choose(logits: Tensor, drawing: Drawing, generator: torch.Generator) -> Tensor:
    """Return a token for each row."""
    if drawing.temperature == 0:
        return logits.argmax(1)
    shares = torch.softmax(logits.double() / drawing.temperature, dim=1)
    if drawing.top_p < 1:
        likeliest, tokens = shares.sort(dim=1, descending=True, stable=True)
        before = likeliest.cumsum(1) - likeliest
        shares = shares.scatter(1, tokens, likeliest.where(before < drawing.top_p, 0.0))
    return torch.multinomial(shares, 1, generator=generator)[:, 0]
