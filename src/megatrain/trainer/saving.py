"""When a run saves, and what it says of it.

On schedule, when an evaluation is the best so far, when somebody asks, and at the end. The lines of
all steps are on stable storage before a save begins, so that a resume finds every one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatrain.config import Config
from megatrain.errors import DiskError
from megatrain.pipeline.engine import Engine
from megatrain.trainer.checkpoints import Checkpoints
from megatrain.trainer.run_folder import RunFolder

Say = Callable[[str], None]


class Saving:
    """The saves of one run. `facts` returns what a checkpoint knows of the run besides tensors."""

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        checkpoints: Checkpoints,
        engine: Engine,
        facts: Callable[[], dict[str, Any]],
    ) -> None:
        self._every, self._keeps_best = config.save.every, config.keeps_best
        self._folder, self._checkpoints, self._engine = folder, checkpoints, engine
        self._facts = facts
        self._said_trouble: str | None = None
        self.best_is_new = False
        """Whether the last step's evaluation is the best so far."""

    def if_due(self, step: int, say: Say) -> None:
        """Begin to save the state after `step` if it is time."""
        is_time = self._every is not None and step % self._every == 0
        is_best = self._keeps_best and self.best_is_new
        self.best_is_new = False
        if is_time or is_best or self._folder.save_was_asked():
            self._begin(step)
        self.report(say)

    def at_end(self, step: int, say: Say) -> None:
        """Save and wait for it; once more if it failed, for there is no later one to make up."""
        for _ in range(2):
            self._begin(step)
            self._engine.settle()
            self._checkpoints.wait()
            self.report(say)
            if self._checkpoints.saved_step == step:
                return
            self._checkpoints.last_step = None

    def report(self, say: Say) -> None:
        """Say and record which saves have ended, and whether lines wait for the disk."""
        for saved in self._checkpoints.ended():
            say(str(saved))
            self._folder.append("events.jsonl", saved.event())
        self.report_trouble(say)

    def report_trouble(self, say: Say) -> None:
        """Say once that lines wait for a disk, and once that they no longer do."""
        trouble, said = self._folder.trouble, self._said_trouble
        if (trouble is None) != (said is None):
            say(
                "metrics and events are on disk again"
                if trouble is None
                else f"{trouble}. Training continues; metrics and events wait in memory."
            )
        self._said_trouble = trouble

    def _begin(self, step: int) -> None:
        """Begin to save the state after the last step, unless that was done."""
        if self._checkpoints.last_step == step:
            return
        try:
            lines = self._folder.lengths()
        except (DiskError, OSError) as error:
            self._checkpoints.give_up(step, error)
            return
        self._checkpoints.begin(step, {**self._facts(), "lines": lines})
