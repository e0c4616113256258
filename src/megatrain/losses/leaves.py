"""Leaves: what the head gives a loss of each token, and the gradients that it takes back.

    logprobs      log-probability of the target, always
    entropy       of the distribution over the vocabulary
    logsumexp      log-sum-exp of the logits
    mean_logits   their mean over the vocabulary
    logits        those of some tokens: the `top_k` highest, or the tokens that a tensor names
    hidden        the row that the output projection gets: the model's last hidden state

All but `hidden` come out of the same chunks of logits and cost no further product. Each has a
gradient in closed form, so that the logits of a chunk become their own gradient in place:

    softmax x (logsumexp' - logprobs' - entropy' x (log-softmax + entropy))
    + mean_logits' / vocabulary  + one-hot of the target x logprobs'  + one-hots x logits'

where x' is the gradient of the loss with respect to leaf x.

Laws (tests/losses/test_leaves.py)
    1. Leaves and gradients are those of ordinary autograd through all logits, within rounding, in
       any number of chunks.
    2. Without further leaves nothing is computed but log-probabilities, by the same operations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from megatrain.errors import ConfigError

_LEAST_LOGPROB = -1e4
"""A token that is less likely adds nothing to entropy; minus infinity times zero would add nan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOutputSpec:
    """The leaves that a loss wants beside log-probabilities."""

    entropy: bool = False
    logsumexp: bool = False
    mean_logits: bool = False
    top_k: int = 0
    """Tokens with the highest logits, whose logits and numbers are wanted."""
    tokens: str | None = None
    """Name in `loss_tensors` of the tokens whose logits are wanted. (rows, length, k)"""
    hidden: bool = False
    temperature: float = 1.0
    """Divides logits before all else: all leaves but `hidden` are those of the quotient."""

    def __post_init__(self) -> None:
        if self.top_k < 0 or (self.top_k and self.tokens is not None):
            raise ConfigError(
                f"top_k is {self.top_k} and tokens {self.tokens!r}; give a number above 0, or the "
                "name of a tensor in `loss_tensors`, not both."
            )
        if not 0 < self.temperature < float("inf"):
            raise ConfigError(f"temperature is {self.temperature:g}; give a number above 0.")

    @property
    def of_logits(self) -> bool:
        """Whether logits give more than log-probabilities."""
        chosen = self.top_k > 0 or self.tokens is not None
        return self.entropy or self.logsumexp or self.mean_logits or chosen

    @property
    def anything(self) -> bool:
        """Whether a loss wants more than log-probabilities."""
        return self.of_logits or self.hidden


LOGPROBS_ALONE = TokenOutputSpec()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOutputs:
    """Leaves of a micro-batch, or the gradients of a loss with respect to them.

    (rows, length) with zeros where there is no target; in fp32, but for `hidden` and `tokens`.
    """

    logprobs: Tensor
    entropy: Tensor | None = None
    logsumexp: Tensor | None = None
    mean_logits: Tensor | None = None
    logits: Tensor | None = None
    """(rows, length, k)"""
    tokens: Tensor | None = None
    """The numbers of the tokens that `logits` are of. (rows, length, k)"""
    hidden: Tensor | None = None
    """Hidden states of every position, in the dtype of the model. (rows, length, width)"""

    def mapped(self, change: Callable[[Tensor], Tensor]) -> TokenOutputs:
        """Return the leaves with `change` made to each."""
        return TokenOutputs(**{name: change(tensor) for name, tensor in self.named().items()})

    def named(self) -> dict[str, Tensor]:
        """Return the leaves that there are, by name."""
        found = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: tensor for name, tensor in found if tensor is not None}

    def shaped(self, shape: torch.Size) -> TokenOutputs:
        """Return leaves of (tokens, ...) as (rows, length, ...), or back."""
        before = self.logprobs.dim()
        return self.mapped(lambda tensor: tensor.view(*shape, *tensor.shape[before:]))

    def detached(self) -> TokenOutputs:
        """Return leaves for a loss to be differentiable in; `tokens` are numbers alone."""
        return self.mapped(lambda one: one.detach().requires_grad_(one.is_floating_point()))

    def gradients(self, loss: Tensor) -> TokenOutputs:
        """Return the gradients of `loss`; those of leaves that it does not read are None."""
        named = {name: leaf for name, leaf in self.named().items() if leaf.requires_grad}
        found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        known = {n: d for n, d in zip(named, found, strict=True) if d is not None}
        if "logprobs" not in known:
            known["logprobs"] = torch.zeros_like(self.logprobs)
        return TokenOutputs(**known, tokens=self.tokens if "logits" in known else None)

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing but log-probabilities."""
        return self.named().keys() == {"logprobs"}


class Notes:
    """Collects what is wanted of the logits of a micro-batch, some rows at a time."""

    def __init__(
        self, wanted: TokenOutputSpec, logprobs: Tensor, tokens: Tensor | None = None
    ) -> None:
        """`logprobs` (tokens,) is where they go; `tokens` (tokens, k) are those that are wanted."""
        self._wanted = wanted
        zeros = torch.zeros_like
        self.logprobs = logprobs
        self.entropy = zeros(logprobs) if wanted.entropy else None
        self.logsumexp = zeros(logprobs) if wanted.logsumexp else None
        self.mean_logits = zeros(logprobs) if wanted.mean_logits else None
        self._given = tokens
        shape = (len(logprobs), wanted.top_k) if tokens is None else tokens.shape
        self.logits = logprobs.new_zeros(shape) if shape[1] else None
        self.tokens = tokens
        if wanted.top_k:
            self.tokens = torch.zeros(shape, dtype=torch.int64, device=logprobs.device)

    def leaves(self) -> TokenOutputs:
        """Return all that was noted. (tokens, ...)"""
        names = ("logprobs", "entropy", "logsumexp", "mean_logits", "logits", "tokens")
        return TokenOutputs(**{name: getattr(self, name) for name in names})

    def see_scores(self, rows: Tensor, scores: Tensor) -> None:
        """Note of the scores of some rows, over all tokens, what log-probabilities do not tell."""
        if self.mean_logits is not None:
            self.mean_logits.index_copy_(0, rows, scores.mean(1))
        if self.logits is not None and self._given is not None:
            self.logits.index_copy_(0, rows, scores.gather(1, self._given.index_select(0, rows)))
        elif self.logits is not None:
            assert self.tokens is not None
            found = scores.topk(self._wanted.top_k, dim=1)
            self.logits.index_copy_(0, rows, found.values)
            self.tokens.index_copy_(0, rows, found.indices)
        if self.logsumexp is not None:
            self.logsumexp.index_copy_(0, rows, scores.amax(1))

    def see_logprobs(self, rows: Tensor, logprobs: Tensor) -> None:
        """Note of the log-probabilities of the same rows, over all tokens, the rest."""
        if self.logsumexp is not None:  # the highest score is above it by as much
            self.logsumexp.index_add_(0, rows, logprobs.amax(1), alpha=-1)
        if self.entropy is not None:
            self.entropy.index_copy_(0, rows, entropy_of(logprobs))


def entropy_of(logprobs: Tensor) -> Tensor:
    """Return the entropy of distributions over all tokens. (rows, vocabulary) to (rows,)

    Log-probabilities of tokens that cannot be are made finite, in place.
    """
    logprobs.clamp_(min=_LEAST_LOGPROB)
    return logprobs.exp().mul_(logprobs).sum(1).neg_()


def turn_logprobs(logprobs: Tensor, found: TokenOutputs, entropy: Tensor | None) -> None:
    """Write the gradient of scores over their log-probabilities. (rows, vocabulary)

    `found` has the gradients of the rows' leaves, with `entropy` (rows,) where it has one. The part
    of the target's own score is not in it.
    """
    factor = -found.logprobs
    if found.logsumexp is not None:
        factor = factor + found.logsumexp
    if found.entropy is None:
        logprobs.exp_().mul_(factor[:, None])
    else:
        assert entropy is not None
        along = logprobs.clamp_(min=_LEAST_LOGPROB) * -found.entropy[:, None]
        along.add_((factor - found.entropy * entropy)[:, None])
        logprobs.exp_().mul_(along)
    if found.mean_logits is not None:
        logprobs.add_((found.mean_logits / logprobs.shape[1])[:, None])
    if found.logits is not None:
        assert found.tokens is not None
        logprobs.scatter_add_(1, found.tokens, found.logits)
