"""`megatrain train` as a process that tells its steps, its saves and the size of its heap.

    python -m proofs.soak.process TOLD CONFIG STEP...   # appends to the file TOLD

    pid N               it begins
    opened N            it has resumed from step N, or begins at 0
    step N              a step is done
    heap N BLOCKS       after one of the steps that were asked for: what Python holds, all garbage
                        collected, in blocks of its allocator
    saving N, saved N   a save begins, and is acknowledged; `tidied`: older ones are deleted
    left                signals no longer ask it to save

The disturbed leg forks this instead of starting it, for imports take seconds.
"""

from __future__ import annotations

import gc
import os
import random
import struct
import sys
import time
from collections.abc import Collection
from importlib import import_module
from mmap import mmap
from pathlib import Path
from typing import Any

import torch

from megatrain.run.interrupts import Interrupts
from megatrain.run.trainer import Trainer
from proofs.crash.forks import Tell, be_megatrain
from proofs.crash.kills import announce_saves
from proofs.soak.world import DEVICE

FARTHEST_S = 10 * 365 * 86400.0


class JumpingClock:
    """A wall clock that one process sets for those that it forks.

    It stands behind `time.time` and `time.time_ns` of a fork that takes it. The monotonic clock
    stays: setting the wall clock does not move it.
    """

    def __init__(self) -> None:
        self._shared = mmap(-1, 8)

    def jump(self, draw: random.Random) -> float:
        """Set the clock back or forth, by a second or by years; return the seconds."""
        offset_s: float = draw.choice([-1, 1]) * FARTHEST_S ** draw.random()
        self._shared[:] = struct.pack("d", offset_s)
        return offset_s

    def take(self) -> None:
        """Let this process read it."""
        real_s, real_ns = time.time, time.time_ns
        vars(time)["time"] = lambda: real_s() + self._offset_s
        vars(time)["time_ns"] = lambda: real_ns() + int(1e9 * self._offset_s)

    @property
    def _offset_s(self) -> float:
        return float(struct.unpack("d", self._shared[:])[0])


def tell_places(tell: Tell, heap_after: Collection[int] = ()) -> None:
    """Let the run of this process tell where it is, and of its heap after these steps."""
    announce_saves(tell)
    train, take_step, leave = Trainer.train, Trainer._take_step, Interrupts.__exit__

    def telling_train(self: Trainer, **options: Any) -> Any:
        tell(f"opened {self.state.global_step}")
        return train(self, **options)

    def telling_step(self: Trainer, step: int) -> None:
        take_step(self, step)
        if step in heap_after:
            gc.collect()
            tell(f"heap {step} {sys.getallocatedblocks()}")
        tell(f"step {step}")

    def telling_leave(self: Interrupts, *error: Any) -> None:
        tell("left")
        leave(self, *error)

    Trainer.train = telling_train  # type: ignore[method-assign, assignment]
    Trainer._take_step = telling_step  # type: ignore[method-assign]
    Interrupts.__exit__ = telling_leave  # type: ignore[method-assign]


def take_device(config: Path) -> None:
    """Let this process have the device that a config names, if it is the one of the testkit."""
    if f"device: {DEVICE}" in config.read_text():
        import_module("testkit.host_gpu")


def main() -> None:
    """Train to the end."""
    told, config, *heap_after = sys.argv[1:]
    torch.set_num_threads(1)  # as in the forks
    take_device(Path(config))
    with Path(told).open("a", buffering=1) as file:
        file.write(f"pid {os.getpid()}\n")
        tell_places(lambda line: print(line, file=file), [int(step) for step in heap_after])
        be_megatrain(["train", config])


if __name__ == "__main__":
    main()
