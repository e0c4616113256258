"""SIGTERM with a notice, at random instants of a run whose steps are ten times as long as it.

    python -m proofs.notice --count 200 --json

A trial is a run in a bucket (a folder that stands for one) whose ops are slowed down, and one
SIGTERM. The process must have ended within the notice, and the bucket must have every step that was
complete. The run is then resumed on an empty machine and must
end in the bits of the one that nobody disturbed. Ends with 1 if one was late, lost or different.

`--spoil finish` takes the notice away from the engine, so that steps are finished: found late.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
import transformers.models.llama.modeling_llama  # children need not import it again

from megatrain.disk.remote.history import last_entry
from megatrain.engine.actions import StepActions
from megatrain.errors import Interrupted
from megatrain.lanes.lane import Action
from megatrain.memory.direct import as_memory
from megatrain.places import FolderPlace
from megatrain.run.interrupts import Interrupts
from megatrain.run.trainer import Trainer
from megatrain.step.ops import Op, OpKind
from proofs.crash.forks import Child, Tell
from testkit.printed import print_figures
from testkit.runs import Setting, config_of, state_of, write_world

NOTICE_S = 4.0
STEP_S = 10 * NOTICE_S
NUM_STEPS = 3
MOST_AT_ONCE = 25
"""They sleep most of the time."""
PATIENCE_S = 1200.0
MEMORY = Path("/dev/shm")
"""Where machines have their folders: what is on time is not a matter of this machine's disk."""
SETTING = Setting(save_every=1, keep=1, eval_every=None, micro_batches=True)
SLOWED = (OpKind.FORWARD, OpKind.BACKWARD)


def config(scratch: Path, bucket: Path, cache: Path) -> Any:
    os.environ["MEGATRAIN_CACHE"] = str(cache)
    return config_of(
        scratch,
        bucket,
        SETTING,
        train={"steps": NUM_STEPS, "micro_batch_tokens": 32, "batch_tokens": 192},
        data={"max_length": 32},
        eval={"every": None, "samples": 0},
        save={"dir": f"file://{bucket}", "notice": NOTICE_S},
    )


def train(
    scratch: Path, bucket: Path, cache: Path, pause_s: float, spoil: str | None, tell: Tell
) -> None:
    """Train with slow ops; tell the steps that are complete, and the bits at the end."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    _slow_down(pause_s)
    with (
        Interrupts() as interrupts,
        Trainer(config(scratch, bucket, cache), interrupts=interrupts) as trainer,
    ):
        if spoil == "finish":
            trainer.engine.should_abort = lambda: False
            interrupts.notice_s = None
        tell(f"opened {trainer.state.global_step}")
        append = trainer.folder.append

        def told(name: str, record: Any) -> None:
            append(name, record)
            if name == "metrics.jsonl":
                tell(f"step {record['step']}")

        trainer.folder.append = told  # type: ignore[method-assign]
        try:
            trainer.train(resume_from_checkpoint=True)
        except Interrupted:
            return
        found = hashlib.sha256()
        for _, value in sorted(state_of(trainer).items(), key=lambda item: str(item[0])):
            found.update(as_memory(value.contiguous().view(-1).view(torch.uint8)))
        tell(f"end {found.hexdigest()}")


def _slow_down(pause_s: float) -> None:
    table = StepActions.table

    def slow(act: Action, op: Op) -> int | None:
        time.sleep(pause_s)
        return act(op)

    def slowed(self: StepActions) -> dict[OpKind, Action]:
        found = table(self)
        return found | {kind: functools.partial(slow, found[kind]) for kind in SLOWED}

    if pause_s:
        StepActions.table = slowed  # type: ignore[method-assign]


class Trials:
    def __init__(self, scratch: Path, spoil: str | None) -> None:
        self._scratch, self._spoil, self._log = scratch, spoil, scratch / "log"
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self.slowest_s = 0.0
        first = Child(lambda tell: write_world(scratch), self._log)
        first.end(time.monotonic() + PATIENCE_S)
        whole = self._start("whole", scratch / "cache", 0.0)
        whole.end(time.monotonic() + PATIENCE_S)
        self.expected = (whole.lines or [""])[-1]
        assert self.expected.startswith("end "), self._log.read_text()[-2000:]
        self._forget_runs()
        # Blocks of two layers and the embedding, there and back, for each micro-batch.
        self.pause_s = STEP_S / (6 * 3 * 2)

    def _start(self, name: str, cache: Path, pause_s: float) -> Child:
        bucket = self._scratch / name

        def work(tell: Tell) -> None:
            if not pause_s:
                os.nice(5)  # beside others, which must end in time
            train(self._scratch, bucket, cache, pause_s, self._spoil if pause_s else None, tell)

        return Child(work, self._log)

    def round(self, numbers: range) -> None:
        """Disturb some runs at the same time."""
        children, at = {}, {}
        for number in numbers:
            cache = self._scratch / f"machine-{number}"
            shutil.copytree(self._scratch / "cache", cache)  # its rows are prepared
            children[number] = self._start(f"run-{number}", cache, self.pause_s)
        for number, child in children.items():
            child.follow(lambda line: line.startswith("opened"), time.monotonic() + PATIENCE_S)
            draw = random.Random(f"trial {number}")
            at[number] = time.monotonic() + draw.random() * (NUM_STEPS - 0.5) * STEP_S
        for number in sorted(at, key=lambda one: at[one]):
            while (left := at[number] - time.monotonic()) > 0:
                time.sleep(min(left, 0.05))
            self._disturb(number, children[number])
            children[number] = self._start(f"run-{number}", self._scratch / "cache", 0.0)
        for number, child in children.items():
            self._compare(number, child)
        self._forget_runs()

    def _forget_runs(self) -> None:
        """Let the machine of those that are not disturbed have nothing but rows."""
        shutil.rmtree(self._scratch / "cache" / "megatrain" / "runs")

    def _disturb(self, number: int, child: Child) -> None:
        """Send the signal and wait for the end, which must come in time."""
        child.follow(lambda line: False, time.monotonic() + 0.01)  # what it has told so far
        complete = [int(line.split()[1]) for line in child.lines if line.startswith("step ")]
        sent = time.monotonic()
        with suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGTERM)
        while os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if time.monotonic() - sent > 4 * STEP_S:
                break
            time.sleep(0.005)
        took_s = time.monotonic() - sent
        child.end(time.monotonic() + 1.0)
        self.counts["notices"] += 1
        self.slowest_s = max(self.slowest_s, took_s)
        if took_s > NOTICE_S:
            self.counts["late"] += 1
            self.failures.append(f"trial {number}: ended after {took_s:.2f} s")
        last = last_entry(FolderPlace(self._scratch / f"run-{number}"))
        saved = last.live[0].step if last is not None and last.live else 0
        self.counts[f"saved step {saved}"] += 1
        self.counts["released"] += last is not None and last.kind == "release"
        if saved < max(complete, default=0):
            self.counts["lost"] += 1
            self.failures.append(
                f"trial {number}: step {complete[-1]} was complete, {saved} is safe"
            )

    def _compare(self, number: int, child: Child) -> None:
        """Wait for the end of a run that continued on an empty machine, and compare it."""
        child.end(time.monotonic() + PATIENCE_S)
        self.counts["resumes"] += 1
        if child.lines[-1:] != [self.expected]:
            self.counts["different"] += 1
            self.failures.append(f"trial {number}: {child.lines[-1:]} is not {self.expected}")
        for name in (f"run-{number}", f"machine-{number}"):
            shutil.rmtree(self._scratch / name, ignore_errors=True)


def run(scratch: Path, count: int, *, tell: bool, spoil: str | None) -> dict[str, Any]:
    """Send `count` signals; return what was found."""
    torch.set_num_threads(1)
    began, trials = time.monotonic(), Trials(scratch, spoil)
    for first in range(0, count, MOST_AT_ONCE):
        trials.round(range(first, min(first + MOST_AT_ONCE, count)))
        if tell:
            print(f"{time.monotonic() - began:.0f} s: {dict(trials.counts)}", flush=True)
    keys = ("notices", "late", "lost", "different", "resumes", "released")
    more = {key: trials.counts[key] for key in sorted(trials.counts) if key.startswith("saved")}
    return {
        "what": "notice",
        **{key: trials.counts[key] for key in keys},
        **more,
        "notice_s": NOTICE_S,
        "step_s": STEP_S,
        "slowest_s": round(trials.slowest_s, 2),
        "seconds": round(time.monotonic() - began, 1),
        "failures": trials.failures,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=200, help="how many signals")
    parser.add_argument("--spoil", choices=["finish"], help="what to break")
    parser.add_argument(
        "--scratch", type=Path, default=MEMORY if MEMORY.is_dir() else None, help="where to work"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="megatrain-notice-", dir=options.scratch) as scratch:
        result = run(Path(scratch), options.count, tell=not options.json, spoil=options.spoil)
    print_figures(result, as_json=options.json)
    sys.exit(bool(result["failures"]))


if __name__ == "__main__":
    main()
