"""The best evaluation so far, and when to stop early: after so many in a row that are not better.

An evaluation before the first step is remembered and not counted: the best model of a run is one
that was trained.

Laws (tests/run/test_patience.py)
    1. A run stops at the first evaluation that is the `limit`-th in a row without a lower loss.
    2. Without a limit, or without an evaluation loss, it never stops early.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class Patience:
    """The best evaluation, and how many came after it."""

    best_loss: float | None = None
    best_step: int = 0
    num_worse: int = 0
    num_evaluations: int = 0
    untrained_loss: float | None = None
    """Of the evaluation before the first step."""

    def is_best(self, step: int, loss: float) -> bool:
        """Take note of an evaluation; return whether it is the best so far. NaN never is."""
        if step == 0:
            self.untrained_loss = loss
            return False
        self.num_evaluations += 1
        if self.best_loss is None or loss < self.best_loss:
            self.best_loss, self.best_step, self.num_worse = loss, step, 0
            return True
        self.num_worse += 1
        return False

    def is_over(self, limit: int | None) -> bool:
        """Return whether it is time to stop."""
        return limit is not None and self.num_worse >= limit

    def facts(self) -> dict[str, object]:
        """Return the metrics to add to the last evaluation of a run that stops early."""
        return {"stopped_early": True, "best_step": self.best_step, "best_loss": self.best_loss}

    def in_words(self) -> str:
        """Return why the run stops."""
        return (
            f"stopping early: {self.num_worse} evaluations without a loss below "
            f"{self.best_loss:.4f} of step {self.best_step} (eval.patience)"
        )

    def rank(self, step: int, loss: float | None) -> str:
        """Return what place a model with this loss has among the evaluations, in words."""
        if loss is None or self.best_loss is None:
            return f"model of step {step}"
        many = f"{self.num_evaluations} evaluation{'s' if self.num_evaluations != 1 else ''}"
        if loss > self.best_loss:
            text = (
                f"model of step {step}, the best that was saved; the best of {many} was step "
                f"{self.best_step}"
            )
        else:
            text = f"model of step {step}, the best of {many}"
        if self.untrained_loss is not None and loss > self.untrained_loss:
            text += f" (before training the loss was lower: {self.untrained_loss:.4f})"
        return text
