"""The state of a run besides tensors: small, exact, and in every checkpoint.

A spike is a loss or norm far above what the last steps lead to expect: in logarithms, because noise
is in proportion; beyond a falling trend, because early losses fall fast; measured by medians,
because the last steps hold spikes themselves.

A run may stop early, after so many evaluations in a row that are not better than the best. An
evaluation before the first step is remembered and not counted: the best model of a run is one that
was trained.

Laws (tests/run/test_state.py, tests/run/test_patience.py)
    1. A state comes back from JSON in every bit, and judges as it would have.
    2. 99 % of the spikes above the noise are found; less than 1 % of usual values are reported
       to be spikes, also where the noise has heavy tails.
    3. A level that persists soon stops being a spike.
    4. A run stops at the first evaluation that is the `limit`-th in a row without a lower loss.
       Without a limit, or without an evaluation loss, it never stops early.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

from megatrain.text import counted

SPIKE_WINDOW = 64
_LEAST = 16
"""So many values are seen before one is judged; the last ones give level and trend."""
_SPREADS = 4.5
_LEAST_RISE = math.log(1.3)
"""The least rise of a spike, because a nearly constant value has no spread."""


@dataclass(slots=True, kw_only=True)
class Patience:
    """The best evaluation, and how many came after it."""

    best_loss: float | None = None
    best_step: int = 0
    num_worse: int = 0
    num_evaluations: int = 0
    untrained_loss: float | None = None
    """Loss of the evaluation before the first step."""

    def is_best(self, step: int, loss: float) -> bool:
        """Take note of an evaluation; return whether it is the best so far. NaN never is."""
        if step == 0:
            self.untrained_loss = loss
            return False
        self.num_evaluations += 1
        if not math.isnan(loss) and (self.best_loss is None or loss < self.best_loss):
            self.best_loss = loss
            self.best_step = step
            self.num_worse = 0
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
        worse = f"stopping early: {counted(self.num_worse, 'evaluation')} without a loss"
        if self.best_loss is None:
            return f"{worse} that is a number (eval.patience)"
        return f"{worse} below {self.best_loss:.4f} of step {self.best_step} (eval.patience)"

    def place(self, step: int, loss: float | None) -> str:
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


@dataclass(slots=True, kw_only=True)
class RunState:
    """Counts and judgments after a step."""

    global_step: int = 0
    """Steps that are done."""
    total_tokens: int = 0
    first_loss: float | None = None
    last_loss: float | None = None
    first_reward: float | None = None
    """Mean reward of the first step, where answers are drawn."""
    last_reward: float | None = None
    eval_loss: float | None = None
    """Loss of an evaluation at this very step."""
    owes_look: bool = False
    """Whether the evaluation and the samples of this step were left, and are to be made."""
    evaluations: Patience = field(default_factory=Patience)
    left_out: dict[int, str] = field(default_factory=dict)
    """Steps that are not trained on, with the reason: a rollback found them."""
    recent: dict[str, deque[float]] = field(default_factory=dict)

    def judge(self, name: str, value: float) -> str | None:
        """Return a message if a loss or norm is unusual compared with the last ones; count it."""
        seen = self.recent.setdefault(name, deque(maxlen=SPIKE_WINDOW))
        spike = None
        if len(seen) >= _LEAST:
            level, spread = _expected([_log(x) for x in seen])
            if _log(value) > level + max(_SPREADS * spread, _LEAST_RISE):
                spike = f"{name} {value:.4g}, expected {math.exp(level):.4g}"
        seen.append(value)
        return spike

    def outcome(self, seconds: float) -> TrainOutput:
        """Return what a run in this state came to, in so many seconds of this process."""
        return TrainOutput(
            num_steps=self.global_step,
            first_loss=math.nan if self.first_loss is None else self.first_loss,
            last_loss=math.nan if self.last_loss is None else self.last_loss,
            first_reward=self.first_reward,
            last_reward=self.last_reward,
            eval_loss=self.eval_loss,
            seconds=seconds,
            total_tokens=self.total_tokens,
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "global_step": self.global_step,
            "total_tokens": self.total_tokens,
            "first_loss": self.first_loss,
            "last_loss": self.last_loss,
            "first_reward": self.first_reward,
            "last_reward": self.last_reward,
            "eval_loss": self.eval_loss,
            "owes_look": self.owes_look,
            "evaluations": asdict(self.evaluations),
            "left_out": {str(step): reason for step, reason in self.left_out.items()},
            "recent": {name: list(values) for name, values in self.recent.items()},
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> RunState:
        """Raises a Python error for a state that no run wrote."""
        judged = fields["evaluations"]
        return cls(
            global_step=as_count(fields["global_step"]),
            total_tokens=as_count(fields["total_tokens"]),
            first_loss=as_loss(fields["first_loss"]),
            last_loss=as_loss(fields["last_loss"]),
            first_reward=as_loss(fields["first_reward"]),
            last_reward=as_loss(fields["last_reward"]),
            eval_loss=as_loss(fields["eval_loss"]),
            owes_look=fields["owes_look"] is True,
            evaluations=Patience(
                best_loss=as_loss(judged["best_loss"]),
                best_step=as_count(judged["best_step"]),
                num_worse=as_count(judged["num_worse"]),
                num_evaluations=as_count(judged["num_evaluations"]),
                untrained_loss=as_loss(judged["untrained_loss"]),
            ),
            left_out={int(step): str(reason) for step, reason in fields["left_out"].items()},
            recent={
                str(name): deque(map(float, values), maxlen=SPIKE_WINDOW)
                for name, values in fields["recent"].items()
            },
        )


def _expected(logs: list[float]) -> tuple[float, float]:
    """Return the level that the next value should have, and the spread of the noise around it."""
    half = _LEAST // 2
    before, now = median(logs[-_LEAST:-half]), median(logs[-half:])
    # From the middle of the last half to the next value: its slope, if it falls.
    level = now + min(0.0, now - before) * (half + 1) / 2 / half
    # Neighbors, which a trend hardly parts: their difference has the noise twice.
    steps = [abs(b - a) for a, b in pairwise(logs)]
    return level, 1.4826 * median(steps) / math.sqrt(2)


def _log(value: float) -> float:
    return math.log(max(value, 1e-30))


def as_count(value: Any) -> int:
    """Return a count as it is; raises TypeError for anything else."""
    if type(value) is not int or value < 0:
        raise TypeError(f"{str(value)[:40]!r} is not a count")
    return value


def as_loss(value: Any) -> float | None:
    """Return a float, or None, as it is; raises TypeError for anything else."""
    if value is not None and type(value) is not float:
        raise TypeError(f"{str(value)[:40]!r} is not a loss")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOutput:
    """The result of a run."""

    num_steps: int
    first_loss: float
    last_loss: float
    eval_loss: float | None
    seconds: float
    """Time of this process; a run that was resumed took longer."""
    total_tokens: int
    first_reward: float | None = None
    """Mean reward of the first step; None: no answers were drawn."""
    last_reward: float | None = None

    @property
    def learned(self) -> str:
        """Reward, or else loss, from the first step to the last, for people."""
        if self.first_reward is None or self.last_reward is None:
            return f"loss {self.first_loss:.4f} to {self.last_loss:.4f}"
        return f"reward {self.first_reward:.3f} to {self.last_reward:.3f}"


def perplexity(loss: float) -> float:
    """Return the perplexity of a mean loss; finite, however large the loss."""
    return math.exp(min(loss, 700.0))
