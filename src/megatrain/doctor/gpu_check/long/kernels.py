"""Part `kernels`: one step under torch's profiler, beside the trace of the lanes.

    kernels-trace.json.gz   kernels, launches and the lanes' ops by name, for Perfetto
    lanes of that step      kernels-lanes.json: the same step by the lanes' own clock

Where the profiler sees no kernels of a device, the ops of the host's threads are listed instead.

Laws (tests/doctor/gpu_check/long/test_kernels.py)
    1. Time without a kernel is what no interval covers, between the first and the last.
    2. A launch counts for the op whose range its thread was in.
"""

from __future__ import annotations

import gzip
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, supported_activities

from megatrain.devices.runtime import Runtime
from megatrain.doctor.gpu_check.long.given import Given
from megatrain.doctor.gpu_check.long.long_model import (
    long_model,
    planned_step,
    steps_of,
)
from megatrain.text import percent

KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
"""Kinds of events that a device does, by the names of the trace."""
LAUNCHES = ("cuda_runtime", "cuda_driver", "xpu_runtime")
_NVTX = "MEGATRAIN_NVTX"
_MOST_ROWS = 20
_MOST_BYTES = 24 << 20
"""Largest size of the trace in the archive."""
Event = Mapping[str, Any]


class Named:
    """A runtime whose ops are named to torch's profiler."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    def named_range(self, name: str) -> AbstractContextManager[object]:
        return record_function(name)


def measure(given: Given) -> dict[str, Any]:
    """Return the kernels of one step, and attach both traces."""
    model = long_model(given.profile, given.scale)
    plan = planned_step(given, model)
    runtime = given.subject.runtime
    named = given.subject if runtime is None else replace(given.subject, runtime=Named(runtime))
    steps = replace(steps_of(given, model), subject=named)
    micro = plan.settings.micro_batch_tokens
    batch = model.with_step(model.step_tokens, packed=True, micro=micro).batch()
    given.say(f"one step of {model.step_tokens:,} tokens under torch's profiler")
    all_threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with _named_ops(), steps.engine(plan.settings, named.new_device()) as engine:
        for _ in range(2):
            engine.step(batch)
        engine.settle()
        assert engine.trace is not None
        engine.trace.spans.clear()
        with profile(activities=_activities(), experimental_config=all_threads) as profiled:
            engine.step(batch)
            engine.settle()
    given.attach("kernels-lanes.json", engine.trace.last_step().to_json().encode())
    path = given.scratch / "trace.json"
    profiled.export_chrome_trace(str(path))
    trace = json.loads(path.read_text())
    events = [event for event in trace["traceEvents"] if "dur" in event]
    kept = {"deviceProperties": trace.get("deviceProperties", []), "traceEvents": events}
    packed = gzip.compress(json.dumps(kept).encode())
    if len(packed) <= _MOST_BYTES:
        given.attach("kernels-trace.json.gz", packed)
    found = summary(events)
    found["figures"]["trace_bytes"] = len(packed)
    return found


@contextmanager
def _named_ops() -> Iterator[None]:
    """Let lanes name their ops."""
    before = os.environ.get(_NVTX)
    os.environ[_NVTX] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NVTX]
        else:
            os.environ[_NVTX] = before


def _activities() -> list[ProfilerActivity]:
    known = supported_activities()  # type: ignore[no-untyped-call]
    wanted = (ProfilerActivity.CPU, ProfilerActivity.CUDA, ProfilerActivity.XPU)
    return [activity for activity in wanted if activity in known]


def summary(events: Sequence[Event]) -> dict[str, Any]:
    """Return the longest kernels, the launches of each kind of op, and the time without kernels."""
    kernels = [event for event in events if event.get("cat") in KERNELS]
    shown = kernels or [event for event in events if event.get("cat") == "cpu_op"]
    first, last = _extent(shown)
    without = uncovered(shown)
    total = sum(event["dur"] for event in shown)
    rows = [
        {
            "name": name[:120],
            "calls": len(durations),
            "total_s": sum(durations) / 1e6,
            "share": sum(durations) / total if total else 0.0,
        }
        for name, durations in _longest(shown)
    ]
    what = "kernel" if kernels else "op of torch in any thread"
    lead = f"No {what} ran for {percent(without / max(last - first, 1e-9))} of the step."
    if not kernels:
        lead += " The profiler sees no kernels of this device: these are ops of the host's threads."
    return {
        "lead": lead,
        "figures": {
            "events": len(shown),
            "extent_s": (last - first) / 1e6,
            "without_s": without / 1e6,
            "sees_kernels": bool(kernels),
        },
        "tables": {
            "Longest kernels" if kernels else "Longest ops of torch": rows,
            "Launches by kind of op": launch_rows(events, shown),
        },
    }


def uncovered(events: Iterable[Event]) -> float:
    """Return the time between the first and the last event in which there is none."""
    gaps, end = 0.0, None
    for event in sorted(events, key=lambda event: event["ts"]):
        if end is not None and event["ts"] > end:
            gaps += event["ts"] - end
        end = max(end or 0.0, event["ts"] + event["dur"])
    return gaps


def launch_rows(events: Sequence[Event], work: Sequence[Event]) -> list[dict[str, Any]]:
    """Return, for each kind of op, its number and the launches inside of its ranges.

    Where no launches were traced, ops of torch are counted.
    """
    launches = [event for event in events if event.get("cat") in LAUNCHES] or work
    ranges = [event for event in events if event.get("cat") == "user_annotation"]
    num_ops, inside = Counter[str](), Counter[str]()
    for op in ranges:
        kind = op["name"].partition("(")[0]
        num_ops[kind] += 1
        end = op["ts"] + op["dur"]
        inside[kind] += sum(
            launch["tid"] == op["tid"] and op["ts"] <= launch["ts"] < end for launch in launches
        )
    return [
        {"op": kind, "ops": count, "launches_per_op": inside[kind] / count}
        for kind, count in num_ops.most_common()
    ]


def _longest(events: Iterable[Event]) -> list[tuple[str, list[float]]]:
    by_name: dict[str, list[float]] = {}
    for event in events:
        by_name.setdefault(event["name"], []).append(event["dur"])
    return sorted(by_name.items(), key=lambda item: -sum(item[1]))[:_MOST_ROWS]


def _extent(events: Sequence[Event]) -> tuple[float, float]:
    first = min((event["ts"] for event in events), default=0.0)
    return first, max((event["ts"] + event["dur"] for event in events), default=first)
