"""Going back to the last checkpoint, a few times at most."""

from __future__ import annotations

from megatrain.config import Config
from megatrain.disk.hf.model import HostModel
from megatrain.errors import NonFiniteStep
from megatrain.ranks.ranks import Ranks
from megatrain.run.checkpoints import Checkpoints
from megatrain.run.opening.resumption import LoadedCheckpoint, resume

MOST_ROLLBACKS = 3
"""From one checkpoint: more would mean that something else is wrong."""


class Rollbacks:
    """Which checkpoints a run went back to."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._steps: list[int] = []

    def load(
        self, step: int, reason: str, checkpoints: Checkpoints, config: Config, home: HostModel
    ) -> LoadedCheckpoint:
        """Fill `home` from the newest checkpoint, because `step` failed.

        Raises NonFiniteStep if there is none, or it was tried too often.
        """
        found = resume(checkpoints.folder, config, home, self._ranks)
        if found is None or self._steps.count(found.manifest.step) == MOST_ROLLBACKS:
            raise NonFiniteStep(
                f"step {step}: {reason}. There is no checkpoint to return to"
                + (f" that was not tried {MOST_ROLLBACKS} times." if found else ".")
            )
        self._steps.append(found.manifest.step)
        return found
