"""What `compute_metrics` gets of an evaluation: a few numbers for each trained token.

Never logits: a row of them is the vocabulary, and nothing of that size leaves the device. Memory is
28 bytes per trained token of the evaluation.

Laws (tests/run/evaluation/test_eval_tokens.py)
    1. Targets, predictions and log-probabilities are those of the resident model, and the mean of
       the last is the evaluation's loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatrain.batch import MicroBatch
from megatrain.engine.engine import Engine
from megatrain.errors import ConfigError
from megatrain.losses.head import IGNORED
from megatrain.run.evaluation.mean_loss import MeanLoss, mean_loss


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalTokens:
    """The trained tokens of an evaluation, document after document. Arrays are (tokens,)"""

    targets: NDArray[np.int64]
    """The tokens that the rows have."""
    predictions: NDArray[np.int64]
    """The likeliest token at the place of each, given the tokens of the row before it."""
    logprobs: NDArray[np.float32]
    """The log-probability of each target."""
    documents: NDArray[np.int64]
    """Which document each belongs to, from 0. Their order is that of evaluation, not of rows."""


def judged_loss(
    engine: Engine,
    batches: Iterable[list[MicroBatch]],
    compute: Callable[[EvalTokens], Mapping[str, float]] | None,
    names: Sequence[str] = (),
) -> MeanLoss | None:
    """Return the mean loss, with what `compute` makes of all tokens.

    None if nothing is trained. Raises ConfigError for what are not metrics.
    """
    if compute is None:
        return mean_loss(engine, batches, names=names)
    parts: list[EvalTokens] = []

    def evaluate(batch: list[MicroBatch]) -> tuple[float, int]:
        likeliest: list[tuple[Tensor, Tensor]] = []
        result = engine.evaluate(batch, likeliest)
        for micro, (logprobs, tokens) in zip(batch, likeliest, strict=True):
            first = int(parts[-1].documents[-1]) + 1 if parts else 0
            if micro.num_trained:
                parts.append(_tokens_of(micro, logprobs, tokens, first))
        return result

    found = mean_loss(engine, batches, evaluate, names)
    if found is None:
        return None
    return found.with_metrics(_checked(compute(_joined(parts))))


def _tokens_of(micro: MicroBatch, logprobs: Tensor, likeliest: Tensor, first: int) -> EvalTokens:
    targets = micro.loss_inputs().targets.flatten()
    places = (targets != IGNORED).nonzero().flatten()
    bounds, length = micro.bounds(), micro.input_ids.shape[1]
    documents = (
        places // length
        if bounds is None
        else torch.searchsorted(bounds.long(), places, right=True) - 1
    )
    # A document without a trained token has no number.
    numbers = torch.unique_consecutive(documents, return_inverse=True)[1]
    return EvalTokens(
        targets=targets[places].numpy(),
        predictions=likeliest.flatten()[places].numpy(),
        logprobs=logprobs.flatten()[places].numpy(),
        documents=(numbers + first).numpy(),
    )


def _joined(parts: list[EvalTokens]) -> EvalTokens:
    names = EvalTokens.__dataclass_fields__
    return EvalTokens(**{n: np.concatenate([getattr(part, n) for part in parts]) for n in names})


def _checked(metrics: Any) -> dict[str, float]:
    """Return the metrics under names that begin with eval_, as plain numbers."""
    if not isinstance(metrics, Mapping):
        raise ConfigError(
            f"compute_metrics returned {metrics!r:.80}. Return a dict of names and numbers."
        )
    try:
        return {
            name if name.startswith("eval_") else f"eval_{name}": float(value)
            for name, value in metrics.items()
        }
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"compute_metrics: names and numbers are needed: {error}") from error
