"""All ranks of one `megatrain train`, as forks of a process that has imported everything."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatrain.__main__ import main as megatrain
from megatrain.run import checkpoints
from megatrain.run.opening import banner
from proofs.ranks.hosts import Hosts, address_of, end_with_parent

PORT = 29500
Tell = Callable[[str], None]


class Rank:
    """One forked process: what it told, and how it ended."""

    def __init__(self, work: Callable[[Tell], None], log: Path) -> None:
        self.log, self.lines, self._rest = log, list[str](), b""
        log.touch()
        self.code: int | None = None
        """Negative for a signal; None while it lives."""
        reading, writing = os.pipe()
        self.pipe: int | None = reading
        """None once all was taken."""
        self.pid = os.fork()
        if self.pid == 0:
            os.close(reading)
            _be(work, writing, log)
        os.close(writing)

    def take(self) -> bool:
        """Take what was told; False once nothing more can come."""
        data = b"" if self.pipe is None else os.read(self.pipe, 65536)
        *whole, self._rest = (self._rest + data).split(b"\n")
        self.lines += [line.decode() for line in whole]
        return bool(data)

    def has_ended(self) -> bool:
        if self.code is None:
            gone, status = os.waitpid(self.pid, os.WNOHANG)
            if gone:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code is not None

    def kill(self, number: int = signal.SIGKILL) -> None:
        if not self.has_ended():  # not yet waited for: still its own
            os.kill(self.pid, number)


class Team:
    """The ranks of one run, each on a host of its own or all on this one."""

    def __init__(
        self, words: Sequence[str], size: int, cache: Path, logs: Path, hosts: Hosts | None,
        *, tells_imports: bool = False,
    ) -> None:  # fmt: skip
        """`tells_imports`: rank 0 names, at its end, all modules that it has imported."""
        self.began = time.monotonic()
        address, port = (address_of(0), PORT) if hosts else ("127.0.0.1", _free_port())
        self.ranks = [
            Rank(
                _Member(words, rank, size, address, port, cache, hosts, tells_imports),
                logs / f"{rank}.log",
            )
            for rank in range(size)
        ]

    def follow(self, until: float, wanted: Callable[[], bool] = lambda: False) -> bool:
        """Take what is told until `wanted`; False if the time or all ranks ended first."""
        listening = {rank.pipe: rank for rank in self.ranks if rank.pipe is not None}
        while not wanted():
            left = until - time.monotonic()
            if left <= 0 or not listening:
                return False
            for pipe in select.select(list(listening), [], [], left)[0]:
                if not listening[pipe].take():
                    del listening[pipe]
        return True

    def end(self, until: float) -> bool:
        """Wait until all have ended, and kill those that have not; return if all had."""
        self.follow(until)
        while not self.is_over() and time.monotonic() < until:
            time.sleep(0.005)
        was_over = self.is_over()
        self.kill()
        return was_over

    def is_over(self) -> bool:
        return all(rank.has_ended() for rank in self.ranks)

    def kill(self) -> None:
        """End all processes."""
        for rank in self.ranks:
            rank.kill(signal.SIGKILL)
        for rank in self.ranks:
            while not rank.has_ended():
                time.sleep(0.001)
            if rank.pipe is not None:
                while rank.take():
                    pass
                os.close(rank.pipe)
                rank.pipe = None


class _Member:
    """What one rank does."""

    def __init__(
        self, words: Sequence[str], rank: int, size: int, address: str, port: int, cache: Path,
        hosts: Hosts | None, tells_imports: bool,
    ) -> None:  # fmt: skip
        self._words, self._rank, self._hosts = words, rank, hosts
        self._tells_imports = tells_imports and rank == 0
        self._environment = {
            "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": "0",
            "MASTER_ADDR": address, "MASTER_PORT": str(port), "MEGATRAIN_CACHE": str(cache),
        }  # fmt: skip

    def __call__(self, tell: Tell) -> None:
        os.environ.update(self._environment)
        if self._hosts is not None:
            self._hosts.enter(self._rank)
        vars(banner)["SAMPLE_TOKENS"] = 2  # time is better spent on disturbances
        _announce(tell)
        # What it spawns imports the main module again: that of the command line, not this one.
        sys.modules["__main__"] = sys.modules["megatrain.__main__"]
        sys.argv = ["megatrain", *self._words]
        megatrain()
        for name in list(sys.modules) if self._tells_imports else ():
            tell(f"imported {name}")


def _announce(tell: Tell) -> None:
    """Tell of each save before it begins and after it is acknowledged."""
    save = vars(checkpoints)["save_checkpoint"]

    def telling_save(parent: Any, parts: Any, snapshot: Any, *rest: Any, **more: Any) -> Any:
        tell(f"saving {snapshot.num_steps}")
        saved = save(parent, parts, snapshot, *rest, **more)
        tell(f"saved {snapshot.num_steps}")
        return saved

    vars(checkpoints)["save_checkpoint"] = telling_save


def _be(work: Callable[[Tell], None], pipe: int, log: Path) -> None:
    """Work in this fork, and end as an interpreter does."""
    end_with_parent()
    sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    code: Any = 1
    try:
        work(lambda line: _tell(pipe, line))
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(code if isinstance(code, int) else 1)


def _tell(fd: int, line: str) -> None:
    os.write(fd, line.encode() + b"\n")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
