"""The loss of a model on data that it is not trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from megatrain.batch import MicroBatch
from megatrain.engine.engine import Engine
from megatrain.engine.results import SOURCE_LOSS, SOURCE_UNITS
from megatrain.losses.loss import NextToken
from megatrain.run.console import preference_words
from megatrain.run.state import perplexity


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanLoss:
    """What a model makes of batches that it is not trained on."""

    loss: float
    """Mean over the units of all batches: their trained tokens, unless the loss counts others."""
    num_trained: int
    """Units."""
    aux_loss: float | None
    """Load-balancing loss: mean over all tokens; None if experts are not balanced."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """What else the loss reports."""
    is_of_tokens: bool = True
    """Whether units are tokens: only then is there a perplexity."""
    by_source: Mapping[str, float] = field(default_factory=dict)
    """Mean loss of each source, by its name, if there are several."""
    further: Mapping[str, float] = field(default_factory=dict)
    """What the caller makes of the evaluation, by name in metrics.jsonl."""

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
        for name, mean in engine.figures.items():
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
        num_trained=count,
        aux_loss=aux_loss,
        figures=engine.loss.reported(means),
        by_source=by_source,
        is_of_tokens=isinstance(engine.loss, NextToken),
    )
