"""Part `host`: the stacks of the lanes' threads, 100 times a second, and each thread's CPU time.

A lane that issues work is in torch; one that waits sleeps, and takes no CPU time: a thread that is
busy where it should wait is seen at once. Threads of libraries have the names that the system
knows.

Law (tests/doctor/gpu_check/long/test_host_threads.py): a thread that spins has the CPU time, and
its function is the first of its stacks.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from megatrain.doctor.gpu_check.long.given import Given
from megatrain.doctor.gpu_check.long.long_model import (
    long_model,
    planned_step,
    step_facts,
    steps_of,
)
from megatrain.doctor.timed_step import median_seconds
from megatrain.memory.host import read_system_file
from megatrain.text import percent

EVERY_S = 0.01
SECONDS = 20.0
_TASKS = Path("/proc/self/task")
_MOST_STACKS = 5
_TICKS = 100.0
"""Ticks per second of the system's clock for CPU time."""


def measure(given: Given) -> dict[str, Any]:
    """Return the CPU time and the usual stacks of each thread during steps."""
    model = long_model(given.profile, given.scale)
    plan = planned_step(given, model)
    micro = plan.settings.micro_batch_tokens
    batch = model.with_step(model.step_tokens, packed=True, micro=micro).batch()
    steps = steps_of(given, model)
    seconds = given.scale * min(SECONDS, given.left_s() / 2)
    with steps.engine(plan.settings, given.subject.new_device()) as engine:
        step_s = median_seconds(engine, batch, 1)
        given.say(f"stacks of the host's threads for {seconds:.0f} s of steps")
        sampled = sampled_while(
            lambda: median_seconds(engine, batch, max(1, int(seconds / max(step_s, 1e-3))))
        )
    assert engine.trace is not None
    busiest = max(sampled["CPU time"], key=lambda row: row["share"], default=None)
    lead = "No thread was seen."
    if busiest is not None:
        lead = f"The busiest thread is `{busiest['thread']}`, at {percent(busiest['share'])}."
    figures = step_facts(step_s, engine.trace, model.step_tokens)
    return {"lead": lead, "figures": figures, "tables": sampled}


def sampled_while(work: Callable[[], object]) -> dict[str, list[dict[str, Any]]]:
    """Do the work; return the CPU time of each thread, and the usual stacks of Python's."""
    stacks: dict[str, Counter[str]] = {}
    ended = threading.Event()

    def sample() -> None:
        own = threading.get_ident()
        while not ended.wait(EVERY_S):
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            for ident, frame in sys._current_frames().items():
                if ident != own:
                    seen = stacks.setdefault(names.get(ident, "another thread"), Counter())
                    seen[stack_text(frame)] += 1

    before, begin = cpu_seconds(), time.monotonic()
    sampler = threading.Thread(target=sample, name="sampler", daemon=True)
    sampler.start()
    try:
        work()
    finally:
        ended.set()
        after, seconds = cpu_seconds(), time.monotonic() - begin
        sampler.join()
    used: dict[str, float] = {}
    for key, (name, total) in after.items():
        used[name] = used.get(name, 0.0) + total - before.get(key, ("", 0.0))[1]
    return {
        "CPU time": [
            {"thread": name, "cpu_s": cpu, "share": cpu / seconds}
            for name, cpu in sorted(used.items(), key=lambda item: -item[1])
            if cpu > 0
        ],
        "Stacks": [
            {"thread": name, "share": count / sum(seen.values()), "stack": text}
            for name, seen in sorted(stacks.items())
            for text, count in seen.most_common(_MOST_STACKS)
        ],
    }


def stack_text(frame: FrameType) -> str:
    """Return the innermost function of a thread, and the innermost one of ours that called it."""
    found, at = [_name(frame)], frame.f_back
    while at is not None and not found[-1].startswith("megatrain."):
        if (name := _name(at)).startswith("megatrain."):
            found.append(name)
        at = at.f_back
    return " < ".join(found)


def _name(frame: FrameType) -> str:
    module = frame.f_globals.get("__name__", "?")
    return f"{module}:{frame.f_code.co_name}:{frame.f_lineno}"


def cpu_seconds() -> dict[int, tuple[str, float]]:
    """Return the name and the CPU time of each thread of this process, by its number."""
    python = {thread.native_id: thread.name for thread in threading.enumerate()}
    found: dict[int, tuple[str, float]] = {}
    for task in _TASKS.glob("[0-9]*"):
        text = read_system_file(task / "stat")
        name, _, rest = text.partition("(")[2].rpartition(")")
        words = rest.split()
        if len(words) > 12:
            number = int(task.name)
            seconds = (int(words[11]) + int(words[12])) / _TICKS
            found[number] = (python.get(number) or f"{name} (no thread of Python's)", seconds)
    return found
