"""The undisturbed leg: one process for all steps, watched from outside; its memory must stay flat.

rss_growth      resident memory over the last 80 % of all steps: the median of the last tenth of
                them relative to that of the first tenth, less 1
heap_per_step   Python blocks that each of these steps has left behind, garbage collected
threads, files  the same for threads and open files: last median less first
children        the same for processes that it has started; rss_growth counts their memory too
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from proofs.crash.forks import Tell

PROGRAM = [sys.executable, "-m", "proofs.soak.process"]
WARM_SHARE = 0.2
"""Of all steps: caches fill and allocators settle."""
SAMPLE_S = 0.1
TARGETS = {"rss_growth": 0.01, "heap_per_step": 0.5, "threads": 0, "files": 0, "children": 0}
"""The most of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A process after a step, seen from outside."""

    step: int
    rss_bytes: int
    num_threads: int
    num_files: int
    num_children: int


def watched(config: Path, cache: Path, num_steps: int, tell: Tell) -> dict[str, Any]:
    """Train to the end in a new process; return how flat it was. Tells when it has `opened`."""
    told, log = config.with_suffix(".told"), config.with_suffix(".log")
    heap_after = [int(WARM_SHARE * num_steps) - 1, num_steps - 1]
    words = [*PROGRAM, str(told), str(config), *map(str, heap_after)]
    variables = {**os.environ, "MEGATRAIN_CACHE": str(cache)}
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(words, env=variables, stdout=output, stderr=output)
    try:
        samples = _samples(process, told, tell)
    finally:
        process.kill()
        process.wait()
    if process.returncode != 0:
        raise RuntimeError(f"ended with {process.returncode}: {log.read_text()[-2000:]}")
    heaps = [int(line.split()[2]) for line in _lines(told) if line.startswith("heap ")]
    found = flatness([sample for sample in samples if sample.step < num_steps], num_steps)
    found["heap_per_step"] = round((heaps[1] - heaps[0]) / (heap_after[1] - heap_after[0]), 3)
    return found | {"seconds": round(time.monotonic() - began, 1)}


def flatness(samples: Sequence[Sample], num_steps: int) -> dict[str, Any]:
    """Return by how much memory, threads and files have grown after the warm-up."""
    warm = WARM_SHARE * num_steps
    tenth = (num_steps - warm) / 10
    first = [sample for sample in samples if warm <= sample.step < warm + tenth]
    last = [sample for sample in samples if num_steps - tenth <= sample.step]
    begin, end = (median(sample.rss_bytes for sample in part) for part in (first, last))
    most = max(sample.rss_bytes for sample in samples if sample.step >= warm)
    return {
        "rss_mib": round(end / 2**20, 1),
        "rss_growth": round(end / begin - 1, 5),
        "rss_most_over_first": round(most / begin - 1, 5),
        "threads": _more(first, last, "num_threads"),
        "files": _more(first, last, "num_files"),
        "children": _more(first, last, "num_children"),
        "samples": len(samples),
    }


def too_much(found: dict[str, Any]) -> list[str]:
    """Return what has grown by more than TARGETS allow."""
    return [
        f"{name} is {found[name]}, at most {most}"
        for name, most in TARGETS.items()
        if found[name] > most
    ]


def _samples(process: subprocess.Popen[bytes], told: Path, tell: Tell) -> list[Sample]:
    """Look at the process that tells in `told` until the one that was started ends."""
    seen: psutil.Process | None = None
    samples: list[Sample] = []
    while process.poll() is None:
        time.sleep(SAMPLE_S)
        lines = _lines(told)
        if seen is None and any(line.startswith("opened ") for line in lines):
            seen = psutil.Process(int(lines[0].split()[1]))
            tell("opened")
        steps = [line for line in lines if line.startswith("step ")]
        if seen is None or not steps:
            continue
        with suppress(psutil.Error, OSError), seen.oneshot():  # it has just ended
            children = _children(seen.pid)
            samples.append(
                Sample(
                    step=int(steps[-1].split()[1]),
                    rss_bytes=sum(one.memory_info().rss for one in (seen, *children)),
                    num_threads=seen.num_threads(),
                    num_files=seen.num_fds(),
                    num_children=len(children),
                )
            )
    return samples


def _children(pid: int) -> list[psutil.Process]:
    """Return the processes that any thread of a process has started; psutil would look at all."""
    found = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [psutil.Process(int(child)) for text in found for child in text.split()]


def _lines(told: Path) -> list[str]:
    """Return the complete lines."""
    return told.read_text().split("\n")[:-1] if told.exists() else []


def _more(first: Sequence[Sample], last: Sequence[Sample], name: str) -> int:
    before, after = (median(getattr(one, name) for one in part) for part in (first, last))
    return int(after - before)
