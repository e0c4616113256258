"""The faults of a day, and what a run may do about each.

    kill           SIGKILL at any instant                       the next life resumes
    kill in save   SIGKILL after a save has begun               the next life resumes
    kill opening   SIGKILL, and again while the run resumes     the next life resumes
    signal         one or two of SIGTERM, SIGINT, SIGHUP        ends with 130; after one signal
                                                                the last step is saved
    stop           SIGSTOP, and SIGCONT up to a second later    continues
    full disk      another file takes all space, at any         continues; or, if it is killed,
                   instant or inside a save                     does not start before there is room
    memory         a neighbor fills the control group, or the  stops with 130, is killed by the
                   run starts in one that is almost full        kernel, or does not start
    clock          the wall clock jumps by up to ten years,     continues, or resumes after a kill
                   also in the times of checkpoints

The clock is that of `time.time` and `time.time_ns`, not the kernel's: see process.py.
"""

from __future__ import annotations

import errno
import os
import random
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from megatrain.disk.checkpoint.manifest import MANIFEST_NAME
from megatrain.disk.checkpoint.retention import finished
from megatrain.errors import DiskFull, DoesNotFit, Interrupted
from megatrain.run.interrupts import SIGNALS
from proofs.crash.forks import Child
from proofs.soak.disturbed import PATIENCE_S, DisturbedRun, name_of

SOON_S = 0.1
"""A few steps, on a quiet machine; also a save."""
OPENING_S = 1.5
"""About as long as a fork takes to open a run."""
FULL_STEPS = 30
"""The most steps on a full disk."""
MARGIN_BYTES = (8 << 20, 64 << 20)
"""What a full group has left."""
SQUEEZED_S = (1.0, 4.0)
"""So long memory is short: the run looks once per second."""

Fault = Callable[[DisturbedRun, random.Random], str]
"""Disturbs a run, leaves a life that goes on, and returns what became of the one before."""


class Ballast:
    """A file that takes all space of a disk."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "ballast"

    def fill(self) -> None:
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT)
        size = 0
        try:
            for piece in (16 << 20, 1 << 20, 4096):
                with suppress(OSError):
                    while True:
                        os.posix_fallocate(fd, size, piece)
                        size += piece
        finally:
            os.close(fd)

    def empty(self) -> None:
        self._path.unlink(missing_ok=True)


def faults_of(run: DisturbedRun, ballast: Ballast | None) -> Mapping[str, Fault]:
    """Return all faults that can be had here, by name."""
    found: dict[str, Fault] = {
        "kill": _kill,
        "kill in save": _kill_in_save,
        "kill opening": _kill_opening,
        "signal": _signal,
        "stop": _stop,
        "clock": _clock,
    }
    if ballast is not None:
        found["full disk"] = lambda run, draw: _full_disk(run, draw, ballast)
    if run.group is not None:
        found["memory"] = _memory
    return found


def dealt(names: list[str], count: int, draw: random.Random) -> list[str]:
    """Return `count` names at random, each about as often as the others."""
    deck: list[str] = []
    while len(deck) < count:
        deck += draw.sample(names, len(names))
    return deck[:count]


def _kill(run: DisturbedRun, draw: random.Random) -> str:
    time.sleep(SOON_S * draw.random())
    run.kill()
    run.begin()
    return "killed"


def _kill_in_save(run: DisturbedRun, draw: random.Random) -> str:
    run.await_save()
    return _kill(run, draw)


def _kill_opening(run: DisturbedRun, draw: random.Random) -> str:
    run.kill()
    run.begin()
    time.sleep(OPENING_S * draw.random())
    run.kill()
    where = "after" if any(line.startswith("opened") for line in run.life.lines) else "before"
    run.begin()
    return f"killed {where} it was open"


def _signal(run: DisturbedRun, draw: random.Random) -> str:
    time.sleep(SOON_S * draw.random())
    numbers = [draw.choice(SIGNALS) for _ in range(draw.choice([1, 2]))]
    for place, number in enumerate(numbers):
        time.sleep(SOON_S * draw.random() if place else 0.0)
        run.send(number)
    code = run.end(time.monotonic() + PATIENCE_S)
    has_left = "left" in run.life.lines
    if code != Interrupted.exit_code and not (has_left and -code in numbers):
        run.fail(f"{len(numbers)} signals: {name_of(code)}")
    if len(numbers) == 1 and run.newest() != run.last_step():
        run.fail(f"stopped after step {run.last_step()}, saved {run.newest()}")
    run.begin()
    return f"{len(numbers)}: {name_of(code)}"


def _stop(run: DisturbedRun, draw: random.Random) -> str:
    time.sleep(SOON_S * draw.random())
    run.send(signal.SIGSTOP)
    time.sleep(draw.random())
    run.send(signal.SIGCONT)
    run.reach(run.last_step() + 1)
    return "continued"


def _full_disk(run: DisturbedRun, draw: random.Random, ballast: Ballast) -> str:
    if draw.random() < 0.5:
        run.await_save()
        time.sleep(SOON_S * draw.random())
    run.disk_was_full = True
    ballast.fill()
    try:
        run.reach(run.last_step() + draw.randrange(1, FULL_STEPS))
        if draw.random() < 0.5:
            return "continued"
        run.kill()
        run.begin()
        run.disk_was_full = True
        if run.is_open():
            return "killed, started on a full disk"
        _refused(run, (DiskFull.exit_code,))
        return "killed, refused on a full disk"
    finally:
        ballast.empty()
        if run.life.status is not None:
            run.begin()


def _refused(run: DisturbedRun, codes: tuple[int, ...]) -> str:
    """Return how a life has ended that did not open; it is a failure if not with these codes."""
    code = run.end(time.monotonic() + PATIENCE_S)
    if code not in codes:
        run.fail(f"did not open: {name_of(code)}")
    return name_of(code)


def _memory(run: DisturbedRun, draw: random.Random) -> str:
    group = run.group
    assert group is not None
    num_killed, neighbor, place = group.num_killed, None, ""
    starts = draw.random() < 0.3
    if starts:
        run.kill()
    try:
        _fill(run, draw)
        if starts:
            run.begin()
            if not run.is_open():
                return f"not started: {_refused(run, (DoesNotFit.exit_code, -9))}"
            place = "started, "
        neighbor = Child(lambda tell: _take_memory(run), run.log)
        code = run.end(time.monotonic() + draw.uniform(*SQUEEZED_S))
        if code not in (Interrupted.exit_code, -9):
            run.fail(f"memory ran short: {name_of(code)}")
        by_kernel = code == -9 and group.num_killed > num_killed
        return place + ("killed by the kernel" if by_kernel else name_of(code))
    finally:
        group.limit(None)
        if neighbor is not None:
            neighbor.end(0.0)
        if run.life.status is not None:
            run.begin()


def _fill(run: DisturbedRun, draw: random.Random) -> None:
    """Leave the group little more than it holds."""
    group = run.group
    assert group is not None
    for _ in range(10):
        used = group.used_bytes
        assert used is not None
        try:
            group.limit(used + draw.randrange(*MARGIN_BYTES))
            return
        except OSError as error:  # it has grown in between
            if error.errno != errno.EBUSY:
                raise


def _take_memory(run: DisturbedRun) -> None:
    """Take memory of the group, piece by piece, until killed."""
    assert run.group is not None
    run.group.take_in(os.getpid())
    held = []
    while True:
        held.append(bytearray(os.urandom(4096)) * 256)
        time.sleep(0.01)


def _clock(run: DisturbedRun, draw: random.Random) -> str:
    offset_s = run.clock.jump(draw)
    for folder in finished(run.checkpoints):
        with suppress(FileNotFoundError):  # deleted by now
            moment = time.time() + offset_s * draw.random()
            os.utime(folder / MANIFEST_NAME, (moment, moment))
    if draw.random() < 0.5:
        return _kill(run, draw)
    run.reach(run.last_step() + 1)
    return "continued"
