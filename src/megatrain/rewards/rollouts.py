"""Rollouts: answers that a model has drawn, as micro-batches to train on.

Rows of similar length share a micro-batch, so that little is padding. A row is one answer, as the
losses of `losses/policy_gradient.py` count them.

Laws (tests/rewards/test_rollouts.py)
    1. Every token that the model wrote is trained once, with its advantage and its log-probability
       at the position of the token before it; no token of a prompt is, or of what it was told.
    2. No micro-batch has more tokens than asked for, padding included, unless one row has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from megatrain.batch import MicroBatch
from megatrain.errors import BatchError
from megatrain.losses.head import IGNORED


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """A prompt and an answer to it, in tokens."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    """The answer, with its end token if it has one."""
    logprobs: tuple[float, ...]
    """Log-probability of each token, under the model that drew the answer, at its temperature."""
    ended: bool
    """False: the answer was cut off by the limit."""
    written: tuple[bool, ...] = ()
    """Whether the model wrote each token: of several turns it did not write all; empty: it did."""

    @property
    def own(self) -> tuple[bool, ...]:
        """Whether the model wrote each token."""
        return self.written or (True,) * len(self.tokens)

    def __len__(self) -> int:
        return len(self.prompt) + len(self.tokens)

    def to_json(self) -> list[Any]:
        fields = (self.prompt, self.tokens, self.logprobs)
        return [*map(list, fields), self.ended, list(self.written)]

    @classmethod
    def from_json(cls, fields: Sequence[Any]) -> Self:
        """Raises a Python error for what no run wrote."""
        prompt, tokens, logprobs, ended, written = fields
        return cls(
            prompt=tuple(map(int, prompt)),
            tokens=tuple(map(int, tokens)),
            logprobs=tuple(map(float, logprobs)),
            ended=bool(ended),
            written=tuple(map(bool, written)),
        )


def rollout_batch(
    rollouts: Sequence[Rollout],
    advantages: Sequence[float | Sequence[float]],
    *,
    micro_batch_tokens: int = 8192,
    pad_token: int = 0,
) -> list[MicroBatch]:
    """Return a step's micro-batches, for `PolicyGradient`: longest rows first.

    `extra` has each answer's advantage at all of its tokens, or one for each, and `old_logprobs`.
    Raises BatchError.
    """
    if len(rollouts) != len(advantages) or not rollouts:
        raise BatchError(f"{len(rollouts)} rollouts and {len(advantages)} advantages")
    for number, one in enumerate(rollouts):
        if not one.prompt or not one.tokens or len(one.tokens) != len(one.logprobs):
            raise BatchError(
                f"rollout {number} has {len(one.prompt)} tokens of prompt, {len(one.tokens)} of "
                f"answer and {len(one.logprobs)} log-probabilities; prompt and answer must not "
                "be empty, with one log-probability per answer token"
            )
        if len(one.own) != len(one.tokens) or not any(one.own):
            raise BatchError(
                f"rollout {number} has {len(one.tokens)} tokens and {len(one.own)} marks of who "
                "wrote them; at least one must be the model's"
            )
    return [
        _micro_batch([(rollouts[n], advantages[n]) for n in numbers], pad_token)
        for numbers in _together([len(one) for one in rollouts], micro_batch_tokens)
    ]


def by_rollout(
    rollouts: Sequence[Rollout], found: Sequence[Tensor], micro_batch_tokens: int
) -> list[list[float]]:
    """Return a number for each token of each answer, from tensors like `Engine.logprobs` gives.

    They are of the micro-batches of `rollout_batch`, with the same rollouts and tokens.
    """
    values: list[list[float]] = [[] for _ in rollouts]
    groups = _together([len(one) for one in rollouts], micro_batch_tokens)
    for numbers, tensor in zip(groups, found, strict=True):
        for row, number in enumerate(numbers):
            begin, end = len(rollouts[number].prompt), len(rollouts[number])
            values[number] = tensor[row, begin - 1 : end - 1].tolist()
    return values


def _together(lengths: Sequence[int], most_tokens: int) -> Iterator[list[int]]:
    """Yield the numbers of the rows of each micro-batch."""
    numbers: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        if numbers and lengths[numbers[0]] * (len(numbers) + 1) > most_tokens:
            yield numbers
            numbers = []
        numbers.append(number)
    yield numbers


def _micro_batch(
    rows: Sequence[tuple[Rollout, float | Sequence[float]]], pad_token: int
) -> MicroBatch:
    shape = (len(rows), max(len(one) for one, _ in rows))
    ids = torch.full(shape, pad_token)
    labels = torch.full(shape, IGNORED)
    mask = torch.zeros(shape, dtype=torch.long)
    advantages, logprobs = torch.zeros(shape), torch.zeros(shape)
    for row, (one, advantage) in enumerate(rows):
        begin, end = len(one.prompt), len(one)
        ids[row, :end] = torch.tensor([*one.prompt, *one.tokens])
        own = torch.tensor(one.own)
        labels[row, begin:end] = torch.where(own, ids[row, begin:end], IGNORED)
        mask[row, :end] = 1
        advantages[row, begin - 1 : end - 1] = torch.tensor(advantage)
        logprobs[row, begin - 1 : end - 1] = torch.tensor(one.logprobs)
    return MicroBatch(
        input_ids=ids,
        labels=labels,
        attention_mask=None if bool(mask.all()) else mask,
        extra={"advantages": advantages, "old_logprobs": logprobs},
    )
