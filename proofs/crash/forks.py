"""Children of a process that has imported everything: each begins at once and dies on demand.

The parent must have one thread when it forks, and torch one thread for ever: a thread of the parent
would be missing in the child, and a lock it held would stay locked.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from megatrain.__main__ import main as megatrain
from megatrain.run.interrupts import SIGNALS

Tell = Callable[[str], None]


class Child:
    """A forked process that tells what it does, line by line; lines told before a death arrive."""

    def __init__(self, work: Callable[[Tell], None], log: Path) -> None:
        self.lines: list[str] = []
        self.times: list[float] = []
        """When each line was read."""
        self.began = time.monotonic()
        reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(reading)
            _work_and_exit(work, writing, log)
        os.close(writing)
        self.fd, self._rest = reading, b""
        self.status: int | None = None

    def follow(self, until: Callable[[str], bool], deadline: float) -> bool:
        """Take lines until one is as wanted; False if the deadline or the end came first."""
        while (left := deadline - time.monotonic()) > 0:
            if not select.select([self.fd], [], [], left)[0]:
                return False
            data = os.read(self.fd, 65536)
            if not data:
                return False
            if any(until(line) for line in self.take(data)):
                return True
        return False

    def end(self, deadline: float) -> bool:
        """Wait for the end; kill it if the deadline comes first. Return whether it was killed."""
        self.follow(lambda line: False, deadline)
        gone, status = os.waitpid(self.pid, os.WNOHANG)
        while not gone and time.monotonic() < deadline:  # it has closed its pipe and is exiting
            time.sleep(0.001)
            gone, status = os.waitpid(self.pid, os.WNOHANG)
        if not gone:
            os.kill(self.pid, signal.SIGKILL)
            _, status = os.waitpid(self.pid, 0)
        while data := os.read(self.fd, 65536):
            self.take(data)
        os.close(self.fd)
        self.status = status
        return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL

    def take(self, data: bytes) -> list[str]:
        """Return the lines that bytes from the pipe complete."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        lines = [line.decode() for line in whole]
        self.lines += lines
        self.times += [time.monotonic()] * len(lines)
        return lines


def gather(children: Sequence[Child]) -> Iterator[str]:
    """Yield the lines of all children as they come, until all have ended."""
    alive = {child.fd: child for child in children}
    while alive:
        for fd in select.select(list(alive), [], [])[0]:
            data = os.read(fd, 65536)
            if data:
                yield from alive[fd].take(data)
            else:
                alive.pop(fd).end(time.monotonic() + 60)


def be_megatrain(words: Sequence[str]) -> NoReturn:
    """Be `megatrain WORDS` until it ends; exit with its code, as an interpreter that ends."""
    code: Any = 1
    try:
        # What it spawns imports the main module again: that of the command line, not this one.
        sys.modules["__main__"] = sys.modules["megatrain.__main__"]
        sys.argv = ["megatrain", *words]
        megatrain()
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        threading._shutdown()  # type: ignore[attr-defined]
        os._exit(code if isinstance(code, int) else 1)


def _work_and_exit(work: Callable[[Tell], None], writing: int, log: Path) -> None:
    sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    _hear_signals()
    code = 1
    try:
        work(lambda line: _tell(writing, line))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _hear_signals() -> None:
    """Be as if started from a terminal: nohup and `&` ignore signals for all that follows."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in set(SIGNALS) - {signal.SIGINT}:
        signal.signal(number, signal.SIG_DFL)


def _tell(fd: int, line: str) -> None:
    data = line.encode() + b"\n"
    while data:
        data = data[os.write(fd, data) :]
