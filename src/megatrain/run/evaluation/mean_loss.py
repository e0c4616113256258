"""The loss of a model on data that it is not trained on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatrain.engine.batch import MicroBatch
from megatrain.engine.engine import Engine
from megatrain.run.state import perplexity


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanLoss:
    """What a model makes of batches that it is not trained on."""

    loss: float
    """Mean over the trained tokens of all batches."""
    num_trained: int
    aux_loss: float | None
    """Load-balancing loss: mean over all tokens; None if experts are not balanced."""

    def metrics(self) -> dict[str, float]:
        """Return the figures by their names in metrics.jsonl."""
        aux = {} if self.aux_loss is None else {"eval_aux_loss": self.aux_loss}
        return {"eval_loss": self.loss, **aux, "eval_perplexity": perplexity(self.loss)}

    def in_words(self) -> str:
        aux = "" if self.aux_loss is None else f", balancing loss {self.aux_loss:.4f}"
        return f"loss {self.loss:.4f}, perplexity {perplexity(self.loss):.4g}{aux}"


def mean_loss(engine: Engine, batches: Iterable[list[MicroBatch]]) -> MeanLoss | None:
    """Return the mean loss over all batches; None if nothing in them is trained."""
    total, count, aux_total, num_tokens = 0.0, 0, 0.0, 0
    for batch in batches:
        part, num = engine.evaluate(batch)
        total, count = total + part, count + num
        size = sum(micro.num_tokens for micro in batch)
        aux_total, num_tokens = aux_total + size * (engine.aux_loss or 0.0), num_tokens + size
    if not count:
        return None
    aux_loss = None if engine.aux_loss is None else aux_total / num_tokens
    return MeanLoss(loss=total / count, num_trained=count, aux_loss=aux_loss)
