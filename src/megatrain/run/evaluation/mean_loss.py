"""The loss of a model on data that it is not trained on, and what `compute_metrics` makes of it.

`compute_metrics` gets a few numbers for each trained token, never logits: a row of them is the
vocabulary, and nothing of that size leaves the device. Memory is 28 bytes per trained token of the
evaluation.

Law (tests/run/evaluation/test_eval_tokens.py): targets, predictions and log-probabilities are those
of the resident model, and the mean of the last is the evaluation's loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatrain.batch import MicroBatch
from megatrain.engine.engine import Engine
from megatrain.engine.results import SOURCE_LOSS, SOURCE_UNITS
from megatrain.errors import ConfigError
from megatrain.losses.head import IGNORED
from megatrain.losses.loss import NextToken
from megatrain.run.console import preference_words
from megatrain.run.state import perplexity


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanLoss:
    """The evaluation of a model on batches that it is not trained on."""

    loss: float
    """Mean over the units of all batches: their trained tokens, unless the loss counts others."""
    num_valid_tokens: int
    """Number of units."""
    aux_loss: float | None
    """Load-balancing loss: mean over all tokens; None if experts are not balanced."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Other figures that the loss reports, by name."""
    is_of_tokens: bool = True
    """Whether it is that of tokens, without further terms: only then is there a perplexity."""
    by_source: Mapping[str, float] = field(default_factory=dict)
    """Mean loss of each source, by its name, if there are several."""
    further: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the caller, by name in metrics.jsonl."""

    def with_metrics(self, further: Mapping[str, float]) -> Self:
        """Return it with metrics of the caller."""
        return replace(self, further=further)

    def metrics(self) -> dict[str, float]:
        """Return the figures by their names in metrics.jsonl."""
        aux = {} if self.aux_loss is None else {"eval_aux_loss": self.aux_loss}
        exponential = {"eval_perplexity": perplexity(self.loss)} if self.is_of_tokens else {}
        figures = {f"eval_{name}": figure for name, figure in self.figures.items()}
        apart = {f"eval_loss/{name}": loss for name, loss in self.by_source.items()}
        return {**self.further, "eval_loss": self.loss, **apart, **aux, **exponential, **figures}

    def in_words(self) -> str:
        exponential = f", perplexity {perplexity(self.loss):.4g}" if self.is_of_tokens else ""
        aux = "" if self.aux_loss is None else f", balancing loss {self.aux_loss:.4f}"
        words = preference_words(self.figures).replace("  ", ", ")
        more = "".join(f", {k.removeprefix('eval_')} {v:.4g}" for k, v in self.further.items())
        apart = ", ".join(f"{name} {loss:.4f}" for name, loss in self.by_source.items())
        loss = f"loss {self.loss:.4f}" + (f" ({apart})" if apart else "")
        return f"{loss}{exponential}{aux}" + (f", {words}" if words else "") + more


def mean_loss(
    engine: Engine,
    batches: Iterable[list[MicroBatch]],
    evaluate: Callable[[list[MicroBatch]], tuple[float, int]] | None = None,
    names: Sequence[str] = (),
) -> MeanLoss | None:
    """Return the mean loss over all batches; None if nothing in them is trained.

    `evaluate` calls `Engine.evaluate`, and looks at more of its result. `names` are those of the
    sources, by the numbers that micro-batches have.
    """
    evaluate = evaluate or engine.evaluate
    total, count, aux_total, num_tokens = 0.0, 0, 0.0, 0
    sums: dict[str, float] = {}
    for batch in batches:
        part, num = evaluate(batch)
        total, count = total + part, count + num
        for name, mean in engine.metrics.items():
            sums[name] = sums.get(name, 0.0) + num * mean
        size = sum(micro.num_tokens for micro in batch)
        aux_total, num_tokens = aux_total + size * (engine.aux_loss or 0.0), num_tokens + size
    if not count:
        return None
    aux_loss = None if engine.aux_loss is None else aux_total / num_tokens
    by_source = {
        name: sums.pop(f"{SOURCE_LOSS}{number}") / units
        for number, name in enumerate(names)
        if (units := sums.pop(f"{SOURCE_UNITS}{number}", 0.0))
    }
    means = {name: figure / count for name, figure in sums.items()}
    return MeanLoss(
        loss=total / count,
        num_valid_tokens=count,
        aux_loss=aux_loss,
        figures=engine.loss.reported(means),
        by_source=by_source,
        is_of_tokens=isinstance(engine.loss, NextToken) and not engine.loss.output_spec.anything,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalPrediction:
    """The trained tokens of an evaluation, document after document. All arrays are (tokens,)."""

    targets: NDArray[np.int64]
    """The tokens that the rows have."""
    predictions: NDArray[np.int64]
    """The likeliest token at the place of each, given the tokens of the row before it."""
    logprobs: NDArray[np.float32]
    """The log-probability of each target."""
    documents: NDArray[np.int64]
    """Number of the document of each, from 0. Their order is that of evaluation, not of rows."""


def judged_loss(
    engine: Engine,
    batches: Iterable[list[MicroBatch]],
    compute: Callable[[EvalPrediction], Mapping[str, float]] | None,
    names: Sequence[str] = (),
) -> MeanLoss | None:
    """Return the mean loss, with what `compute` makes of all tokens.

    None if nothing is trained. Raises ConfigError for what are not metrics.
    """
    if compute is None:
        return mean_loss(engine, batches, names=names)
    parts: list[EvalPrediction] = []

    def evaluate(batch: list[MicroBatch]) -> tuple[float, int]:
        likeliest: list[tuple[Tensor, Tensor]] = []
        result = engine.evaluate(batch, likeliest)
        for micro, (logprobs, tokens) in zip(batch, likeliest, strict=True):
            first = int(parts[-1].documents[-1]) + 1 if parts else 0
            if micro.num_valid_tokens:
                parts.append(_tokens_of(micro, logprobs, tokens, first))
        return result

    found = mean_loss(engine, batches, evaluate, names)
    if found is None:
        return None
    return found.with_metrics(_checked(compute(_joined(parts))))


def _tokens_of(
    micro: MicroBatch, logprobs: Tensor, likeliest: Tensor, first: int
) -> EvalPrediction:
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
    return EvalPrediction(
        targets=targets[places].numpy(),
        predictions=likeliest.flatten()[places].numpy(),
        logprobs=logprobs.flatten()[places].numpy(),
        documents=(numbers + first).numpy(),
    )


def _joined(parts: list[EvalPrediction]) -> EvalPrediction:
    names = EvalPrediction.__dataclass_fields__
    return EvalPrediction(
        **{n: np.concatenate([getattr(part, n) for part in parts]) for n in names}
    )


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
