"""Send signals to `megatrain train` at random instants; resume; compare the end bit for bit.

    python -m proofs.signals --count 200 --seed 0 --json

Each trial is a training run of 31k parameters that saves every second step, in a process forked
from one that has imported everything. It gets SIGTERM, SIGINT or SIGHUP, one or two of them, at an
instant drawn from its whole life, from its load, or from one of its saves. It must end with 130,
soon, or have been through; then it is resumed, perhaps signaled again, and at last left alone.

    in_time            trials that ended within LATEST_S of their last signal, with the right code
    bitwise            trials whose end has the bits of the run that was never signaled: all files
                       of the last checkpoint, the exported model, state of the run, all lines
    at                 where signals met the run; `late` is when it was through already
    max_seconds        the longest from the last signal to the end, by number of signals

Trial number i of a seed draws the same instants; what they meet depends on the machine.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from megatrain.config import dump_config
from megatrain.disk.checkpoint.manifest import read_manifest
from megatrain.disk.checkpoint.restore import verify
from megatrain.disk.checkpoint.retention import finished
from megatrain.run import checkpoints
from megatrain.run.folder import FOLDER
from megatrain.run.interrupts import SIGNALS, Interrupts
from megatrain.run.trainer import Trainer
from proofs.crash.forks import be_megatrain
from testkit.printed import print_figures
from testkit.runs import Setting, config_of, lines_of, write_world

LATEST_S = 120.0
"""A whole tiny run takes a second; but the machine may be busy."""
PREPARE_S = 3.0
"""What the child process for a chat template takes, about."""
MOST_SIGNALED = 3
"""Runs of one trial that are signaled, before one is left alone."""
SETTING = Setting(dropout=0.1, best=True, keep=2)


def main() -> None:
    """Run the trials; end with 1 if any has failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="number of the first trial")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    options = parser.parse_args()
    torch.set_num_threads(1)  # and no thread of ours: children are forked
    scratch = Path(tempfile.mkdtemp(prefix="megatrain-signals-"))
    try:
        result = Trials(scratch, options.seed).play(options.first, options.count)
    finally:
        shutil.rmtree(scratch)
    print_figures(result, as_json=options.json)
    sys.exit(bool(result["failures"]))


@dataclass(slots=True, kw_only=True)
class Child:
    """A forked `megatrain train` that tells where it is by letters in a pipe.

    `r` listens to signals, `t` trains, `s` and `e` begin and end of a save, `x` is through
    """

    pid: int
    pipe: int
    told: str = ""
    began: float = field(default_factory=time.monotonic)

    @classmethod
    def start(cls, config: Path, cache: Path, *, resume: bool) -> Child:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            words = ["train", str(config)] + ["--resume"] * resume
            _be_megatrain(words, cache, config.with_suffix(".log"), writing)
        os.close(writing)
        return cls(pid=pid, pipe=reading)

    def wait_for(self, letter: str, times: int, until: float) -> bool:
        """Wait until a letter was told so often; False if the child or the time ended before."""
        while self.told.count(letter) < times:
            left = until - time.monotonic()
            if left <= 0 or not select.select([self.pipe], [], [], left)[0]:
                return False
            data = os.read(self.pipe, 64)
            if not data:
                return False
            self.told += data.decode()
        return True

    def place(self) -> str:
        """Return where the child is, as far as it has told."""
        while select.select([self.pipe], [], [], 0)[0] and (data := os.read(self.pipe, 64)):
            self.told += data.decode()
        if "x" in self.told:
            return "late"
        if self.told.count("s") > self.told.count("e"):
            return "save"
        return "training" if "t" in self.told else "load"

    def send(self, number: int, *, to_all: bool) -> None:
        """Signal it; to all of its processes, as a terminal does."""
        (os.killpg if to_all else os.kill)(self.pid, number)  # not yet waited for: still its own

    def end(self, until: float) -> int | None:
        """Return the exit code, negative for a signal; None if it had to be killed."""
        self.wait_for("never", 1, until)
        while (gone := os.waitpid(self.pid, os.WNOHANG))[0] == 0:
            if time.monotonic() > until:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                os.close(self.pipe)
                return None
            time.sleep(0.001)
        os.close(self.pipe)
        return os.waitstatus_to_exitcode(gone[1])


def _be_megatrain(words: list[str], cache: Path, log: Path, pipe: int) -> None:
    """Be the command line until it ends; tell the parent where it is."""
    os.setpgid(0, 0)
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.environ["MEGATRAIN_CACHE"] = str(cache)
    _tell_places(pipe)
    be_megatrain(words)


def _tell_places(pipe: int) -> None:
    """Let the run write a letter at each place the parent aims at."""
    enter, leave, train = Interrupts.__enter__, Interrupts.__exit__, Trainer.train
    save = vars(checkpoints)["save_checkpoint"]

    def telling_enter(self: Interrupts) -> Any:
        result = enter(self)
        os.write(pipe, b"r")
        return result

    def telling_leave(self: Interrupts, *error: Any) -> None:
        os.write(pipe, b"x")
        leave(self, *error)

    def telling_train(self: Trainer, **options: Any) -> Any:
        os.write(pipe, b"t")
        return train(self, **options)

    def telling_save(*args: Any, **names: Any) -> Any:
        os.write(pipe, b"s")
        try:
            return save(*args, **names)
        finally:
            os.write(pipe, b"e")

    Interrupts.__enter__ = telling_enter  # type: ignore[method-assign]
    Interrupts.__exit__ = telling_leave  # type: ignore[method-assign]
    Trainer.train = telling_train  # type: ignore[method-assign, assignment]
    vars(checkpoints)["save_checkpoint"] = telling_save


class Trials:
    """Many trials against one run that was left alone."""

    def __init__(self, scratch: Path, seed: int) -> None:
        self._scratch, self._seed = scratch, seed
        self._world, self._cache = scratch / "world", scratch / "cache"
        for name in ("pandas", "matplotlib.figure", "matplotlib.backends.backend_agg"):
            with suppress(ImportError):  # a run imports them, if they are there
                import_module(name)
        self._world.mkdir()
        write_world(self._world)
        self._at: Counter[str] = Counter()
        self._max_s = {1: 0.0, 2: 0.0}
        self.failures: list[str] = []
        for name in ("warm", "whole"):
            child = Child.start(self._config(scratch / name), self._cache, resume=False)
            assert child.wait_for("t", 1, time.monotonic() + 300)
            load_s = time.monotonic() - child.began
            assert child.end(time.monotonic() + 300) == 0, self._log(scratch / name)
            self._load_s, self._whole_s = load_s, time.monotonic() - child.began
        self._expected = end_of(scratch / "whole")

    def play(self, first: int, count: int) -> dict[str, Any]:
        """Play trials `first` to `first + count`."""
        in_time = bitwise = num_signaled = 0
        for number in range(first, first + count):
            faults, signaled = self._trial(number)
            in_time += not faults
            num_signaled += signaled
            try:
                same = end_of(self._scratch / str(number)) == self._expected
            except Exception as error:
                same = False
                faults.append(f"{type(error).__name__}: {error}")
            bitwise += same
            if faults or not same:
                told = "; ".join(faults) or "other bits"
                self.failures.append(f"trial {number}: {told}"[:2000])
            else:
                shutil.rmtree(self._scratch / str(number))
        return {
            "count": count,
            "seed": self._seed,
            "signaled_runs": num_signaled,
            "in_time": in_time,
            "bitwise": bitwise,
            "at": dict(self._at),
            "max_seconds": {str(key): round(value, 3) for key, value in self._max_s.items()},
            "run_seconds": round(self._whole_s, 3),
            "failures": self.failures,
        }

    def _trial(self, number: int) -> tuple[list[str], int]:
        """Signal a run once or more often, then let it end; return what was wrong."""
        draw = random.Random(f"signals {self._seed} {number}")
        run = self._scratch / str(number)
        config = self._config(run)
        # Now and then the data must be prepared too.
        prepares = draw.random() < 0.2
        cache = self._scratch / f"cache-{number}" if prepares else self._cache
        faults: list[str] = []
        num_signaled = draw.choice([1, 1, 2, MOST_SIGNALED])
        for attempt in range(num_signaled):
            child = Child.start(config, cache, resume=attempt > 0)
            if fault := self._signal(child, draw, prepares):
                faults.append(f"run {attempt}: {fault} {self._log(run)[-600:]}")
        child = Child.start(config, cache, resume=True)
        if (code := child.end(time.monotonic() + 300)) != 0:
            faults.append(f"the last resume ended with {code}: {self._log(run)[-600:]}")
        return faults, num_signaled

    def _signal(self, child: Child, draw: random.Random, prepares: bool) -> str | None:
        """Aim, signal, wait for the end; return what was wrong with it."""
        aim = draw.choice(["life", "load", "save", "save"])
        times, share, gap_s = draw.randrange(1, 5), draw.random(), draw.expovariate(1 / 0.03)
        to_all = draw.random() < 0.5
        numbers = [draw.choice(SIGNALS) for _ in range(draw.choice([1, 1, 2]))]
        until = time.monotonic() + 300
        if not child.wait_for("r", 1, until):
            return "it did not begin"
        if aim == "save":
            child.wait_for("s", times, until)
            time.sleep(share * 0.03)
        else:
            extra_s = PREPARE_S if prepares else 0.0
            life_s = self._load_s if aim == "load" else 1.1 * self._whole_s
            time.sleep(share * (life_s + extra_s))
        self._at[child.place()] += 1
        for place, number in enumerate(numbers):
            time.sleep(gap_s if place else 0)
            child.send(number, to_all=number != signal.SIGTERM and to_all)
            sent = time.monotonic()
        code = child.end(sent + LATEST_S)
        seconds = time.monotonic() - sent
        self._max_s[len(numbers)] = max(self._max_s[len(numbers)], seconds)
        names = ", ".join(signal.Signals(number).name for number in numbers)
        if code is None:
            return f"{names} at {aim}: not ended after {LATEST_S} s"
        through = "x" in child.told
        if code == 130 or (through and (code == 0 or -code in numbers)):
            return None
        return f"{names} at {aim} ({child.told}): ended with {code}"

    def _config(self, run: Path) -> Path:
        path = run.with_suffix(".yaml")
        path.write_text(dump_config(config_of(self._world, run, SETTING)))
        return path

    def _log(self, run: Path) -> str:
        return run.with_suffix(".log").read_text()


def end_of(run: Path) -> dict[str, Any]:
    """Return all that a run's end consists of, the clock apart."""
    newest = finished(run / FOLDER)[0]
    verify(newest)
    manifest = read_manifest(newest)
    training = {
        name: value
        for name, value in manifest.training.items()
        if name not in ("config", "lines")  # a line's length depends on its times
    }
    exported = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted((run / "model").iterdir())
    }
    return {
        "step": manifest.step,
        "files": dict(manifest.files),
        "training": training,
        "exported": exported,
        "metrics": lines_of(run),
        "samples": lines_of(run, "samples.jsonl"),
        "left": sorted(path.name for path in run.iterdir() if path.name.endswith(".tmp")),
    }


if __name__ == "__main__":
    main()
