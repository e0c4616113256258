"""The head by pieces of the vocabulary: the gradient of the whole table never exists.

First the log-sum-exp of every trained row, over all pieces; then, piece by piece, the gradient of
that piece of the table, and its part of the gradient of the rows. Each logit is computed twice: the
price is one more product of the head. With one piece there is nothing to gain: head.py.

A model's scores must act on each logit alone (`Template.scores_by_element`).

Order of sums, all in fp32: a row's log-sum-exp over the tokens of a piece, then over pieces in
order; the gradient of a row over pieces in order; that of the table over chunks in order.

Laws (tests/losses/test_pieces.py)
    1. Any number of pieces gives loss and gradients of ordinary autograd: in fp32 within 1e-6 of
       their norms, in bf16 within its rounding.
    2. The same call gives the same bits.
    3. Peak memory is that of one chunk's logits of one piece.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.losses.head import TrainedRows
from megatrain.losses.leaves import Leaves, Notes, PieceSums, places_in, turn_logprobs
from megatrain.losses.projection import AddTokens, Projection
from megatrain.step.settings import vocabulary_pieces


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSums:
    """Sums over all pieces that the gradient of each needs. (tokens,), zero without a target"""

    log_sums: Tensor
    """Log-sum-exp of each row's scores, in fp32."""
    logprobs: Tensor
    """Log-probability of its target."""


def row_sums(
    rows: Tensor,
    trained: TrainedRows,
    projection: Projection,
    num_pieces: int,
    likeliest: Tensor | None = None,
    notes: Notes | None = None,
) -> RowSums:
    """Return the sums over all pieces of the vocabulary, chunk by chunk.

    `likeliest` gets the tokens of the highest scores (tokens,), `notes` what else is wanted of the
    logits, with the log-probabilities in its `logprobs`.
    """
    log_sums = torch.zeros(len(rows), dtype=torch.float32, device=rows.device)
    logprobs = torch.zeros_like(log_sums) if notes is None else notes.logprobs
    result = RowSums(log_sums=log_sums, logprobs=logprobs)
    for chunk in trained.chunks:
        inputs = rows.index_select(0, chunk)
        see = _Sum(trained.targets.index_select(0, chunk), notes_likeliest=likeliest is not None)
        see.others = None if notes is None else notes.piece_sums(chunk)
        for tokens in vocabulary_pieces(len(projection.weight), num_pieces):
            see.first_token = tokens.start
            piece = projection.piece(tokens)
            piece.read(piece.logits(inputs), see)
        result.log_sums.index_copy_(0, chunk, see.log_sums)
        result.logprobs.index_copy_(0, chunk, see.chosen - see.log_sums)
        if likeliest is not None and see.likeliest is not None:
            likeliest.index_copy_(0, chunk, see.likeliest)
        if notes is not None and see.others is not None:
            notes.see_pieces(chunk, see.others, see.log_sums)
    return result


def piece_gradients(
    rows: Tensor,
    trained: TrainedRows,
    token_weights: Tensor,
    log_sums: Tensor,
    piece: Projection,
    first_token: int,
    d_rows: Tensor,
    add_gradients: AddTokens,
    others: Leaves | None = None,
    entropy: Tensor | None = None,
    num_tokens: int = 0,
) -> None:
    """Add what one piece of the vocabulary, from `first_token` on, gives to the gradients.

    `token_weights` and `log_sums` are (tokens,); `d_rows` is (tokens, width), in any dtype: the sum
    of earlier pieces. `add_gradients` counts tokens from the piece's first. `others` has gradients
    of further leaves beside the same weights, with `entropy` (tokens,) and the `num_tokens` of all
    pieces.
    """

    def leaves_of(chunk: Tensor) -> _OfLeaves | None:
        if others is None:
            return None
        known = None if entropy is None else entropy.index_select(0, chunk)
        found = others.mapped(lambda one: one.index_select(0, chunk))
        return _OfLeaves(found, known, num_tokens, first_token)

    def go_through(chunk: Tensor) -> None:
        inputs = rows.index_select(0, chunk)
        logits = piece.logits(inputs)
        turn = _Turn(
            trained.targets.index_select(0, chunk) - first_token,
            log_sums.index_select(0, chunk),
            token_weights.index_select(0, chunk),
            leaves_of(chunk),
        )
        piece.differentiate(logits, turn)
        d_inputs = piece.back(logits, inputs, add_gradients)
        d_rows.index_add_(0, chunk, d_inputs.to(d_rows.dtype))

    for chunk in trained.chunks:
        go_through(chunk)  # which frees all it made, before there are the next logits


class _Sum:
    """Adds up the pieces of a chunk's rows; scores are overwritten."""

    def __init__(self, targets: Tensor, *, notes_likeliest: bool = False) -> None:
        self._targets = targets
        self.first_token = 0
        self.likeliest = torch.zeros_like(targets) if notes_likeliest else None
        self._highest = torch.full_like(targets, -torch.inf, dtype=torch.float32)
        self.log_sums = torch.full_like(targets, -torch.inf, dtype=torch.float32)
        self.chosen = torch.zeros_like(self.log_sums)
        """The scores of the targets in the pieces so far."""
        self.others: PieceSums | None = None
        """Sums for further leaves."""

    def __call__(self, part: slice, values: Tensor) -> None:
        place, inside = places_in(self._targets[part] - self.first_token, values.shape[1])
        self.chosen[part] += values.gather(1, place[:, None])[:, 0].where(inside, 0.0)
        if self.others is not None:
            self.others.add(part, values, self.first_token, self.log_sums[part])
        if self.likeliest is not None:
            self._note_likeliest(part, values, self.likeliest)
        # By hand, and in place: logsumexp would make another tensor of this size.
        largest = values.amax(1, keepdim=True)
        log_sums = values.sub_(largest).exp_().sum(1).log_().add_(largest[:, 0])
        self.log_sums[part] = torch.logaddexp(self.log_sums[part], log_sums)

    def _note_likeliest(self, part: slice, values: Tensor, likeliest: Tensor) -> None:
        """Note the token of the highest score so far; of equal ones, the first."""
        highest, place = values.max(1)
        is_new = highest > self._highest[part]
        likeliest[part] = torch.where(is_new, place + self.first_token, likeliest[part])
        self._highest[part] = torch.maximum(highest, self._highest[part])


@dataclass(frozen=True, slots=True)
class _OfLeaves:
    """Gradients of a chunk's leaves, and what they need to go back."""

    gradients: Leaves
    entropy: Tensor | None
    num_tokens: int
    first_token: int


class _Turn:
    """Turns the scores of a piece into their gradient."""

    def __init__(
        self,
        targets: Tensor,
        log_sums: Tensor,
        token_weights: Tensor,
        others: _OfLeaves | None = None,
    ) -> None:
        """`targets` count from the piece's first token."""
        self._targets = targets
        self._log_sums = log_sums
        self._weights = token_weights
        self._others = others

    def __call__(self, part: slice, values: Tensor) -> None:
        weights = self._weights[part]
        place, inside = places_in(self._targets[part], values.shape[1])
        values.sub_(self._log_sums[part, None])
        if self._others is None:
            values.exp_().mul_(-weights[:, None])
        else:
            found = self._others.gradients.mapped(lambda one: one[part])
            entropy = None if self._others.entropy is None else self._others.entropy[part]
            turn_logprobs(values, found, entropy, self._others.num_tokens, self._others.first_token)
        values.scatter_add_(1, place[:, None], weights.where(inside, 0.0)[:, None])
