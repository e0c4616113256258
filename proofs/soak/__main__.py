"""A long run with a day's faults: nothing is lost, every bit is right, memory stays flat.

    python -m proofs.soak --steps 10000 --json
    python -m proofs.soak --steps 10000 --parts pages bucket --json

Two legs take the same steps of `megatrain train` side by side: a Llama of 31k parameters with
dropout, packed rows, a save every 20 steps, an evaluation with a sample every 2.5 % of them. Parts
make it a mixture in pages, a run in a bucket, or both (world.py).

    undisturbed   one process; its memory, threads, open files and children are watched (flat.py)
    disturbed     about 1 fault per 60 steps, of 8 kinds, at steps and instants drawn from a seed
                  (faults.py); each life is a fork of a process that has imported everything

At the end every file of the last checkpoint, the exported model, the state of the run, and each
line of metrics and samples, except times, must be the same in both; a bucket must have the last
checkpoint and the model. Ends with 1 if anything was torn, lost or different, or if memory grew.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from proofs.crash.forks import Child, Tell
from proofs.crash.power_loss import LoopDisk
from proofs.signals import end_of
from proofs.soak import flat, world
from proofs.soak.disturbed import PATIENCE_S, DisturbedRun
from proofs.soak.faults import FULL_STEPS, Ballast, dealt, faults_of
from proofs.soak.world import SAVE_EVERY
from testkit.memory_group import MemoryGroup, memory_groups
from testkit.printed import print_figures

STEPS_PER_FAULT = 60
LEAST_FAULTS = 8
LONGEST_S = 86400.0
LEAST_FLAT_STEPS = 2000
"""In fewer steps memory is reported and not judged: allocators have not settled."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--parts", nargs="*", choices=world.PARTS, default=[])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scratch", type=Path, help="where to work; a disk, not memory")
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="megatrain-soak-", dir=options.scratch) as scratch,
        ExitStack() as stack,
    ):
        result = play(
            Path(scratch), stack, options.steps, options.seed, tuple(options.parts),
            tell=not options.json,
        )  # fmt: skip
    print_figures(result, as_json=options.json)
    sys.exit(bool(result["failures"]))


def play(
    scratch: Path,
    stack: ExitStack,
    num_steps: int,
    seed: int,
    parts: tuple[str, ...],
    *,
    tell: bool,
) -> dict[str, Any]:
    """Play both legs and compare them."""
    began = time.monotonic()
    os.environ["MEGATRAIN_CACHE"] = str(scratch / "cache")
    undisturbed = Undisturbed(scratch, num_steps, parts)
    stack.callback(undisturbed.close)
    skipped: dict[str, str] = {}
    folder = _small_disk(scratch, stack, skipped)
    group = _memory_group(stack, skipped)
    _import_late_modules()
    config, place = world.config_in(scratch, folder, "run", num_steps, parts)
    run = DisturbedRun(config, place, scratch / "cache", SAVE_EVERY, group)
    stack.callback(run.close)
    ballast = None if "full disk" in skipped else Ballast(folder)
    outcomes = _disturb(run, ballast, num_steps, seed, tell=tell)
    run.finish(num_steps)
    found = undisturbed.end()
    ended, expected = end_of(run.run), end_of(undisturbed.run)
    different = [name for name in expected if ended[name] != expected[name]]
    failures = flat.too_much(found) if num_steps >= LEAST_FLAT_STEPS else []
    failures += run.failures + [f"other bits: {name}" for name in different]
    if "bucket" in parts:
        failures += world.missing_in_bucket(folder / "run", run.run, num_steps)
    return {
        "steps": num_steps,
        "parts": parts,
        "seed": seed,
        "faults": sum(outcomes.values()),
        "lives": run.counts["lives"],
        "outcomes": dict(sorted(outcomes.items())),
        "skipped": skipped,
        "torn": run.counts["torn"],
        "lost": run.counts["lost"],
        "most_repeated": run.most_repeated,
        "bitwise": not different,
        "compared_lines": len(expected["metrics"]) + len(expected["samples"]),
        "undisturbed": found,
        "seconds": round(time.monotonic() - began, 1),
        "targets": flat.TARGETS,
        "failures": failures,
    }


class Undisturbed:
    """The undisturbed leg, beside the other one: its program, and a fork that watches it."""

    def __init__(self, scratch: Path, num_steps: int, parts: tuple[str, ...] = ()) -> None:
        """Write model and rows, begin, and wait until the data is prepared for both legs."""
        torch.set_num_threads(1)
        self._log = scratch / "log"
        writer = Child(lambda tell: world.write(scratch, parts), self._log)  # it begins threads
        writer.end(time.monotonic() + PATIENCE_S)
        config, self.run = world.config_in(scratch, scratch, "whole", num_steps, parts)

        def watch(tell: Tell) -> None:
            os.setpgid(0, 0)  # with the program
            tell(json.dumps(flat.watched(config, scratch / "cache", num_steps, tell)))

        self._watcher = Child(watch, self._log)
        self._watcher.follow(lambda line: line == "opened", time.monotonic() + PATIENCE_S)

    def end(self) -> dict[str, Any]:
        """Wait for its end; return how flat it was."""
        self._watcher.end(time.monotonic() + LONGEST_S)
        if self._watcher.status != 0:
            raise RuntimeError(f"the undisturbed leg failed: {self._log.read_text()[-2000:]}")
        found: dict[str, Any] = json.loads(self._watcher.lines[-1])
        return found

    def close(self) -> None:
        """Leave no process behind."""
        if self._watcher.status is None:
            with suppress(ProcessLookupError):
                os.killpg(self._watcher.pid, signal.SIGKILL)
            self._watcher.end(0.0)


def _disturb(
    run: DisturbedRun, ballast: Ballast | None, num_steps: int, seed: int, *, tell: bool
) -> Counter[str]:
    """Play the faults of a seed; return what became of them."""
    draw = random.Random(f"soak {seed}")
    faults = faults_of(run, ballast)
    names = dealt(sorted(faults), max(LEAST_FAULTS, num_steps // STEPS_PER_FAULT), draw)
    last = num_steps - FULL_STEPS - SAVE_EVERY  # a full disk has room again before the end
    outcomes: Counter[str] = Counter()
    for step, name in zip(sorted(draw.choices(range(1, last), k=len(names))), names, strict=True):
        run.reach(step)
        outcome = faults[name](run, draw)
        outcomes[f"{name}: {outcome}"] += 1
        if tell:
            print(f"step {step}: {name}: {outcome} {run.failures}", flush=True)
    return outcomes


def _small_disk(scratch: Path, stack: ExitStack, skipped: dict[str, str]) -> Path:
    """Return a folder on a small file system that only this process sees, if one can be had."""
    try:
        disk = LoopDisk(scratch)
    except (OSError, subprocess.CalledProcessError) as error:
        skipped["full disk"] = f"no file system can be mounted here: {error}"
        return scratch
    stack.callback(disk.close)
    disk.mount()
    return disk.mount_point


def _memory_group(stack: ExitStack, skipped: dict[str, str]) -> MemoryGroup | None:
    parent = memory_groups()
    if parent is None:
        skipped["memory"] = "no control group for memory can be made here"
        return None
    return stack.enter_context(MemoryGroup(parent))


def _import_late_modules() -> None:
    """Import what a run imports late, before any fork."""
    for name in ("pandas", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        with suppress(ImportError):  # a run imports them, if they are there
            import_module(name)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    assert threading.active_count() == 1, "only a lone thread may fork"


if __name__ == "__main__":
    main()
