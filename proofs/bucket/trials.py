"""Runs that save to a bucket, disturbed one after another, and what is left of each.

A chain is one run at one URL. Each trial is a process that continues it, on a machine that is empty
or has what it had before, and several disturbances: of the process, of its requests, or of both. A
fault of requests counts if it has met one, a signal if the process was alive. Tensors are a
function of the step and of the process that computed it, and the manifest has the whole line of
both, so it is known which checkpoints descend from which. After each trial somebody looks at the
bucket itself:

    lost    the newest checkpoint does not descend from one whose upload was acknowledged
    mixed   a checkpoint that the history names lacks a chunk, or has bytes of another
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatrain import places
from megatrain.disk.checkpoint.manifest import read_manifest
from megatrain.disk.checkpoint.restore import restore, verify
from megatrain.disk.checkpoint.retention import finished
from megatrain.disk.remote import history
from megatrain.disk.remote.download import bring
from megatrain.disk.remote.history import last_entry
from megatrain.disk.remote.upload import Uploader
from megatrain.errors import (
    CheckpointCorrupted,
    MegaTrainError,
    RunFolderError,
    RunTaken,
    StorageError,
)
from megatrain.run import uploads
from proofs.bucket.server import KINDS
from proofs.crash.forks import Child, Tell
from proofs.crash.tiny import TinyRun

TRIALS_PER_CHAIN = 12
SAVES_PER_TRIAL = 4
FAULTS_PER_TRIAL = 3
REQUESTS_PER_TRIAL = 150
"""About: faults begin somewhere in them."""
TO_PROCESSES = ("kill", "two at once", "slept", "none")
PATIENCE_S = 120.0
LEASE_S, BEAT_S, ANSWER_S, RETRY_S = 1.0, 0.1, 1, 4
"""Short, so that trials are many."""


class BucketRun(TinyRun):
    """A tiny run whose bytes are those of its step and of the process that took it."""

    def __init__(self, folder: Path, writer: int) -> None:
        super().__init__(folder)
        self.writer = writer
        self.line: list[tuple[int, int]] = []
        """Writer and step of each save that the state descends from."""

    def fill(self, step: int) -> None:
        for number, tensor in enumerate(self.tensors()):
            seed = (self.writer * 1000 + step) * 100 + number
            generator = torch.Generator().manual_seed(seed)
            tensor.memory.copy_(torch.empty_like(tensor.memory).random_(generator=generator))

    def take_up(self) -> int:
        step = super().take_up()
        for path in finished(self.checkpoints):
            if (manifest := read_manifest(path)).step == step:
                self.line = [tuple(one) for one in manifest.training["line"]]
                break
        return step

    def saved(self) -> Path:
        self.line.append((self.writer, self.step))
        return self.save(line=self.line)


def work(url: str, folder: Path, writer: int, spoil: str | None, tell: Tell) -> None:
    """Continue the run on a machine with that folder; tell each acknowledged save."""
    _hasten()
    _spoil(spoil)
    run = BucketRun(folder, writer)
    try:
        run.folder.uploads = sending = uploads.open_uploads(url, folder, keep=2, keep_best=False)
    except (RunFolderError, StorageError, CheckpointCorrupted) as error:
        tell(f"refused {type(error).__name__} {error}")
        run.folder.close()
        return
    run.take_up()
    tell(f"opened {run.step}")
    draw = random.Random(writer)

    def report() -> None:
        for result in sending.ended():
            if result.sent is not None:
                number = next(n for n, (_, step) in enumerate(run.line) if step == result.step)
                line = run.line[: number + 1]
                tell(f"acknowledged {json.dumps(line)}")

    try:
        for _ in range(SAVES_PER_TRIAL):
            run.take_step()
            path = run.saved()
            run.prune(2)
            sending.add(path)
            if draw.random() < 0.7:
                sending.wait(2.0)
            report()
        sending.wait(20.0)
        report()
        tell("ended")
    except RunTaken:
        tell("taken")
    finally:
        run.folder.close()


def _hasten() -> None:
    torch.set_num_threads(1)
    history.LEASE_S, history.BEAT_S = LEASE_S, BEAT_S
    places.ANSWER_S, places.RETRY_S = ANSWER_S, RETRY_S
    uploads.FIRST_PAUSE_S = 0.05


def _spoil(what: str | None) -> None:
    """Break what the proof must notice."""
    if what == "fence":

        def overwrites(place: places.Place, entry: history.Entry) -> bool:
            place.write(history._key(entry.number), entry.to_bytes())
            return True

        history._made = overwrites
        history.Lease.require = lambda self: None  # type: ignore[method-assign]
        history.Lease._next = lambda self: None  # type: ignore[method-assign]
    if what == "order":
        real = Uploader._send_chunks

        def names(self: Uploader, held: Any, sent: Any, advance: Any) -> Any:
            for _, record in held.files.values():
                for name in record.digests:
                    self._known.setdefault(name, self.lease.number)
            return real(self, held, sent, advance)

        def upload(self: Uploader, held: Any, advance: Any = lambda n: None) -> Any:
            before = dict(self._known)
            sent = whole(self, held, advance)
            self._known = {n: v for n, v in self._known.items() if n in before}
            real(self, held, sent, advance)
            return sent

        whole = Uploader.upload
        Uploader._send_chunks = names  # type: ignore[method-assign]
        Uploader.upload = upload  # type: ignore[method-assign]


class Trials:
    """Chains of trials against one storage."""

    def __init__(self, scratch: Path, spoil: str | None) -> None:
        self._scratch, self._spoil = scratch, spoil
        self._server = subprocess.Popen(
            [sys.executable, "-m", "proofs.bucket.server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._server.stdout is not None
        self.urls = json.loads(self._server.stdout.readline())
        os.environ.update(
            AWS_ACCESS_KEY_ID="x",
            AWS_SECRET_ACCESS_KEY="y",
            AWS_REGION="us-east-1",
            AWS_ENDPOINT_URL=self.urls["door"],
        )
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self._num_writers = 0

    def close(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()

    def chain(self, number: int, count: int) -> None:
        """Disturb one run until there are `count` disturbances, or it has had its trials."""
        url, draw = f"s3://proof/chain-{number}", random.Random(f"chain {number}")
        folder = self._scratch / f"chain-{number}"
        folder.mkdir()
        acknowledged: list[list[list[int]]] = []
        for trial in range(TRIALS_PER_CHAIN):
            if self.counts["disturbances"] >= count:
                break
            what = TO_PROCESSES[trial % len(TO_PROCESSES)]
            machine = folder / f"machine-{draw.randrange(3)}"
            if draw.random() < 0.4:
                shutil.rmtree(machine, ignore_errors=True)
            children, met = self._disturbed(what, url, machine, folder, draw)
            told = [line for child in children for line in child.lines]
            self.counts["trials"] += 1
            self.counts["disturbances"] += len(met)
            self.counts.update(f"in {one}" for one in met)
            for line in told:
                word, _, rest = line.partition(" ")
                self.counts[f"told {word}"] += 1
                if word == "acknowledged":
                    acknowledged.append(json.loads(rest))
            self._judge(f"chain {number}, trial {trial}, {what}", url, acknowledged, folder)
            if any(child.status for child in children if child.status != signal.SIGKILL):
                text = (self._scratch / "log").read_text()[-1500:]
                self.failures.append(f"chain {number}, trial {trial}, {what}: died: {text}")
            if self.failures:
                return
        shutil.rmtree(folder)

    def _disturbed(
        self, what: str, url: str, machine: Path, folder: Path, draw: random.Random
    ) -> tuple[list[Child], list[str]]:
        """Continue the run, with `what` and some faults; return who did, and what they met."""
        kinds = draw.sample(KINDS, FAULTS_PER_TRIAL)
        self._faults([_fault(kind, draw) for kind in kinds])
        first = self._start(url, machine)
        until, children, met = time.monotonic() + PATIENCE_S, [first], what != "none"
        if what == "kill":
            if draw.random() < 0.5:
                first.follow(lambda line: line.startswith("opened"), until)
            met = first.end(time.monotonic() + draw.random() * 1.5)
        elif what == "two at once":
            children.append(self._start(url, folder / f"other-{self._num_writers}"))
        elif what == "slept":
            met = first.follow(lambda line: line.startswith("opened"), until)
            time.sleep(draw.random() * 0.3)
            os.kill(first.pid, signal.SIGSTOP)
            second = self._start(url, folder / f"other-{self._num_writers}")
            children.append(second)
            second.follow(lambda line: line.startswith(("opened", "refused")), until)
            time.sleep(draw.random() * 0.3)
            os.kill(first.pid, signal.SIGCONT)
        for child in children:
            if child.status is None:
                child.end(until)
        faults = [kind for kind, count in zip(kinds, self._faults([]), strict=True) if count]
        return children, [what, *faults] if met else faults

    def _start(self, url: str, machine: Path) -> Child:
        self._num_writers += 1
        todo = partial(work, url, machine, self._num_writers, self._spoil)
        return Child(todo, self._scratch / "log")

    def _faults(self, faults: list[dict[str, Any]]) -> list[int]:
        """Disturb requests from here on; return how many each fault until here has met."""
        data = json.dumps(faults).encode()
        request = urllib.request.Request(f"{self.urls['door']}/-/faults", data=data, method="POST")
        with urllib.request.urlopen(request) as answer:
            met: list[int] = json.loads(answer.read())
        return met

    def _judge(
        self, where: str, url: str, acknowledged: list[list[list[int]]], folder: Path
    ) -> None:
        """Look at the bucket from an empty machine, in a process of its own: threads stay there."""
        judge = Child(
            partial(judged, url, acknowledged, folder / "judge", self.urls["storage"]),
            self._scratch / "log",
        )
        judge.end(time.monotonic() + PATIENCE_S)
        shutil.rmtree(folder / "judge", ignore_errors=True)
        if judge.lines[-1:] != ["looked"]:
            self.failures.append(f"{where}: the judge died")
        for line in judge.lines[:-1]:
            word, _, text = line.partition(" ")
            self.counts[word] += 1
            self.failures.append(f"{where}: {word}: {text}")


def _fault(kind: str, draw: random.Random) -> dict[str, Any]:
    """Return a fault for the door (server.py), somewhere in the life of a process."""
    after = draw.randrange(2 if kind == "list" else REQUESTS_PER_TRIAL)
    count = draw.choice([1, 2, 3, 8, 30])
    return {"kind": kind, "after": after, "count": count, "seconds": 2 * ANSWER_S}


def judged(
    url: str, acknowledged: list[list[list[int]]], folder: Path, storage: str, tell: Tell
) -> None:
    """Tell what is lost or mixed in a bucket."""
    os.environ["AWS_ENDPOINT_URL"] = storage
    place = places.open_place(url)
    last = last_entry(place)
    newest: list[tuple[int, int]] = []
    for one in () if last is None else last.live:
        try:
            path = bring(place, one, folder / "checkpoints", None)
            manifest = verify(path)
            line = [tuple(pair) for pair in manifest.training["line"]]
            run = BucketRun(folder / "run", line[-1][0])
            restore(path, manifest, run.parts)
            whole = manifest.step == one.step == line[-1][1] and run.holds(one.step)
            run.folder.close()
        except MegaTrainError as error:
            tell(f"mixed {error}")
            continue
        if not whole:
            tell(f"mixed {one.name} has bytes of another")
        newest = newest or line
    for known in acknowledged:
        if newest[: len(known)] != [tuple(pair) for pair in known]:
            tell(f"lost {known[-1]}: the newest is {newest[-3:]}")
    tell("looked")


def run(scratch: Path, count: int, first: int, *, tell: bool, spoil: str | None) -> dict[str, Any]:
    """Disturb `count` times; return what was found."""
    torch.set_num_threads(1)
    began, trials = time.monotonic(), Trials(scratch, spoil)
    try:
        number = first
        while trials.counts["disturbances"] < count and not trials.failures:
            trials.chain(number, count)
            number += 1
            if tell:
                print(f"{time.monotonic() - began:.0f} s: {dict(trials.counts)}", flush=True)
    finally:
        with suppress(OSError):
            trials.close()
    found = {key: trials.counts[key] for key in ("disturbances", "lost", "mixed", "trials")}
    more = {key: trials.counts[key] for key in sorted(trials.counts) if " " in key}
    seconds = round(time.monotonic() - began, 1)
    return {"what": "bucket", **found, **more, "seconds": seconds, "failures": trials.failures}
