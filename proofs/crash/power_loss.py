"""Power loss under a process that saves: ext4 on a loop device, shut down at a random instant.

EXT4_IOC_SHUTDOWN stops a file system at once, as if the machine had lost power: what is not in the
journal or on the device is gone. Then the device is mounted again, the journal is replayed, and the
newest whole checkpoint must be of the last acknowledged step or later, no folder with a manifest
may be damaged, and the lines of all steps up to it must be there. The next trial goes on from it.

The device keeps every write it was given, so the loss of a drive's own cache is not shown here;
crash_states.py is about that. The same trials with a writer that never calls fsync must lose saves.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import random
import struct
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

from megatrain import files
from megatrain.disk.checkpoint.retention import clear_unfinished
from megatrain.run.folder import FOLDER
from proofs.crash.forks import Child, Tell
from proofs.crash.tiny import TinyRun, newest_whole

SHUTDOWN = 0x8004587D
FLAGS = {"journal flushed": 1, "nothing flushed": 2, "all flushed": 0}
WEIGHTS = (3, 6, 1)
IMAGE_BYTES = 256 << 20
"""A save wants 64 MiB to spare."""
KEEP = 2
SIBLING_TRIALS = 30
PATIENCE_S = 300.0
_NEW_NAMESPACE, _RECURSIVE_PRIVATE = 0x20000, 0x4000 | 0x40000
_libc = ctypes.CDLL(None, use_errno=True)


def run(scratch: Path, count: int, first: int, *, tell: bool) -> dict[str, Any]:
    """Lose power `count` times."""
    began = time.monotonic()
    try:
        disk = LoopDisk(scratch)
    except (OSError, subprocess.CalledProcessError) as error:
        return {"what": "power", "skipped": f"not permitted here: {error}", "failures": []}
    try:
        trials = Trials(disk, scratch / "log")
        for number in range(first, first + count):
            trials.lose_power(number, durable=True)
            if tell and number % 20 == 0:
                print(f"{time.monotonic() - began:.0f} s: {dict(trials.counts)}", flush=True)
        disk.make()
        sibling = Trials(disk, scratch / "log")
        for number in range(max(5, min(SIBLING_TRIALS, count // 4))):
            sibling.lose_power(number, durable=False)
    finally:
        disk.close()
    counts, failures = trials.counts, trials.failures
    lost = sibling.counts["lost"]
    if not lost:
        failures.append("a writer without fsync lost nothing: the trials show nothing")
    keys = ("trials", "acknowledged", "inside a save", "torn", "lost", "lines", *FLAGS)
    result: dict[str, Any] = {key: counts[key] for key in keys}
    result |= {"without fsync": f"{lost} lost of {sibling.counts['trials']}"}
    seconds = round(time.monotonic() - began, 1)
    return {"what": "power", **result, "seconds": seconds, "failures": failures}


class LoopDisk:
    """ext4 in a file, mounted where only this process sees it."""

    def __init__(self, scratch: Path) -> None:
        """Raises OSError or CalledProcessError where one of the steps is not permitted."""
        self._image, self.mount_point = scratch / "image", scratch / "mount"
        self.mount_point.mkdir()
        _call("unshare", _NEW_NAMESPACE)
        _call("mount", b"none", b"/", None, _RECURSIVE_PRIVATE, None)
        with self._image.open("wb") as image:
            image.truncate(IMAGE_BYTES)
        self._is_mounted = False
        self._device = _output("losetup", "--find", "--show", str(self._image))
        self._hold = os.open(self._device, os.O_RDONLY | os.O_CLOEXEC)
        # Detached when nobody holds it any more: also if this process is killed.
        _output("losetup", "--detach", self._device)
        try:
            self.make()
            self.mount()
            self.shut_down(FLAGS["nothing flushed"])
            self.unmount()
            self.make()
        except BaseException:
            self.close()
            raise

    def make(self) -> None:
        self.unmount()
        _output("mkfs.ext4", "-q", "-F", self._device)

    def mount(self) -> None:
        _call("mount", self._device.encode(), bytes(self.mount_point), b"ext4", 0, b"")
        self._is_mounted = True

    def shut_down(self, flag: int) -> None:
        fd = os.open(self.mount_point, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, SHUTDOWN, struct.pack("I", flag))
        finally:
            os.close(fd)

    def unmount(self) -> None:
        if self._is_mounted:
            _call("umount2", bytes(self.mount_point), 0)
            self._is_mounted = False

    def close(self) -> None:
        self.unmount()
        os.close(self._hold)


class Trials:
    """Power losses, one after the other, of one run."""

    def __init__(self, disk: LoopDisk, log: Path) -> None:
        self._disk, self._log = disk, log
        self._save_seconds = 0.05
        self._acknowledged = 0
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        disk.mount()

    def lose_power(self, number: int, *, durable: bool) -> None:
        """Save until power is lost; look at what is left, and stay mounted for the next."""
        draw = random.Random(f"power {number} {durable}")
        folder = self._disk.mount_point / "run"
        child = Child(lambda tell: _save_for_ever(folder, durable, tell), self._log)
        wanted = f"saving {self._acknowledged + draw.randrange(1, 4)}"
        child.follow(lambda line: line == wanted, time.monotonic() + PATIENCE_S)
        time.sleep(draw.random() * self._save_seconds)
        (kind,) = draw.choices(list(FLAGS), WEIGHTS)
        self._disk.shut_down(FLAGS[kind])
        child.end(0.0)
        self._disk.unmount()
        self._disk.mount()
        self._learn(child)
        self.counts.update(["trials", kind])
        self._judge(number, child, folder)

    def _learn(self, child: Child) -> None:
        saved = [int(line.split()[1]) for line in child.lines if line.startswith("saved")]
        self.counts["acknowledged"] += len(saved)
        self.counts["inside a save"] += child.lines[-1].startswith("saving")
        self._acknowledged = max([self._acknowledged, *saved])
        times = dict(zip(child.lines, child.times, strict=True))
        for step in saved:
            took = times[f"saved {step}"] - times[f"saving {step}"]
            self._save_seconds += 0.1 * (1.3 * took - self._save_seconds)

    def _judge(self, number: int, child: Child, folder: Path) -> None:
        newest, damaged = newest_whole(folder / FOLDER)
        if damaged:
            self.counts["torn"] += 1
            self.failures.append(f"trial {number}: torn: {damaged}")
        if newest < self._acknowledged or any(line.startswith("wrong") for line in child.lines):
            self.counts["lost"] += 1
            text = f"step {self._acknowledged} was acknowledged, the newest is {newest}"
            self.failures.append(f"trial {number}: {text}, {child.lines}")
        expected = "".join(
            json.dumps({"step": step, "loss": 1 / step}) + "\n" for step in range(1, newest + 1)
        )
        path = folder / "metrics.jsonl"
        found = path.read_text(errors="replace") if path.exists() else ""
        if not found.startswith(expected):
            self.counts["lines"] += 1
            self.failures.append(f"trial {number}: lines up to step {newest} are not all there")
        self._acknowledged = newest


def _save_for_ever(folder: Path, durable: bool, tell: Tell) -> None:
    """Take up what is there, check it, and save step after step."""
    with patch.object(files, "os", os if durable else _WithoutFsync()):
        run = TinyRun(folder)
        clear_unfinished(run.checkpoints)
        step = run.take_up()
        tell(f"opened {step}" if step == 0 or run.holds(step) else f"wrong tensors at {step}")
        while True:
            run.take_step()
            tell(f"saving {run.step}")
            run.save()
            tell(f"saved {run.step}")
            run.prune(KEEP)


class _WithoutFsync:
    """The system, but for fsync, which does nothing."""

    def __getattr__(self, name: str) -> Any:
        return (lambda fd: None) if name == "fsync" else getattr(os, name)


def _call(name: str, *args: Any) -> None:
    if getattr(_libc, name)(*args) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _output(*command: str) -> str:
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout.strip()
