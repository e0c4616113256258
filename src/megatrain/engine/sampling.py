"""Text from a model at home: one token at a time, of as many texts at once as there is room for.

For each token all weights that do not stay on the device cross the link once, whatever the number
of texts, so as many as possible go together (engine/residence.py chooses how many layers stay, and
how many texts that leaves room for). A pass reads one token of each text, and the prompts of those
that join, in micro-batches of equal length, without padding. Then all are one micro-batch: texts
that have ended leave it, and their room is taken by others that wait.

Models that keep more than keys and values read the full text for each token (models/key_values.py),
and so do texts whose keys and values would not fit. A prompt may have media: towers run for them in
the pass that reads it (models/towers.py). To serve a model, export it.

Ranks share the texts.

Laws (tests/engine/test_sampling.py)
    1. Greedy text is what transformers' `generate` gives greedily, after media too.
    2. A text that has ended is not read again; another takes its room.
    3. What a prompt gets does not depend on the prompts beside it, or on how many can be read at
       once: greedily and drawn, within rounding.
    4. Log-probabilities are those of `Engine.logprobs` at the same temperature, within rounding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megatrain.batch import MicroBatch
from megatrain.devices.device import draw_seed
from megatrain.engine.compute.drawing import GREEDY, SamplingParams
from megatrain.engine.engine import Engine
from megatrain.media import TextMedia
from megatrain.models.key_values import TextCache


@dataclass(slots=True, kw_only=True)
class Continuation:
    """The text of a model behind a prompt."""

    tokens: list[int] = field(default_factory=list)
    """With the end token, if one came."""
    logprobs: list[float] = field(default_factory=list)
    """Log-probability of each token at the temperature it was drawn by, without top-p.

    The likeliest tokens (temperature 0) have those at temperature 1.
    """


@dataclass(slots=True, kw_only=True)
class _Text:
    """A prompt and what follows it so far."""

    number: int
    prompt: Sequence[int]
    most: int
    """Tokens that it has at the end, at most."""
    made: Continuation
    media: TextMedia | None = None
    """Media of the prompt."""
    is_over: bool = False

    def next_tokens(self, *, cached: bool) -> list[int]:
        """Return what is still to be read: all, unless there are keys and values."""
        return self.made.tokens[-1:] if cached else [*self.prompt, *self.made.tokens]


@dataclass(slots=True, kw_only=True)
class _Group:
    """Texts that are one micro-batch."""

    texts: list[_Text]
    cache: TextCache | None

    def batch(self, drawing: SamplingParams) -> MicroBatch:
        cached = self.cache is not None and self.cache.length > 0
        ids = torch.tensor([text.next_tokens(cached=cached) for text in self.texts])
        numbers = [draw_number(drawing, one.number, len(one.made.tokens)) for one in self.texts]
        extra = {"number": torch.tensor(numbers, dtype=torch.float64)}
        micro = MicroBatch(input_ids=ids, labels=ids, loss_tensors=extra)
        media = [None if cached else text.media for text in self.texts]
        return _with_media(micro, media) if any(media) else micro


def _with_media(micro: MicroBatch, media: Sequence[TextMedia | None]) -> MicroBatch:
    """Return a micro-batch whose rows begin with texts that have media, or have none."""
    types = torch.zeros_like(micro.input_ids)
    for row, one in enumerate(media):
        if one is not None:
            types[row, : len(one.token_types)] = torch.tensor(one.token_types)
    items = [() if one is None else one.items for one in media]
    return replace(micro, mm_token_type_ids=types, media=items)


def continue_texts(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    eos_token_ids: frozenset[int],
    drawing: SamplingParams = GREEDY,
    media: Sequence[TextMedia | None] = (),
) -> list[list[int]]:
    """Return the new tokens of each prompt, the end token included.

    `media` has those of each prompt; empty: none has any.
    """
    found = continuations(engine, prompts, max_new_tokens, eos_token_ids, drawing, media=media)
    return [one.tokens for one in found]


def continuations(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    eos_token_ids: frozenset[int],
    drawing: SamplingParams,
    is_over: Callable[[Sequence[int]], bool] = lambda _: False,
    *,
    media: Sequence[TextMedia | None] = (),
) -> list[Continuation]:
    """Return what follows each prompt, with log-probabilities.

    `is_over` gets the new tokens of a text after each, and returns whether they are enough.
    `media` has those of each prompt; empty: none has any. Every rank asks for the same, and gets
    all.
    """
    owner = engine.ranks.owner
    texts = [
        _Text(number=n, prompt=p, most=len(p) + max_new_tokens, made=Continuation(), media=items)
        for n, (p, items) in enumerate(zip(prompts, media or [None] * len(prompts), strict=True))
    ]
    own = texts[owner.rank :: owner.size]

    def take(group: _Group, tokens: Tensor, logprobs: Tensor) -> None:
        chosen = zip(tokens.tolist(), logprobs.tolist(), strict=True)
        for text, (token, logprob) in zip(group.texts, chosen, strict=True):
            made = text.made
            made.tokens.append(token)
            made.logprobs.append(logprob)
            ended = token in eos_token_ids or is_over(made.tokens)
            text.is_over = ended or len(made.tokens) == max_new_tokens

    shares = [texts[rank :: owner.size] for rank in range(owner.size)]
    wanted = max(sum(text.most for text in share) for share in shares)
    with engine.staying(wanted, max((text.most for text in texts), default=0)) as room:
        passes = _reading_on(engine, own, room) if room else _reading_whole(engine, own)
        groups = next(passes, [])
        while engine.ranks.any(bool(groups)):
            batches = [group.batch(drawing) for group in groups]
            found = engine.sample_next(batches, drawing, [group.cache for group in groups])
            for group, (tokens, logprobs) in zip(groups, found, strict=True):
                take(group, tokens, logprobs)
            groups = next(passes, [])
    return _of_all_ranks(engine, own, [text.made for text in texts])


def _reading_whole(engine: Engine, texts: Sequence[_Text]) -> Iterator[list[_Group]]:
    """Yield what a pass reads: all of each text that is not over."""
    while left := [text for text in texts if not text.is_over]:
        yield [_Group(texts=some, cache=None) for some in _of_one_length(left, engine.most_read)]


def _reading_on(engine: Engine, texts: Sequence[_Text], room: int) -> Iterator[list[_Group]]:
    """Yield what a pass reads: a token of each text, and the prompts of those that join."""
    waiting = deque(texts)
    groups: list[_Group] = []
    while True:
        together = _together(groups)
        live = together.texts if together is not None else []
        joining = list(_joining(live, waiting, room))
        groups = [] if together is None else [together]
        for some in _of_one_length(joining, engine.most_read):
            groups.append(_Group(texts=some, cache=engine.new_cache()))
        if not groups:
            return
        yield groups


def _together(groups: Sequence[_Group]) -> _Group | None:
    """Return all texts that are not over as one group; None: there are none."""
    left = [
        (group, [row for row, text in enumerate(group.texts) if not text.is_over])
        for group in groups
    ]
    left = [(group, rows) for group, rows in left if rows]
    if not left:
        return None
    if len(left) == 1 and len(left[0][1]) == len(left[0][0].texts):
        return left[0][0]
    texts = [group.texts[row] for group, rows in left for row in rows]
    caches = [(group.cache, rows) for group, rows in left if group.cache is not None]
    return _Group(texts=texts, cache=TextCache.of(caches))


def _joining(live: Sequence[_Text], waiting: deque[_Text], room: int) -> Iterator[_Text]:
    """Yield the texts that there is room for beside those that are read: each takes the longest."""
    num, longest = len(live), max((text.most for text in live), default=0)
    while waiting:
        longest = max(longest, waiting[0].most)
        num += 1
        if num * longest > room:
            return
        yield waiting.popleft()


def _of_one_length(texts: Iterable[_Text], most_tokens: int) -> Iterator[list[_Text]]:
    """Yield texts whose tokens are equally many, as many as a micro-batch should have."""
    by_length: dict[int, list[_Text]] = {}
    for text in texts:
        by_length.setdefault(len(text.prompt) + len(text.made.tokens), []).append(text)
    for length, same in by_length.items():
        num = max(1, most_tokens // length)
        for first in range(0, len(same), num):
            yield same[first : first + num]


def _of_all_ranks(
    engine: Engine, own: Sequence[_Text], made: list[Continuation]
) -> list[Continuation]:
    """Return the continuations of all ranks, in the order of prompts."""
    said = {"made": [(text.number, text.made.tokens, text.made.logprobs) for text in own]}
    for of_rank in engine.ranks.agree(said):
        for number, tokens, logprobs in of_rank["made"]:
            made[number] = Continuation(tokens=tokens, logprobs=logprobs)
    return made


def draw_number(drawing: SamplingParams, text: int, place: int) -> float:
    """Return the number, from 0 up to 1, by which a text's token in some place is drawn."""
    return (draw_seed(drawing.seed, text, place, 0) >> 11) / 2.0**53
