"""Log-probabilities of given continuations, by streamed forward.

All weights cross the link once for each call, so many texts go together: in micro-batches of texts
of like length, padded on the right, which no token before sees.

Laws (tests/run/evaluation/test_scoring.py)
    1. A score is that of transformers' logits for the text alone, within rounding.
    2. Scores do not depend on the texts beside them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.batch import MicroBatch
from megatrain.engine.engine import Engine
from megatrain.losses.head import IGNORED
from megatrain.progress import Advance

MICRO_TOKENS = 8192
"""Tokens that the device processes at a time, padding included; a longer text goes alone."""
CALL_TOKENS = 4 * MICRO_TOKENS
"""Tokens that the weights are streamed for: 32,768 of hidden size 4,096 take 256 MiB in bf16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A continuation, and where its context ends."""

    tokens: Sequence[int]
    """Context and continuation."""
    num_scored: int
    """Tokens of the continuation; at least one token is before them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The probability of a continuation."""

    logprob: float
    """Natural logarithm, summed over its tokens in double precision."""
    is_greedy: bool
    """Whether each of its tokens is the likeliest in its place."""


def scores(
    engine: Engine,
    texts: Sequence[Scored],
    most_inputs: int | None = None,
    advance: Advance = lambda _: None,
) -> list[Score]:
    """Return the score of each continuation; `advance` gets the tokens of each call.

    A model with learned positions reads at most `most_inputs` tokens. The last token of a text that
    has one more is then scored by a prediction of its own.
    """
    whole = [_without_last(text, most_inputs) for text in texts]
    found: list[Score | None] = [None] * len(texts)
    for batch in _calls([n for n, text in enumerate(whole) if text.num_scored], whole):
        micros = [_micro_batch([whole[n] for n in numbers]) for numbers in batch]
        likeliest: list[tuple[Tensor, Tensor]] = []
        engine.evaluate(micros, likeliest)
        advance(sum(micro.num_tokens for micro in micros))
        for numbers, (logprobs, tokens) in zip(batch, likeliest, strict=True):
            for row, number in enumerate(numbers):
                found[number] = _score(whole[number], logprobs[row], tokens[row])
    cut = [n for n, text in enumerate(texts) if len(whole[n].tokens) < len(text.tokens)]
    for batch in _calls(cut, whole):
        micros = [_micro_batch([whole[n] for n in numbers]) for numbers in batch]
        for numbers, logits in zip(batch, engine.predict(micros), strict=True):
            for row, number in enumerate(numbers):
                found[number] = _with_last(found[number], logits[row], texts[number].tokens[-1])
    return [score for score in found if score is not None]


def _without_last(text: Scored, most: int | None) -> Scored:
    assert 0 < text.num_scored < len(text.tokens), "a continuation needs a token before it"
    if most is None or len(text.tokens) <= most:
        return text
    return Scored(tokens=text.tokens[:-1], num_scored=text.num_scored - 1)


def _with_last(score: Score | None, logits: Tensor, token: int) -> Score:
    logprob = float(logits.double().log_softmax(0)[token])
    is_greedy = int(logits.argmax()) == token
    if score is None:
        return Score(logprob=logprob, is_greedy=is_greedy)
    return Score(logprob=score.logprob + logprob, is_greedy=score.is_greedy and is_greedy)


def _score(text: Scored, logprobs: Tensor, likeliest: Tensor) -> Score:
    """Return the score of a row, where position t is about token t + 1."""
    places = slice(len(text.tokens) - text.num_scored - 1, len(text.tokens) - 1)
    wanted = torch.tensor(text.tokens[-text.num_scored :])
    return Score(
        logprob=float(logprobs[places].double().sum()),
        is_greedy=bool((likeliest[places] == wanted).all()),
    )


def _micro_batch(texts: Sequence[Scored]) -> MicroBatch:
    longest = max(len(text.tokens) for text in texts)
    ids = torch.zeros((len(texts), longest), dtype=torch.long)
    labels = torch.full_like(ids, IGNORED)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        end = len(text.tokens)
        ids[row, :end] = torch.tensor(text.tokens)
        mask[row, :end] = 1
        scored = slice(end - max(text.num_scored, 1), end)
        labels[row, scored] = ids[row, scored]
    return MicroBatch(input_ids=ids, labels=labels, attention_mask=None if mask.all() else mask)


def _calls(numbers: Sequence[int], texts: Sequence[Scored]) -> Iterator[list[list[int]]]:
    """Yield calls of micro-batches of texts, the longest first."""
    call: list[list[int]] = []
    micro: list[int] = []
    longest = total = 0
    for number in sorted(numbers, key=lambda n: -len(texts[n].tokens)):
        length = len(texts[number].tokens)
        if micro and (len(micro) + 1) * longest > MICRO_TOKENS:
            call.append(micro)
            total += len(micro) * longest
            micro = []
            if total >= CALL_TOKENS:
                yield call
                call, total = [], 0
        longest = length if not micro else longest
        micro.append(number)
    if micro:
        yield [*call, micro]
