"""The saves of a run: when they happen, and their messages.

On schedule, when an evaluation is the best so far, when somebody asks, and at the end. The lines of
all steps are on stable storage before a save begins, so that a resume finds every one.

A disk that is full does not end a run. Old checkpoints make room as far as the keep rule allows; a
save that failed all the same is tried again as soon as there is room. At the end memory holds the
only copy of the last steps: the run then waits for space until it is stopped.

Storage that stalls does not end a run either: a file call that does not return makes the save fail
on all ranks, and it is tried again when the call has returned. At the end the run waits for that,
and each further try allows a call twice as long.

All ranks begin the same saves. Rank 0 alone looks at the disk, and decides for all.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatrain.config import Config
from megatrain.config.quantities import read_seconds
from megatrain.errors import DiskError, DiskFull, StorageTimeout
from megatrain.progress import Say
from megatrain.ranks.ranks import Ranks
from megatrain.run.checkpoints import Checkpoints
from megatrain.run.folder import RunFolder
from megatrain.run.interrupts import Interrupts, Requests

RETRY_S = 60.0
"""Time between two tries to save on a full disk."""
MOST_DOUBLINGS = 10
"""Doublings of the time that a file call may take, in tries at the end of a run."""
_POLL_S = 0.5


class Saving:
    """The saves of one run. `facts` returns the facts of the run for a checkpoint."""

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        checkpoints: Checkpoints,
        interrupts: Interrupts,
        facts: Callable[[], dict[str, Any]],
        ranks: Ranks,
    ) -> None:
        every = config.save.every
        self._every = every if isinstance(every, int) else None
        self._every_s = read_seconds(every) if isinstance(every, str) else None
        self._last_s = time.monotonic()
        """When the last save began."""
        self._interrupts = interrupts
        self._took_s: dict[str, float] = {}
        """Seconds that the last save and the last upload took."""
        self._keeps_best = config.keeps_best
        self._folder = folder
        self._checkpoints = checkpoints
        self._facts = facts
        self._ranks = ranks
        self.requests = Requests(
            ranks,
            interrupts,
            lambda: folder.save_was_asked() or self._should_retry() or self._is_time(),
            lambda: checkpoints.out is not None,
        )
        self._retry_at = 0.0
        self.pause: Callable[[float], None] = time.sleep
        """Called while the run waits for room or for storage."""
        self._said_trouble: str | None = None
        self.on_saved: Callable[[Path], None] = lambda checkpoint: None
        """Called when a checkpoint is complete."""
        self.best_is_new = False
        """Whether the last step's evaluation is the best so far."""
        self._is_late = False
        """Whether a save on schedule waits for a step that is not left out."""

    def if_due(self, step: int, say: Say, *, is_asked: bool = False, is_same: bool = False) -> None:
        """Begin to save the state after `step` if it is time, or asked for.

        `is_same`: the step was left out, so the weights are those of the step before. What is due
        waits for a step that changes them: `save.keep` copies of weights from which every step
        fails would push out the checkpoint that a rollback needs.
        """
        is_time = self._is_late or (self._every is not None and step % self._every == 0)
        self._is_late = is_time and is_same
        is_time = is_time and not is_same
        is_best = self._keeps_best and self.best_is_new
        self.best_is_new = False
        if is_time or is_best or is_asked or self.requests.save():
            self._begin(step)
        self.report(say)

    def _is_time(self) -> bool:
        return self._every_s is not None and time.monotonic() - self._last_s >= self._every_s

    def at_end(self, step: int, say: Say) -> None:
        """Save and wait for it: there is no later save to make up for this one.

        Waits for room on a full disk and for storage that has stalled, unless the run was asked to
        end. Another failure is tried once more.
        """
        num_failed = 0
        while True:
            self._begin(step, patience=2 ** min(num_failed, MOST_DOUBLINGS))
            self._checkpoints.engine.synchronize()
            self.wait()
            self.report(say)
            if self._checkpoints.saved_step == step:
                self._ranks.long_work(lambda: self._finish_uploads(say))
                return
            self._checkpoints.last_step = None
            num_failed += 1
            if num_failed == 1:
                self._retry_at = 0.0  # the first time at once
            if self._checkpoints.was_full or self._checkpoints.was_stalled:
                if not self._waited(step, say):
                    return
            elif num_failed > 1:
                return

    def wait(self) -> None:
        """Wait for the active save, with all ranks. Raises only bugs."""
        self._ranks.long_work(self._checkpoints.wait)

    def _waited(self, step: int, say: Say) -> bool:
        """Wait until another try is worth while; False if the run was asked to end."""
        self.requests.ask()
        if self.requests.stop is not None:
            return False
        if self._all_should_retry():
            return True
        waits_for = (
            f"Waiting for space in {self._folder.path}, retrying every {RETRY_S:.0f} s"
            if self._checkpoints.was_full
            else "Waiting until storage answers again"
        )
        say(f"the state after step {step} is in memory only. {waits_for}; Ctrl-C discards it")
        while self.requests.stop is None:
            self.pause(_POLL_S)
            if self._all_should_retry():
                return True
            self.requests.ask()
        return False

    def _all_should_retry(self) -> bool:
        """Return whether rank 0 finds that a save should be tried again now."""
        return bool(self._ranks.decide(self._should_retry))

    def _should_retry(self) -> bool:
        """Return whether a save that failed for want of room or of answers should be tried again.

        The state of storage on other ranks is that of the last requests.
        """
        checkpoints = self._checkpoints
        if time.monotonic() < self._retry_at:
            return False
        if checkpoints.was_stalled:
            return checkpoints.out is None and not self.requests.storage_stalled
        if not checkpoints.was_full:
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
            if saved.path is not None:
                self._learn("save", saved.seconds)
                self.on_saved(saved.path)
                if self._folder.uploads is not None:
                    self._folder.uploads.add(saved.path)
            if saved.full:  # at once if an old one was deleted for it
                self._retry_at = time.monotonic() + (0.0 if saved.deleted else RETRY_S)
            if saved.stalled:
                self._retry_at = time.monotonic() + RETRY_S
        self._report_uploads(say)
        self.report_trouble(say)

    def _report_uploads(self, say: Say) -> None:
        """Report and record uploads that have ended. Raises RunTaken."""
        for uploaded in [] if self._folder.uploads is None else self._folder.uploads.ended():
            say(str(uploaded))
            if uploaded.sent is not None:
                self._learn("upload", uploaded.seconds)
            self._folder.append("events.jsonl", uploaded.event())

    def _learn(self, what: str, seconds: float) -> None:
        """Take note how long a save or an upload takes: a step may go on until that is needed."""
        self._took_s[what] = seconds
        notice_s, uploads = self._interrupts.notice_s, self._folder.uploads
        if notice_s is not None and (uploads is None or "upload" in self._took_s):
            self._interrupts.needs_s = 2 * sum(self._took_s.values()) + notice_s / 4

    def _finish_uploads(self, say: Say) -> None:
        """Wait until the bucket has what was saved; report what it has not."""
        if (uploads := self._folder.uploads) is None:
            return
        if pending := uploads.pending:
            say(f"waiting until {uploads.url} has {pending[-1]}; Ctrl-C leaves it on this machine")
        if not uploads.wait(self._interrupts.left_s) and (pending := uploads.pending):
            say(
                f"NOT uploaded: {pending[-1]} is in {self._folder.path} alone. The same command "
                "with --resume on this machine uploads it"
            )
        self._report_uploads(say)

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

    def _begin(self, step: int, patience: int = 1) -> None:
        """Begin to save the state after the last step, unless that was done."""
        if self._checkpoints.last_step == step:
            return
        self._last_s = time.monotonic()
        lines, failure = self._prepared()
        if lines is None:
            assert failure is not None
            self._checkpoints.give_up(step, failure)
            return
        self._checkpoints.begin(step, {**self._facts(), "lines": lines}, patience)

    def _prepared(self) -> tuple[dict[str, int] | None, Exception | None]:
        """Make room for a save, on rank 0; return the length of the lines, or what went wrong."""
        lines, failure = self._ranks.long_work(self._look_at_disk)
        facts = {
            "lines": lines,
            "error": None if failure is None else str(failure),
            "full": isinstance(failure, DiskFull),
            "out": self._checkpoints.out,
        }
        heard = self._ranks.agree(facts)
        for rank, one in enumerate(heard):
            if one["out"] is not None:
                return None, StorageTimeout(f"rank {rank}: {one['out']}")
        said = heard[0]
        if failure is None and said["error"] is not None:
            failure = (DiskFull if said["full"] else DiskError)(said["error"])
        return said["lines"], failure

    def _look_at_disk(self) -> tuple[dict[str, int] | None, Exception | None]:
        self._checkpoints.wait()
        return self._ranks.on_first(self._made_room) or (None, None)

    def _made_room(self) -> tuple[dict[str, int] | None, Exception | None]:
        if self._checkpoints.out is not None:
            return None, None
        try:
            self._checkpoints.make_room()
            return self._lengths(), None
        except (DiskError, OSError) as error:
            return None, error

    def _lengths(self) -> dict[str, int]:
        """Return the length of the lines; if the disk is unexpectedly full, make space for them."""
        while True:
            try:
                return self._folder.lengths()
            except DiskFull:
                if not self._checkpoints.free_one():
                    raise
