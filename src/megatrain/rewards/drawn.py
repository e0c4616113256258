"""A draw: answers with their rewards, as they are trained on, perhaps for several steps.

A checkpoint between two steps on the same answers has the answers: the weights that drew them are
gone by then.

Laws (tests/rewards/test_drawn.py)
    1. A draw that went through JSON gives the same micro-batches, bit for bit.
    2. Whatever else a file has in its place is a TypeError, ValueError or KeyError.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, stdev
from typing import Any, Self

from megatrain.batch import MicroBatch
from megatrain.engine.engine import Engine
from megatrain.losses.policy_gradient import group_advantages
from megatrain.rewards.functions import Rewards
from megatrain.rewards.rollouts import Rollout, by_rollout, rollout_batch

MOST_IMPORTANCE = 2.0
"""Most that a token of another policy counts by the ratio of probabilities (truncated importance
sampling), as in TRL and verl."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """Answers and by how much each is better than the others of its prompt."""

    rollouts: tuple[Rollout, ...]
    advantages: tuple[float | tuple[float, ...], ...]
    """One advantage per rollout, or one per token of it."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Figures for metrics.jsonl."""
    num_used: int = 0
    """Steps that were taken on them."""

    @classmethod
    def of(
        cls,
        rollouts: Sequence[Rollout],
        rewards: Rewards,
        num_samples: int,
        *,
        scaled: bool,
        mask_truncated: bool,
    ) -> Self:
        """Return answers with their advantages; `num_samples` in a row are of one prompt.

        Those that are masked are left out. If all are, they stay, and count nothing.
        """
        total = rewards.total
        advantages = group_advantages(total, num_samples, scaled=scaled)
        groups = [total[first : first + num_samples] for first in range(0, len(total), num_samples)]
        figures = {
            "reward": fmean(total),
            "reward_std": fmean(stdev(group) for group in groups),
            **{f"reward/{name}": mean for name, mean in rewards.means.items()},
            "answer_tokens": fmean(len(one.tokens) for one in rollouts),
            "ended": fmean(float(one.ended) for one in rollouts),
        }
        chosen = list(zip(rollouts, advantages, strict=True))
        if mask_truncated:
            ended = [(one, advantage) for one, advantage in chosen if one.ended]
            chosen = ended or [(one, 0.0) for one in rollouts]
        return cls(
            rollouts=tuple(one for one, _ in chosen),
            advantages=tuple(advantage for _, advantage in chosen),
            figures=figures,
        )

    def corrected(self, engine: Engine, temperature: float, **layout: int) -> Self:
        """Return answers of another policy with the log-probabilities of this engine.

        Each token counts by the ratio of both probabilities, up to a limit.
        """
        batch = rollout_batch(self.rollouts, self.advantages, **layout)
        known = engine.logprobs(batch, temperature=temperature)
        own = by_rollout(self.rollouts, known, layout["micro_batch_tokens"])
        apart = [
            [ours - theirs for ours, theirs in zip(values, one.logprobs, strict=True)]
            for values, one in zip(own, self.rollouts, strict=True)
        ]
        weights = [[min(math.exp(d), MOST_IMPORTANCE) for d in of_one] for of_one in apart]
        gaps = [
            abs(gap)
            for of_one, one in zip(apart, self.rollouts, strict=True)
            for gap, is_own in zip(of_one, one.own, strict=True)
            if is_own
        ]
        figures = {
            "logprob_gap": fmean(gaps),
            "logprob_gap_most": max(gaps),
            "importance": fmean(weight for of_one in weights for weight in of_one),
        }
        return replace(
            self,
            rollouts=tuple(
                replace(one, logprobs=tuple(min(0.0, value) for value in values))
                for one, values in zip(self.rollouts, own, strict=True)
            ),
            advantages=tuple(
                tuple(_of_tokens(advantage, len(of_one))[n] * of_one[n] for n in range(len(of_one)))
                for advantage, of_one in zip(self.advantages, weights, strict=True)
            ),
            figures={**self.figures, **figures},
        )

    def batch(self, **layout: int) -> list[MicroBatch]:
        """Return the micro-batches of a step on them."""
        return rollout_batch(self.rollouts, self.advantages, **layout)

    def used(self) -> Self:
        """Return it after one more step."""
        return replace(self, num_used=self.num_used + 1)

    def to_json(self) -> dict[str, Any]:
        return {
            "rollouts": [one.to_json() for one in self.rollouts],
            "advantages": list(self.advantages),
            "figures": dict(self.figures),
            "num_used": self.num_used,
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Raises a Python error for what no run wrote."""
        found = cls(
            rollouts=tuple(Rollout.from_json(one) for one in fields["rollouts"]),
            advantages=tuple(
                tuple(map(float, one)) if isinstance(one, list | tuple) else float(one)
                for one in fields["advantages"]
            ),
            figures={str(name): float(figure) for name, figure in fields["figures"].items()},
            num_used=int(fields["num_used"]),
        )
        if len(found.rollouts) != len(found.advantages) or not found.rollouts:
            raise ValueError("rollouts and advantages differ in number")
        return found


def _of_tokens(advantage: float | Sequence[float], count: int) -> Sequence[float]:
    return [advantage] * count if isinstance(advantage, float) else advantage
