"""From the rows before the output projection to log-probabilities, a loss and its gradients.

Logits are the largest tensor of a step: tokens x vocabulary. Here they exist for CHUNK_TOKENS rows
at a time, once and in the dtype of the weights: project, take the log-probability of each target,
write the gradient of the logits over them, go back through the projection, and free the chunk.
Between the two projections rows do not meet, so that part runs PART_ELEMENTS at a time: its
fp32 values stay in the cache. Memory does not grow with the batch.

What goes back is one weight per token: the gradient of the loss with respect to the token's
log-probability (loss.py).

Laws (tests/losses/test_head.py)
    1. One chunk gives the bits of ordinary autograd through the full logits.
    2. Any chunking gives them within rounding; a chunk without a target costs nothing.
    3. Peak memory is that of one chunk's logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megatrain.step.settings import CHUNK_TOKENS

PART_ELEMENTS = 2**22
"""Logits that are scored at once: 16 MiB in fp32, a size that malloc does not map each time."""
IGNORED = -100
"""The label of a token that is not trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadGradients:
    """The result of going back through the output projection with one micro-batch."""

    loss: Tensor
    """Scalar, fp32: the sum of weight x log-probability."""
    rows: Tensor
    """Gradient of the rows (tokens, width)."""


def next_token_targets(labels: Tensor) -> Tensor:
    """Return for each position the label of the next one; the last has none. (tokens,)"""
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    return targets.reshape(-1)


def token_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the log-probability of each target in fp32, zero where there is none. (tokens,)"""
    return -F.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="none")


def head_logprobs(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    scores: Callable[[Tensor], Tensor],
    spans: Sequence[slice],
) -> Tensor:
    """Return the log-probabilities of `targets`, chunk by chunk, without gradients. (tokens,)"""
    result = torch.zeros(len(rows), dtype=torch.float32, device=rows.device)
    with torch.no_grad():
        for span in spans:
            logits = F.linear(rows[span], weight, bias)
            for part in _parts(logits):
                logprobs = token_logprobs(scores(logits[part]), targets[span][part])
                result[span][part] = logprobs
            del logits
    return result


def head_gradients(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    token_weights: Tensor,
    scores: Callable[[Tensor], Tensor],
    add_gradients: Callable[[Tensor | None, Tensor | None], None],
    spans: Sequence[slice],
) -> HeadGradients:
    """Return the sum of `token_weights` x log-probability, and the gradient of `rows`.

    `add_gradients` gets the gradients of weight and bias, chunk by chunk (None if frozen).
    """
    total = torch.zeros((), dtype=torch.float32, device=rows.device)
    d_rows = torch.zeros_like(rows)
    for span in spans:
        inputs = [rows[span].detach().requires_grad_(), weight.detach()]
        inputs[1].requires_grad_(weight.requires_grad)
        if bias is not None:
            inputs.append(bias.detach().requires_grad_(bias.requires_grad))
        with torch.enable_grad():
            logits = F.linear(*inputs)
        d_logits = logits.detach()
        losses = _turn_into_gradient(d_logits, targets[span], token_weights[span], scores)
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        grads = iter(torch.autograd.grad(logits, wanted, d_logits))
        del logits, d_logits
        d_rows[span] = next(grads)
        d_weight = next(grads) if inputs[1].requires_grad else None
        d_bias = next(grads) if bias is not None and bias.requires_grad else None
        add_gradients(d_weight, d_bias)
        total += losses.sum()
    return HeadGradients(loss=total, rows=d_rows)


def _turn_into_gradient(
    logits: Tensor, targets: Tensor, token_weights: Tensor, scores: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return each token's part of the loss; `logits` become their own gradient. (tokens,)"""
    losses = torch.empty_like(token_weights)
    for span in _parts(logits):
        leaf = logits[span].detach().requires_grad_()
        with torch.enable_grad():
            logprobs = token_logprobs(scores(leaf), targets[span])
        logits[span] = torch.autograd.grad(logprobs, leaf, token_weights[span])[0]
        losses[span] = logprobs.detach() * token_weights[span]
    return losses


def _parts(logits: Tensor) -> list[slice]:
    """Return the rows of a chunk that are scored at a time."""
    num_rows = max(1, PART_ELEMENTS // logits.shape[1])
    return [slice(first, first + num_rows) for first in range(0, len(logits), num_rows)]


def trained_spans(targets: Tensor, chunk_tokens: int = CHUNK_TOKENS) -> list[slice]:
    """Return the chunks of rows that have a target. `targets` are on the host: none is computed."""
    spans = [
        slice(first, min(first + chunk_tokens, len(targets)))
        for first in range(0, len(targets), chunk_tokens)
    ]
    return [span for span in spans if bool((targets[span] != IGNORED).any())]
