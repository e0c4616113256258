"""Workers as processes: started in their environments, one step at a time, idle in between.

A worker that waits is stopped (SIGSTOP), so that threads that spin take nothing from the others.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from benchmarks.rivals.environments import ENVIRONMENTS, python_of

WORKERS = Path(__file__).parent / "workers"
ROOT = Path(__file__).parents[2]
HOMES = {"plain": "hf", "trainer": "hf", "fsdp2": "hf", "deepspeed": "deepspeed"}
"""The environment of each rival's worker; ours runs in this one."""


class WorkerFailed(Exception):
    """A worker ended before it answered."""

    def __init__(self, name: str, returncode: int, text: str) -> None:
        super().__init__(f"{name} ended with {returncode}:\n{text[-400:]}")
        self.returncode = returncode


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """One step of a worker."""

    loss: float
    seconds: float
    processor_s: float
    """Of all threads of the process: a busy machine changes it less."""
    peak_bytes: int
    grad_norm: float | None
    device_bytes: int | None = None


class Contestant:
    """A worker on one job. Use it in a `with` block, or `close` it."""

    def __init__(
        self,
        name: str,
        job: Path,
        *,
        python: str | Path | None = None,
        before: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`before` starts the command, and `python` is instead of the environment's."""
        self.name = name
        self.command = command(name, job, python)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the worker)
        self._process = subprocess.Popen(
            [*before, *self.command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, **variables(name), **(environment or {})},
            text=True,
            start_new_session=True,
        )

    def ready(self) -> dict[str, Any]:
        """Wait until the model is loaded; return `seconds` since the start, and `params`."""
        return self._answer()

    def step(self) -> Taken:
        """Take one step, while all others wait. Raises WorkerFailed."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write("step\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended, and its answer says why
        return Taken(**self._answer())

    def close(self) -> None:
        """Let the worker end, and wait for it."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        with self._process, self._errors:
            self._process.stdin.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                self._signal(signal.SIGSTOP)
                found: dict[str, Any] = json.loads(line)
                return found
        returncode = self._process.wait()
        self._errors.seek(0)
        raise WorkerFailed(self.name, returncode, self._errors.read().decode(errors="replace"))

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)


def command(name: str, job: Path, python: str | Path | None = None) -> list[str]:
    """Return the command of a worker."""
    if python is None:
        python = python_of(HOMES[name]) if name in HOMES else sys.executable
    return [str(python), "-P", str(WORKERS / f"{name}.py"), str(job)]


def variables(name: str) -> Mapping[str, str]:
    """Return what a worker finds in its environment besides ours."""
    if name not in HOMES:
        return {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    own = ENVIRONMENTS[HOMES[name]].variables
    return {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", **own}
