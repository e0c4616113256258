"""The disturbed leg: a run that is killed, stopped, starved and resumed, and what it has lost.

Each life is a fork of this process that becomes `megatrain train CONFIG --resume`. After each life
every checkpoint with a manifest must verify, and the newest must be of the last acknowledged step
or a later one; the next life must begin there.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from megatrain.disk.checkpoint.restore import verify
from megatrain.disk.checkpoint.retention import finished
from megatrain.errors import CheckpointCorrupted
from megatrain.run.folder import FOLDER
from proofs.crash.forks import Child, Tell, be_megatrain
from proofs.soak.process import JumpingClock, take_device, tell_places
from testkit.memory_group import MemoryGroup

PATIENCE_S = 1800.0
"""For anything that should end: the machine may be busy."""


class DisturbedRun:
    """A run of many lives. `failures` gets what must not be."""

    def __init__(
        self, config: Path, run: Path, cache: Path, save_every: int, group: MemoryGroup | None
    ) -> None:
        self._config, self._cache, self._save_every = config, cache, save_every
        self.log, self.run = config.with_suffix(".log"), run
        self.group, self.clock = group, JumpingClock()
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self.most_repeated = 0
        """Steps that a resume had to take again."""
        self.disk_was_full = False
        """In this life, so that saves may have failed."""
        self._acknowledged = self._reached = 0
        self.begin()

    @property
    def checkpoints(self) -> Path:
        return self.run / FOLDER

    def begin(self) -> None:
        """Begin a life."""
        self.counts["lives"] += 1
        self.disk_was_full = False
        self.life = Child(self._live, self.log)

    def _live(self, tell: Tell) -> None:
        if self.group is not None:
            self.group.take_in(os.getpid())
        os.environ["MEGATRAIN_CACHE"] = str(self._cache)
        self.clock.take()
        take_device(self._config)
        tell_places(tell)
        be_megatrain(["train", str(self._config), "--resume"])

    def is_open(self) -> bool:
        """Wait until this life trains; False if it has ended."""
        return self._hears(lambda line: line.startswith("opened"))

    def reach(self, step: int) -> None:
        """Wait until a step is done; if this life has ended before, that is a failure."""
        if not self._hears(lambda line: _step(line) >= step):
            self.fail(f"did not reach step {step}")
            self.end(time.monotonic())
            self.begin()

    def await_save(self) -> None:
        """Wait until a save begins."""
        self.life.follow(lambda line: line.startswith("saving"), time.monotonic() + PATIENCE_S)

    def kill(self) -> None:
        """End this life at once."""
        self.end(0.0)

    def send(self, number: int) -> None:
        """Send a signal; not yet waited for, it is still ours."""
        os.kill(self.life.pid, number)

    def end(self, deadline: float) -> int:
        """Wait for the end of this life, kill it at the deadline, and judge what is left."""
        self.life.end(deadline)
        assert self.life.status is not None
        code = os.waitstatus_to_exitcode(self.life.status)
        self._judge()
        return code

    def finish(self, num_steps: int) -> None:
        """Let the run end by itself; then verify it by the command."""
        if (code := self.end(time.monotonic() + PATIENCE_S)) != 0 or self._reached != num_steps:
            self.fail(f"ended with {code} after step {self._reached}")
        check = Child(lambda tell: be_megatrain(["verify", str(self.run)]), self.log)
        check.end(time.monotonic() + PATIENCE_S)
        if check.status != 0:
            self.fail("megatrain verify finds damage")

    def close(self) -> None:
        """Leave no process behind."""
        if self.life.status is None:
            self.life.end(0.0)

    def last_step(self) -> int:
        """Return the last step that this life has told of."""
        return max(map(_step, self.life.lines), default=-1)

    def newest(self) -> int:
        """Return the step of the newest checkpoint, 0 without one; every one must verify."""
        newest = 0
        for path in finished(self.checkpoints):
            try:
                newest = max(newest, verify(path).step)
            except CheckpointCorrupted as error:
                self.counts["torn"] += 1
                self.fail(f"torn: {error}")
        return newest

    def fail(self, text: str) -> None:
        self.failures.append(f"life {self.counts['lives']}: {text}: {self._said()}")

    def _judge(self) -> None:
        """Compare what this life has told with what it found and with what it leaves."""
        opened = [int(line.split()[1]) for line in self.life.lines if line.startswith("opened")]
        if opened and opened[0] < self._acknowledged:
            self.counts["lost"] += 1
            self.fail(f"resumed from {opened[0]}, {self._acknowledged} was acknowledged")
        if opened and opened[0] > self._reached:
            self.fail(f"resumed from {opened[0]}, only {self._reached} steps had been taken")
        saved = [int(line.split()[1]) for line in self.life.lines if line.startswith("saved")]
        self._acknowledged = max([self._acknowledged, *saved])
        self._reached = max(self._reached, self.last_step())
        newest = self.newest()
        if newest < self._acknowledged:
            self.counts["lost"] += 1
            self.fail(f"step {self._acknowledged} was acknowledged, the newest is {newest}")
        if opened and not self.disk_was_full:
            self._judge_repeated(self.last_step() - newest)

    def _judge_repeated(self, repeated: int) -> None:
        """A save of each interval must be acknowledged before that of the next begins."""
        self.most_repeated = max(self.most_repeated, repeated)
        if repeated >= 2 * self._save_every:
            self.counts["lost"] += 1
            self.fail(f"{repeated} steps are lost, with a save every {self._save_every}")

    def _hears(self, wanted: Callable[[str], bool]) -> bool:
        deadline = time.monotonic() + PATIENCE_S
        return any(map(wanted, self.life.lines)) or self.life.follow(wanted, deadline)

    def _said(self) -> str:
        return self.log.read_text(errors="replace")[-600:] if self.log.exists() else ""


def _step(line: str) -> int:
    return int(line.split()[1]) if line.startswith("step ") else -1


def name_of(code: int) -> str:
    """Return how a process has ended, in a word or two."""
    return f"exit {code}" if code >= 0 else signal.Signals(-code).name
