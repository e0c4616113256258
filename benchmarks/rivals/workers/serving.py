"""What every worker does alike: it reads its job, and takes one step for each line that it gets.

    PYTHONPATH=. PYTHON -P benchmarks/rivals/workers/plain.py JOB.json

A worker prints JSON lines on stdout; all else goes to stderr.

    {"ready": true, "seconds": ..., "params": ...}      seconds since the process began
    {"loss": ..., "seconds": ..., "processor_s": ..., "peak_bytes": ..., "grad_norm": ...}
                                                        for each line `step`

`loss` is the mean over the predicted tokens of the step, before the update; `grad_norm` the one
before clipping, or null. `peak_bytes` is VmHWM: the most that was ever resident, loading and mapped
files included, for all workers alike. With a device of its own memory, `device_bytes` is the most
that torch held there. At the end of stdin the worker ends.

This module needs torch and numpy alone. `-P` keeps a worker from shadowing the package that it is
named for.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to train, and how: the same file for every rival but for `settings`."""

    model: str
    """A Hugging Face folder."""
    tokens: str
    """An .npy file, int64, (steps, rows, sequence). After the last step the first comes again."""
    micro_batches: int = 1
    """The rows of a step are divided among so many."""
    lr: float = 1e-5
    rates: Sequence[float] = ()
    """Of each step, instead of `lr`. After the last one the first comes again."""
    weight_decay: float = 0.01
    """Of matrices; norms and biases are not decayed."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    max_grad_norm: float | None = 1.0
    dtype: str = "float32"
    """float32: everything; bfloat16: compute, with fp32 masters; pure_bfloat16: no masters."""
    threads: int = 2
    device: str = "cpu"
    settings: dict[str, Any] = field(default_factory=dict)
    """Of the rival alone."""

    def write(self, path: Path) -> Path:
        """Write the job to a file, and return its path."""
        path.write_text(json.dumps(asdict(self), indent=1))
        return path

    @classmethod
    def read(cls, path: str | Path) -> Job:
        """Return the job of a file."""
        fields = json.loads(Path(path).read_text())
        return cls(**fields | {"betas": tuple(fields["betas"])})

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        return self.rates[step % len(self.rates)] if self.rates else self.lr

    def batch(self, step: int) -> list[Tensor]:
        """Return the micro-batches of a step, counted from 0, each (rows, sequence)."""
        tokens = np.load(self.tokens, mmap_mode="r")
        rows = torch.from_numpy(tokens[step % len(tokens)].copy())
        return list(rows.chunk(self.micro_batches))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A rival that is ready to train."""

    params: int
    step: Callable[[Sequence[Tensor]], tuple[float, float | None]]
    """One optimizer step on micro-batches: the loss, and the norm of the gradient."""
    close: Callable[[], object] = lambda: None
    param_groups: Sequence[dict[str, Any]] = ()
    """Of a torch optimizer: where the rate of each step is set."""


def serve(prepare: Callable[[Job], Prepared]) -> None:
    """Do the job that the command line names, step by step, until stdin ends."""
    answers = _take_stdout()
    job = Job.read(sys.argv[1])
    torch.set_num_threads(job.threads)
    prepared = prepare(job)
    _say(answers, ready=True, seconds=_seconds_since_start(), params=prepared.params)
    for number, _ in enumerate(sys.stdin):
        batch = job.batch(number)
        for group in prepared.param_groups:
            group["lr"] = job.rate(number)
        begin, worked = time.perf_counter(), time.process_time()
        loss, grad_norm = prepared.step(batch)
        if job.device != "cpu":
            torch.accelerator.synchronize()
        seconds, processor_s = time.perf_counter() - begin, time.process_time() - worked
        found = {"loss": loss, "seconds": seconds, "processor_s": processor_s}
        found["peak_bytes"] = peak_bytes()
        if job.device != "cpu":
            found["device_bytes"] = torch.accelerator.max_memory_allocated()
        _say(answers, **found, grad_norm=grad_norm)
    prepared.close()


def decayed_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return param groups for an optimizer: matrices are decayed, norms and biases are not."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]


def peak_bytes() -> int:
    """Return the most that was ever resident. Not ru_maxrss: that one counts the parent's too."""
    match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


def _take_stdout() -> int:
    """Return a file descriptor for answers; what others print on stdout goes to stderr."""
    sys.stdout.flush()
    answers = os.dup(1)
    os.dup2(2, 1)
    return answers


def _say(answers: int, **facts: object) -> None:
    os.write(answers, json.dumps(facts).encode() + b"\n")


def _seconds_since_start() -> float:
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    now = float(Path("/proc/uptime").read_text().split()[0])
    return now - started / os.sysconf("SC_CLK_TCK")
