"""Going back to a checkpoint because a step failed: to the newest, and if need be to an older one.

The step that failed is left out from then on. If other steps keep failing from the same weights, it
is not the steps: a bit may have flipped in memory before these weights were saved, and their hashes
match. The run then goes back to the next older checkpoint, and trains those steps again.

Laws (tests/run/test_rollback.py)
    1. Weights are tried MOST_ROLLBACKS times, in however many checkpoints they were saved.
    2. A run whose newest checkpoint is poisoned ends in the bits of one that was never disturbed,
       if an older checkpoint is sound.
    3. A run that fails from every checkpoint stops, and no checkpoint was deleted for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatrain.config import Config
from megatrain.disk.checkpoint.retention import step_of
from megatrain.disk.hf.model import HostModel
from megatrain.errors import NonFiniteStep, listing
from megatrain.ranks.ranks import Ranks
from megatrain.run.checkpoints import Checkpoints
from megatrain.run.opening.resumption import LoadedCheckpoint, RunRecord, resume

MOST_ROLLBACKS = 3
"""To the same weights: more would mean that they, or something else, are wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    """One return to a checkpoint."""

    step: int
    """The step that failed."""
    reason: str
    found: LoadedCheckpoint
    is_older: bool
    """Whether the weights of newer checkpoints were given up for it, just now."""

    @property
    def _suspect_step(self) -> int:
        """The first step whose checkpoint is not trusted any more."""
        return min(map(step_of, self.found.refused))

    def left_out(self, before: Mapping[int, str]) -> dict[int, str]:
        """Return the steps to leave out, given those `before` and why.

        Steps that failed from weights that were given up are trained again.
        """
        steps = {**before, self.step: self.reason}
        if not self.is_older:
            return steps
        return {step: reason for step, reason in steps.items() if step <= self._suspect_step}

    def event(self) -> dict[str, Any]:
        """Return the record for events.jsonl."""
        to = self.found.manifest.step
        record = {"event": "rolled back", "step": self.step, "to": to, "reason": self.reason}
        given_up = [path.name for path in self.found.refused]
        return record | ({"given_up": given_up} if self.is_older else {})

    def __str__(self) -> str:
        back = f"step {self.step}: {self.reason}: back to step {self.found.manifest.step}"
        if not self.is_older:
            return f"{back}, leaving it out"
        names = listing(path.name for path in self.found.refused)
        return (
            f"{back}, to an older checkpoint: training failed {MOST_ROLLBACKS + 1} times from the "
            f"weights in {names}, which may be damaged although their hashes match. The steps "
            f"after step {self._suspect_step} are trained again"
        )


class Rollbacks:
    """The checkpoints that a run went back to."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._tries: Counter[int] = Counter()
        """Rollbacks by the number of updates that the weights have had."""

    def load(
        self, step: int, reason: str, checkpoints: Checkpoints, config: Config, home: HostModel
    ) -> Rollback:
        """Fill `home` from the newest checkpoint whose weights are worth a try: `step` failed.

        Raises NonFiniteStep if there is none.
        """
        found = resume(checkpoints.folder, config, home, self._ranks, wants=self._may_try)
        if found is None:
            tried = f" that was not tried {MOST_ROLLBACKS} times" if self._tries else ""
            raise NonFiniteStep(
                f"step {step}: {reason}. There is no checkpoint to return to{tried}."
            )
        updates = _num_updates(found.known)
        self._tries[updates] += 1
        is_older = bool(found.refused) and self._tries[updates] == 1
        return Rollback(step=step, reason=reason, found=found, is_older=is_older)

    def _may_try(self, known: RunRecord) -> bool:
        return self._tries[_num_updates(known)] < MOST_ROLLBACKS


def _num_updates(known: RunRecord) -> int:
    """Return how often blocks were updated: steps that are left out save the same weights again."""
    return sum(known.num_updates.values())
