"""SIGKILL at each system call of one save, one delete and one load, by strace.

A forked child waits, strace takes hold of it, and kills it as it enters a system call that names a
file or uses a descriptor: the K-th of each name, K counting up until the child ends by itself. The
work is done twice: on one thread, where that is every call, and as it is, where each thread counts
its own calls.
After each kill the checkpoint before, or the new one, must be whole, and what was acknowledged
there; no folder with a manifest may be damaged.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatrain.disk.checkpoint import checked_read, save
from megatrain.memory.direct import WriteQueue
from megatrain.run.folder import FOLDER
from proofs.crash.forks import Child, Tell
from proofs.crash.tiny import TinyRun, newest_whole

CALLS = "%file,%desc"
PATIENCE_S = 120.0
MOST_CALLS = 2000
TRIES = 3
"""To have a child that waits, held by strace."""


def run(scratch: Path, count: int, first: int, *, tell: bool) -> dict[str, Any]:
    """Kill at every call, or at the first `count` of each kind of work."""
    if reason := _cannot_trace():
        return {"what": "strace", "skipped": reason, "failures": []}
    began = time.monotonic()
    result: dict[str, Any] = {"what": "strace"}
    counts: Counter[str] = Counter()
    failures: list[str] = []
    troubles: list[str] = []
    for name, work in WORKS.items():
        for threads in (False, True):
            sweep = Sweep(scratch, work, threads=threads)
            key = f"{name}{', threads' if threads else ''}"
            result[key] = sweep.run(count or MOST_CALLS)
            counts += sweep.counts
            failures += [f"{key}: {failure}" for failure in sweep.failures]
            troubles += sweep.troubles
            if tell:
                print(f"{time.monotonic() - began:.0f} s: {result} {failures}", flush=True)
    result |= {key: counts[key] for key in ("kills", "torn", "lost")}
    result["troubles"] = troubles
    return {**result, "seconds": round(time.monotonic() - began, 1), "failures": failures}


class Sweep:
    """One kind of work, killed at one call after the other."""

    def __init__(self, scratch: Path, work: Callable[[TinyRun, Tell], None], threads: bool) -> None:
        self._scratch, self._work, self._threads = scratch, work, threads
        self._before = scratch / "before"
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self.troubles: list[str] = []
        if not self._before.exists():
            _make_two(self._before)

    def run(self, most: int) -> dict[str, int]:
        """Return at how many calls of each name the work was killed, `most` of each."""
        killed: dict[str, int] = {}
        for name in self._names():
            inject = f"inject={name}:signal=SIGKILL:when="
            calls = itertools.takewhile(
                lambda call, inject=inject: self._kill_at(f"{inject}{call}"),  # type: ignore[misc]
                range(1, most + 1),
            )
            killed[name] = sum(1 for _ in calls)
        return killed

    def _names(self) -> list[str]:
        """Return the names of all calls that the work makes."""
        record = self._scratch / "calls"
        self._kill_at(f"trace={CALLS}", record)
        return sorted(set(re.findall(r"^(?:\d+ +)?(\w+)\(", record.read_text(), re.M)))

    def _kill_at(self, call: str, record: Path = Path(os.devnull)) -> bool:
        """Kill the work at a call; False if it ended before it came so far."""
        folder = self._scratch / "run"
        child, tracer, go = self._held(call, record, folder)
        with suppress(BrokenPipeError):  # killed already: its wait is a read, entered again
            os.write(go, b"g")
        os.close(go)
        was_killed = child.end(time.monotonic() + PATIENCE_S)
        tracer.communicate()
        if was_killed:
            self.counts["kills"] += 1
        elif child.status != 0:
            self.failures.append(f"{call}: ended with {child.status}: {self._log()}")
        self._judge(call, child, folder)
        shutil.rmtree(folder)
        return was_killed

    def _held(
        self, call: str, record: Path, folder: Path
    ) -> tuple[Child, subprocess.Popen[str], int]:
        """Return a child that waits, the strace that has hold of it, and what lets it go.

        What fails before anything was tried is tried again, and told.
        """
        for _ in range(TRIES):
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(self._before, folder, symlinks=True)
            gate, go = os.pipe()
            child = Child(
                functools.partial(_wait_and_work, gate, folder, self._work, self._threads),
                self._scratch / "log",
            )
            os.close(gate)
            if not child.follow(lambda line: line == "ready", time.monotonic() + PATIENCE_S):
                child.end(time.monotonic())
                self.troubles.append(f"{call}: ended early, {child.status}: {self._log()}")
            else:
                tracer = _trace(child.pid, call, record)
                if tracer.poll() is None:
                    return child, tracer, go
                child.end(time.monotonic())
                said = tracer.communicate()[1].strip()
                self.troubles.append(f"{call}: strace, {tracer.returncode}: {said}")
            os.close(go)
        raise RuntimeError("; ".join(self.troubles))

    def _log(self) -> str:
        return (self._scratch / "log").read_text()[-2000:]

    def _judge(self, call: str, child: Child, folder: Path) -> None:
        newest, damaged = newest_whole(folder / FOLDER)
        acknowledged = 3 if "saved" in child.lines else 2
        if damaged:
            self.counts["torn"] += 1
            self.failures.append(f"{call}: torn: {damaged}")
        if newest < acknowledged or "wrong" in child.lines:
            self.counts["lost"] += 1
            self.failures.append(f"{call}: {acknowledged} acknowledged, newest is {newest}")


def _save(run: TinyRun, tell: Tell) -> None:
    run.save()
    tell("saved")


def _delete(run: TinyRun, tell: Tell) -> None:
    run.prune(keep=1)


def _load(run: TinyRun, tell: Tell) -> None:
    step = run.take_up()
    tell("loaded" if run.holds(step) else "wrong")


WORKS: dict[str, Callable[[TinyRun, Tell], None]] = {
    "save": _save,
    "delete": _delete,
    "load": _load,
}


def _make_two(folder: Path) -> None:
    """Make a run with checkpoints of steps 1 and 2."""
    run = TinyRun(folder)
    for _ in range(2):
        run.take_step()
        run.save()
    run.folder.close()


def _wait_and_work(
    gate: int, folder: Path, work: Callable[[TinyRun, Tell], None], threads: bool, tell: Tell
) -> None:
    if not threads:
        vars(save)["WriteQueue"] = _OneThreadQueue
        vars(checked_read)["ThreadPoolExecutor"] = _OneThread
    run = TinyRun(folder)
    run.step = 2
    run.take_step()
    tell("ready")
    os.read(gate, 1)
    work(run, tell)
    os._exit(0)


def _cannot_trace() -> str | None:
    """Return why strace cannot be used on this machine."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    tried = subprocess.run(
        ["strace", "-qq", "-o", os.devnull, "true"], capture_output=True, text=True, check=False
    )
    return f"strace cannot trace here: {tried.stderr.strip()}" if tried.returncode else None


def _trace(pid: int, told: str, record: Path) -> subprocess.Popen[str]:
    """Let strace do what it is told to a waiting process; return when it has hold, or has ended."""
    command = ["strace", "-f", "-qq", "-o", str(record), "-p", str(pid), "-e", told]
    tracer = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    status = Path(f"/proc/{pid}/status")
    while "TracerPid:\t0\n" in status.read_text() and tracer.poll() is None:
        time.sleep(0.002)
    return tracer


class _OneThreadQueue(WriteQueue):
    """Does at once what it is given."""

    def submit(
        self, work: Callable[[], None], dropped: Callable[[], object] = bool
    ) -> Future[None]:
        return _done(work)


class _OneThread:
    """A pool without threads."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        return _done(functools.partial(work, *args))

    def shutdown(self, **_: Any) -> None:
        pass

    def __enter__(self) -> _OneThread:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _done(work: Callable[[], Any]) -> Future[Any]:
    future: Future[Any] = Future()
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)
    return future
