"""From the rows before the output projection to log-probabilities, a loss and its gradients.

Only rows that have a target are projected, a chunk at a time: project, take the log-probability of
each target, write the gradient of the logits over them, go back through the projection, and
free the chunk (projection.py). Memory does not grow with the batch.

What goes back is one weight per token: the gradient of the loss with respect to the token's
log-probability (loss.py). The gradient of the logits is

    weight x (one-hot of the target - softmax)

computed by the operations that autograd would have called, without autograd. Other leaves of the
same logits have gradients of their own (leaves.py).

Laws (tests/losses/test_head.py)
    1. One chunk gives the bits of ordinary autograd through all logits of the rows that have a
       target; and through those of all rows within rounding, because sums over rows are shorter.
    2. Any chunking gives them within rounding; a row without a target is not projected.
    3. Peak memory is that of one chunk's logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megatrain.losses.leaves import Notes, TokenOutputs, entropy_of, turn_logprobs
from megatrain.losses.projection import AddTokens, Projection
from megatrain.step.settings import CHUNK_TOKENS

IGNORED = -100
"""The label of a token that is not trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadGradients:
    """The result of going back through the output projection with one micro-batch."""

    logprobs: Tensor
    """Log-probabilities of the targets in fp32, zero where there is none. (tokens,)"""
    rows: Tensor
    """Gradient of the rows, zero where there is no target. (tokens, width)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedRows:
    """The rows of a micro-batch that have a target."""

    chunks: Sequence[Tensor]
    """The numbers of those that are projected at a time, ascending. (at most a chunk,)"""
    targets: Tensor
    """Targets of all rows. (tokens,)"""


def next_token_targets(labels: Tensor) -> Tensor:
    """Return for each position the label of the next one; the last has none. (tokens,)"""
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    return targets.reshape(-1)


def trained_index(targets: Tensor) -> Tensor:
    """Return the numbers of the rows that have a target, ascending. On the host."""
    return (targets != IGNORED).nonzero().view(-1)


def trained_rows(
    targets: Tensor, chunk: int = CHUNK_TOKENS, index: Tensor | None = None
) -> TrainedRows:
    """Return the rows that have a target; `index` is `trained_index`, where `targets` are."""
    index = trained_index(targets) if index is None else index
    chunks = torch.split(index, chunk) if len(index) else ()
    return TrainedRows(chunks=chunks, targets=targets)


def head_logprobs(
    rows: Tensor,
    trained: TrainedRows,
    projection: Projection,
    likeliest: Tensor | None = None,
    notes: Notes | None = None,
) -> Tensor:
    """Return the log-probabilities of the targets, zero where there is none. (tokens,)

    Chunk by chunk, without gradients. `likeliest` gets the tokens of the highest scores (tokens,),
    `notes` what else is wanted of the logits, with the result in its `logprobs`.
    """
    result = torch.zeros(len(rows), dtype=torch.float32, device=rows.device)
    result = result if notes is None else notes.logprobs
    for chunk in trained.chunks:
        see = _Look(trained.targets.index_select(0, chunk), notes_likeliest=likeliest is not None)
        if notes is not None:
            see.notes = notes, chunk
        projection.read(projection.logits(rows.index_select(0, chunk)), see)
        result.index_copy_(0, chunk, see.logprobs)
        if likeliest is not None and see.likeliest is not None:
            likeliest.index_copy_(0, chunk, see.likeliest)
    return result


def head_gradients(
    rows: Tensor,
    trained: TrainedRows,
    token_weights: Tensor,
    projection: Projection,
    add_gradients: AddTokens,
    others: TokenOutputs | None = None,
) -> HeadGradients:
    """Return what the loss with these `token_weights` (tokens,) has for gradient of `rows`.

    `add_gradients` gets the gradients of weight and bias, chunk by chunk. `others` has the
    gradients of further leaves of the logits, beside the same weights. (tokens, ...)
    """
    logprobs = torch.zeros(len(rows), dtype=torch.float32, device=rows.device)
    d_rows = torch.zeros_like(rows)

    def go_through(chunk: Tensor) -> None:
        inputs, targets = rows.index_select(0, chunk), trained.targets.index_select(0, chunk)
        turn: _Look
        if others is None:
            turn = _Turn(targets, token_weights.index_select(0, chunk), projection)
        else:
            turn = _TurnLeaves(targets, others.mapped(lambda one: one.index_select(0, chunk)))
        logits = projection.logits(inputs)
        projection.differentiate(logits, turn)
        logprobs.index_copy_(0, chunk, turn.logprobs)
        del turn
        d_rows.index_copy_(0, chunk, projection.back(logits, inputs, add_gradients))

    for chunk in trained.chunks:
        go_through(chunk)  # which frees all it made, before there are the next logits
    return HeadGradients(logprobs=logprobs, rows=d_rows)


class _Look:
    """Notes the log-probabilities of a chunk's targets; scores become log-probabilities."""

    def __init__(self, targets: Tensor, *, notes_likeliest: bool = False) -> None:
        self._targets = targets[:, None]
        self.logprobs = torch.empty_like(targets, dtype=torch.float32)
        self.likeliest = torch.empty_like(targets) if notes_likeliest else None
        self.notes: tuple[Notes, Tensor] | None = None
        """Where further leaves are noted, and the rows that the chunk has there."""

    def __call__(self, part: slice, values: Tensor) -> None:
        if self.likeliest is not None:
            self.likeliest[part] = values.argmax(1)
        if self.notes is not None:
            notes, chunk = self.notes
            notes.see_scores(chunk[part], values)
        torch.ops.aten._log_softmax.out(values, -1, False, out=values)
        self.logprobs[part] = values.gather(1, self._targets[part])[:, 0]
        if self.notes is not None:
            notes.see_logprobs(chunk[part], values)


class _Turn(_Look):
    """Turns scores into their gradient, and notes the log-probabilities."""

    def __init__(self, targets: Tensor, token_weights: Tensor, projection: Projection) -> None:
        super().__init__(targets)
        self._weights = token_weights[:, None]
        shape = (projection.part_rows(len(targets)), len(projection.weight))
        self._d_logprobs = torch.zeros(shape, dtype=torch.float32, device=targets.device)
        """All zero between parts."""

    def __call__(self, part: slice, values: Tensor) -> None:
        super().__call__(part, values)
        targets, d_logprobs = self._targets[part], self._d_logprobs[: len(values)]
        d_logprobs.scatter_(1, targets, self._weights[part])
        # Not exp: on the CPU it has other bits than the exponential inside this.
        torch.ops.aten._log_softmax_backward_data.out(
            d_logprobs, values, -1, torch.float32, out=values
        )
        d_logprobs.scatter_(1, targets, 0.0)


class _TurnLeaves(_Look):
    """The same for several leaves of the logits."""

    def __init__(self, targets: Tensor, gradients: TokenOutputs) -> None:
        """`gradients` are those of the chunk's rows."""
        super().__init__(targets)
        self._gradients = gradients

    def __call__(self, part: slice, values: Tensor) -> None:
        super().__call__(part, values)
        found = self._gradients.mapped(lambda one: one[part])
        entropy = None if found.entropy is None else entropy_of(values)
        turn_logprobs(values, found, entropy)
        values.scatter_add_(1, self._targets[part], found.logprobs[:, None])
