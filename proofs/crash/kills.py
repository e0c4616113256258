"""SIGKILL at random instants of a run that saves often, resumed until it ends.

A chain is one run: it is killed some times, resumed each time, and at last let go to its end. The
instant is drawn from the whole life of the process (opening, resuming, steps, saves, deletes, exit)
or from the time after a save has begun. After each kill every folder with a manifest must verify,
and the newest must be of the last acknowledged step or a later one; the resume must take it. At the
end every tensor in memory and on disk, the data position, counts and judgements, and each line of
metrics and samples must be that of the run that nobody killed.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import itertools
import json
import os
import random
import shutil
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

from megatrain.disk.checkpoint.restore import verify
from megatrain.disk.checkpoint.retention import finished
from megatrain.errors import CheckpointCorrupted
from megatrain.memory.direct import as_memory
from megatrain.run import checkpoints
from megatrain.run.folder import FOLDER
from megatrain.run.opening import banner
from megatrain.run.trainer import Trainer
from proofs.crash.forks import Child, Tell, gather
from testkit.runs import Setting, config_of, lines_of, setting_of, state_of, write_world
from testkit.tiers import forced_tier

NUM_STEPS = 5
NUM_SETTINGS = 12
KILLS_PER_CHAIN = 6
NUM_JOBS = 6
"""Chains at a time: a run of threads waits more than it works."""
SAVE_SHARE = 0.4
"""Of kills that wait for a save to begin."""
SAVES = (1, 2)
"""Which save of a process that is."""
SAMPLE_TOKENS = 3
"""For time is better spent on kills."""
PATIENCE_S = 600.0


def run(scratch: Path, count: int, first: int, *, tell: bool, tier: bool = False) -> dict[str, Any]:
    """Kill `count` times or some more; return what was found. `tier`: states are on disk."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    num_settings = min(NUM_SETTINGS, 1 + count // KILLS_PER_CHAIN)
    world = World(scratch, num_settings, tier=tier)
    began = time.monotonic()
    num_jobs = min(NUM_JOBS, num_settings)
    share = -(-count // num_jobs)
    workers = [
        Child(functools.partial(world.work, share, first + job, num_jobs), scratch / "log")
        for job in range(num_jobs)
    ]
    counts: Counter[str] = Counter()
    failures: list[str] = []
    for line in gather(workers):
        counts.update(json.loads(line)["counts"])
        failures += json.loads(line)["failures"]
        if tell:
            print(f"{time.monotonic() - began:.0f} s: {dict(counts)} {failures}", flush=True)
    if any(worker.status != 0 for worker in workers):
        failures.append(f"a worker died: {(scratch / 'log').read_text()[-2000:]}")
    found = {key: counts[key] for key in ("kills", "resumes", "chains", "torn", "lost")}
    by_phase = {key: counts[key] for key in sorted(counts) if key.startswith("in ")}
    seconds = round(time.monotonic() - began, 1)
    return {"what": "sigkill", **found, **by_phase, "seconds": seconds, "failures": failures}


class World:
    """Models and rows, the runs that nobody killed, and what became of the others."""

    def __init__(self, scratch: Path, num_settings: int, *, tier: bool = False) -> None:
        self._scratch, self._log, self._tier = scratch, scratch / "log", tier
        self._life, self._save_seconds = 1.0, 0.1
        self._whole: dict[int, tuple[list[str], Path]] = {}
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self._let(lambda tell: write_world(scratch))
        # The data is then in the cache, and what a run imports late is here before any fork.
        warm = self._let(
            functools.partial(_train, scratch, scratch / "warm", setting(0, tier=tier), True)
        )
        for line in warm.lines:
            if line.startswith("imported "):
                with suppress(ImportError):
                    importlib.import_module(line.split()[1])
        assert threading.active_count() == 1, "only a lone thread may fork"
        for which in range(num_settings):
            folder = scratch / f"whole-{which}"
            kind = setting(which, tier=tier)
            child = self._let(functools.partial(_train, scratch, folder, kind, False))
            self._life = time.monotonic() - child.began
            self._whole[which] = [line for line in child.lines if line.startswith("end ")], folder

    def work(self, num_kills: int, number: int, stride: int, tell: Tell) -> None:
        """Kill so often, in every so many-th chain from `number` on; tell of each chain."""
        done = 0
        while done < num_kills and not self.failures:
            self.counts.clear()
            self.chain(number, KILLS_PER_CHAIN)
            done += self.counts["kills"]
            number += stride
            tell(json.dumps({"counts": self.counts, "failures": self.failures}))

    def chain(self, number: int, num_kills: int) -> None:
        """Kill one run `num_kills` times, or as often as it lives; compare its end."""
        draw = random.Random(f"chain {number}")
        which = number % len(self._whole)
        expected, whole = self._whole[which]
        folder = self._scratch / f"chain-{number}"
        acknowledged = 0
        child = None
        for _ in range(num_kills):
            child = self._start(which, folder)
            if not self._kill(child, draw):
                break
            acknowledged = self._judge(number, child, folder, acknowledged)
            child = None
        if child is None:
            child = self._start(which, folder)
            child.end(time.monotonic() + PATIENCE_S)
        self.counts["resumes"] += child.lines[:1] not in ([], ["opened 0"])
        self._compare(number, child, folder, expected, whole)
        self.counts["chains"] += 1
        if not self.failures:
            shutil.rmtree(folder)

    def _start(self, which: int, folder: Path) -> Child:
        kind = setting(which, tier=self._tier)
        return Child(lambda tell: _train(self._scratch, folder, kind, False, tell), self._log)

    def _kill(self, child: Child, draw: random.Random) -> bool:
        """Kill a child at a random instant; False if it had ended before."""
        deadline = child.began + draw.random() * self._life
        is_at_save = draw.random() < SAVE_SHARE
        if is_at_save:
            wanted = draw.choice(SAVES)
            seen = 0

            def is_it(line: str) -> bool:
                nonlocal seen
                seen += line.startswith("saving")
                return seen >= wanted

            child.follow(is_it, time.monotonic() + PATIENCE_S)
            deadline = time.monotonic() + draw.random() * self._save_seconds
        was_killed = child.end(deadline)
        self._learn(child)
        if not was_killed:
            self._life = 0.9 * (time.monotonic() - child.began)
            return False
        if not child.lines:
            self._life *= (
                1.05  # it was killed while it opened: this machine is slower than we think
            )
        self.counts["kills"] += 1
        self.counts[f"in {_phase(child.lines)}"] += 1
        return True

    def _learn(self, child: Child) -> None:
        """Take the time that saves take here."""
        told = list(zip(child.lines, child.times, strict=True))
        for (line, begin), (after, end) in itertools.pairwise(told):
            if line.startswith("saving") and after.startswith("saved"):
                self._save_seconds += 0.1 * (1.2 * (end - begin) - self._save_seconds)

    def _judge(self, number: int, child: Child, folder: Path, acknowledged: int) -> int:
        """Look at what a kill left; return the last acknowledged step."""
        opened = [int(line.split()[1]) for line in child.lines if line.startswith("opened")]
        self.counts["resumes"] += bool(opened and opened[0])
        if opened and opened[0] < acknowledged:
            self._fail(number, f"resumed from {opened[0]}, {acknowledged} was acknowledged")
        saved = [int(line.split()[1]) for line in child.lines if line.startswith("saved")]
        acknowledged = max([acknowledged, *saved])
        newest = 0
        for path in finished(folder / "run" / FOLDER):
            try:
                newest = max(newest, verify(path).step)
            except CheckpointCorrupted as error:
                self.counts["torn"] += 1
                self._fail(number, f"torn: {error}")
        if any(path.stat().st_size for path in self._scratch.glob(".megatrain-scratch*")):
            self._fail(number, "a scratch file was left behind")
        if newest < acknowledged:
            self.counts["lost"] += 1
            self._fail(number, f"step {acknowledged} was acknowledged, the newest is {newest}")
        return acknowledged

    def _compare(
        self, number: int, child: Child, folder: Path, expected: list[str], whole: Path
    ) -> None:
        if child.status != 0:
            self._fail(number, f"did not end: {self._log.read_text()[-2000:]}")
            return
        ended = [line for line in child.lines if line.startswith("end ")]
        if ended != expected:
            self._fail(number, "tensors, counts or data position differ")
        for name in ("metrics.jsonl", "samples.jsonl"):
            if lines_of(folder / "run", name) != lines_of(whole / "run", name):
                self._fail(number, f"{name} differs")
        if _on_disk(folder) != _on_disk(whole):
            self._fail(number, "the last checkpoint differs")

    def _let(self, work: Any) -> Child:
        """Let a child work to its end."""
        child = Child(work, self._log)
        child.end(time.monotonic() + PATIENCE_S)
        assert child.status == 0, self._log.read_text()[-4000:]
        return child

    def _fail(self, number: int, text: str) -> None:
        self.failures.append(f"chain {number}: {text}")


def setting(which: int, *, tier: bool = False) -> Setting:
    """Return one of NUM_SETTINGS kinds of run; all save often."""
    found = replace(setting_of(which), save_every=1 + which % 2, keep=1 + which // 2 % 2)
    return replace(found, tier="states") if tier else found


def _train(scratch: Path, folder: Path, sort: Setting, imports: bool, tell: Tell) -> None:
    """Train to the end, telling of each save before it begins and after it is acknowledged."""
    os.environ["MEGATRAIN_CACHE"] = str(scratch / "cache")
    vars(banner)["SAMPLE_TOKENS"] = SAMPLE_TOKENS
    announce_saves(tell)
    config = config_of(scratch, folder / "run", sort, train={"steps": NUM_STEPS})
    with forced_tier(sort.tier), Trainer(config) as trainer:
        assert bool(trainer.home.store.on_disk) == (sort.tier != "none")
        tell(f"opened {trainer.state.global_step}")
        trainer.train(resume_from_checkpoint=True)
        tell("trained")
        for (name, kind), value in state_of(trainer).items():
            memory = as_memory(value.view(-1).view(torch.uint8))
            tell(f"end {name} {kind} {hashlib.sha256(memory).hexdigest()}")
        tell(f"end state {json.dumps(trainer.state.to_json())}")
        tell(f"end data {json.dumps(trainer.data.state())}")
    tell("closed")
    if imports:
        for name in sorted(sys.modules):
            tell(f"imported {name}")


def announce_saves(tell: Tell) -> None:
    """Let the run tell of each save, before it begins and after it is acknowledged."""
    replaced = vars(checkpoints)
    save, prune = replaced["write_checkpoint"], replaced["prune"]

    def telling_save(parent: Any, parts: Any, snapshot: Any, *rest: Any, **names: Any) -> Path:
        tell(f"saving {snapshot.num_steps}")
        path: Path = save(parent, parts, snapshot, *rest, **names)
        tell(f"saved {snapshot.num_steps}")
        return path

    def telling_prune(*args: Any, **options: Any) -> list[str]:
        deleted: list[str] = prune(*args, **options)
        tell("tidied")
        return deleted

    replaced |= {"write_checkpoint": telling_save, "prune": telling_prune}


def _phase(lines: list[str]) -> str:
    words = {"opened": "training", "saving": "saving", "saved": "deleting", "tidied": "training"}
    words |= {"trained": "exit", "end": "exit", "closed": "exit"}
    return words[lines[-1].split()[0]] if lines else "opening"


def _on_disk(folder: Path) -> Any:
    """Return what the last checkpoint says: the hash of each file, and the run's state."""
    manifest = verify(finished(folder / "run" / FOLDER)[0])
    kept = {key: manifest.training[key] for key in ("run", "data", "num_updates", "eval_loss")}
    return manifest.step, dict(manifest.files), kept
