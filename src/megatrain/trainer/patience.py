"""The best evaluation so far, and when to stop early: after so many in a row that are not better.

Laws (tests/trainer/test_patience.py)
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

    def is_best(self, step: int, loss: float) -> bool:
        """Take note of an evaluation; return whether it is the best so far. NaN never is."""
        if self.best_loss is None or loss < self.best_loss:
            self.best_loss, self.best_step, self.num_worse = loss, step, 0
            return True
        self.num_worse += 1
        return False

    def is_over(self, limit: int | None) -> bool:
        """Return whether it is time to stop."""
        return limit is not None and self.num_worse >= limit

    def facts(self) -> dict[str, object]:
        """Return what metrics.jsonl says beside the last evaluation of a run that stops early."""
        return {"stopped_early": True, "best_step": self.best_step, "best_loss": self.best_loss}

    def in_words(self) -> str:
        """Return why the run stops."""
        return (
            f"stopping early: {self.num_worse} evaluations without a loss below "
            f"{self.best_loss:.4f} of step {self.best_step} (eval.patience)"
        )
