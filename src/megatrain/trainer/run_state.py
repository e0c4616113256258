"""What a run knows besides tensors: small, exact, and in every checkpoint."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

WINDOW = 64
_LEAST = 16
_SPREADS = 8.0
_LEAST_SPREAD = 0.05
"""Of the median: what is nearly constant has no spread to measure by."""


@dataclass(slots=True, kw_only=True)
class RunState:
    """Counts and judgements after a step."""

    step: int = 0
    total_tokens: int = 0
    first_loss: float | None = None
    last_loss: float | None = None
    eval_loss: float | None = None
    """Of an evaluation at this very step."""
    best_loss: float | None = None
    evals_since_best: int = 0
    left_out: dict[int, str] = field(default_factory=dict)
    """Steps that are not trained on, with the reason: a rollback found them."""
    recent: dict[str, deque[float]] = field(default_factory=dict)

    def judge(self, name: str, value: float) -> str | None:
        """Return what is unusual about a loss or norm, compared with the last ones; count it."""
        seen = self.recent.setdefault(name, deque(maxlen=WINDOW))
        spike = None
        if len(seen) >= _LEAST:
            usual = median(seen)
            spread = max(1.4826 * median(abs(x - usual) for x in seen), _LEAST_SPREAD * abs(usual))
            if value > usual + _SPREADS * spread:
                spike = f"{name} {value:.4g}, usually {usual:.4g}"
        if spike is None:
            seen.append(value)
        return spike

    def judge_evaluation(self, loss: float) -> bool:
        """Take an evaluation's loss; return whether it is the best so far."""
        self.eval_loss = loss
        is_best = self.best_loss is None or loss < self.best_loss
        self.best_loss = loss if is_best else self.best_loss
        self.evals_since_best = 0 if is_best else self.evals_since_best + 1
        return is_best

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "total_tokens": self.total_tokens,
            "first_loss": self.first_loss,
            "last_loss": self.last_loss,
            "eval_loss": self.eval_loss,
            "best_loss": self.best_loss,
            "evals_since_best": self.evals_since_best,
            "left_out": {str(step): reason for step, reason in self.left_out.items()},
            "recent": {name: list(values) for name, values in self.recent.items()},
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> RunState:
        plain = {key: fields[key] for key in cls.__slots__ if key not in ("left_out", "recent")}
        return cls(
            **plain,
            left_out={int(step): str(reason) for step, reason in fields["left_out"].items()},
            recent={k: deque(v, maxlen=WINDOW) for k, v in fields["recent"].items()},
        )
