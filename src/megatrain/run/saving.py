"""The saves of a run: when they happen, and their messages.

On schedule, when an evaluation is the best so far, when somebody asks, and at the end. The lines of
all steps are on stable storage before a save begins, so that a resume finds every one.

A disk that is full does not end a run. Old checkpoints make room as far as the keep rule allows; a
save that failed all the same is tried again as soon as there is room. At the end memory holds the
only copy of the last steps: the run then waits for space until it is stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from megatrain.config import Config
from megatrain.engine.engine import Engine
from megatrain.errors import DiskError, DiskFull
from megatrain.progress import Say
from megatrain.run.checkpoints import Checkpoints
from megatrain.run.folder import RunFolder
from megatrain.run.interrupts import Interrupts

RETRY_S = 60.0
"""Between two tries to save on a full disk."""
_POLL_S = 0.5


class Saving:
    """The saves of one run. `facts` returns what a checkpoint knows of the run besides tensors."""

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        checkpoints: Checkpoints,
        engine: Engine,
        interrupts: Interrupts,
        facts: Callable[[], dict[str, Any]],
    ) -> None:
        self._every, self._keeps_best = config.save.every, config.keeps_best
        self._folder, self._checkpoints, self._engine = folder, checkpoints, engine
        self._interrupts, self._facts = interrupts, facts
        self._retry_at = 0.0
        self.pause: Callable[[float], None] = time.sleep
        """What to do while waiting for room."""
        self._said_trouble: str | None = None
        self.best_is_new = False
        """Whether the last step's evaluation is the best so far."""

    def if_due(self, step: int, say: Say) -> None:
        """Begin to save the state after `step` if it is time."""
        is_time = self._every is not None and step % self._every == 0
        is_best = self._keeps_best and self.best_is_new
        self.best_is_new = False
        if is_time or is_best or self._folder.save_was_asked() or self._has_room_again():
            self._begin(step)
        self.report(say)

    def at_end(self, step: int, say: Say) -> None:
        """Save and wait for it: there is no later save to make up for this one.

        Waits for room on a full disk, unless the run was asked to end. Another failure is tried
        once more.
        """
        num_failed = 0
        while True:
            self._begin(step)
            self._engine.settle()
            self._checkpoints.wait()
            self.report(say)
            if self._checkpoints.saved_step == step:
                return
            self._checkpoints.last_step = None
            num_failed += 1
            if num_failed == 1:
                self._retry_at = 0.0  # the first time at once
            if self._checkpoints.was_full:
                if not self._waited_for_room(step, say):
                    return
            elif num_failed > 1:
                return

    def _waited_for_room(self, step: int, say: Say) -> bool:
        """Wait until another try is worth while; False if the run was asked to end."""
        if self._interrupts.reason is not None:
            return False
        if self._has_room_again():
            return True
        say(
            f"the state after step {step} is in memory only. Waiting for space in "
            f"{self._folder.path}, retrying every {RETRY_S:.0f} s; Ctrl-C discards it"
        )
        while self._interrupts.reason is None:
            self.pause(_POLL_S)
            if self._has_room_again():
                return True
        return False

    def _has_room_again(self) -> bool:
        """Return whether a save that failed on a full disk should be tried again now."""
        if not self._checkpoints.was_full or time.monotonic() < self._retry_at:
            return False
        try:
            self._checkpoints.make_room()
        except (DiskError, OSError):
            self._retry_at = time.monotonic() + RETRY_S
            return False
        return True

    def report(self, say: Say) -> None:
        """Report and record the saves that have ended, and whether lines wait for the disk."""
        for saved in self._checkpoints.ended():
            say(str(saved))
            self._folder.append("events.jsonl", saved.event())
            if saved.full:  # at once if an old one was deleted for it
                self._retry_at = time.monotonic() + (0.0 if saved.deleted else RETRY_S)
        self.report_trouble(say)

    def report_trouble(self, say: Say) -> None:
        """Report once that lines wait for the disk, and once that they no longer do."""
        trouble, reported = self._folder.trouble, self._said_trouble
        if (trouble is None) != (reported is None):
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
            self._checkpoints.make_room()
            lines = self._lengths()
        except (DiskError, OSError) as error:
            self._checkpoints.give_up(step, error)
            return
        self._checkpoints.begin(step, {**self._facts(), "lines": lines})

    def _lengths(self) -> dict[str, int]:
        """Return the length of the lines; if the disk is unexpectedly full, make space for them."""
        while True:
            try:
                return self._folder.lengths()
            except DiskFull:
                if not self._checkpoints.free_one():
                    raise
