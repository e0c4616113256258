"""The plan's host memory against what was resident: 42 configurations, each in its own process."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.plan.configurations import Configuration, plain_profile
from megatrain.memory.host import resident_bytes
from megatrain.memory.ledger import Ledger
from megatrain.planning.memory.predicted import predicted_ledger

GIVING_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
MEMORY_TARGETS = {"worst": 0.03}


_SIZES = [(128, 384, 2), (256, 768, 4), (512, 1408, 4), (512, 1408, 8), (768, 2048, 8)]
NOTHING = Configuration(hidden=128, inner=256, layers=1, vocab=512, length=64)


def memory_configurations() -> list[Configuration]:
    """Return 42: sizes, policies, places, micro-batches, states, tiers, adapters."""
    found = []
    for number, (hidden, inner, layers) in enumerate(_SIZES):
        size: dict[str, Any] = {"hidden": hidden, "inner": inner, "layers": layers}
        longer: dict[str, Any] = {"rows": 2, "length": 512}
        found += [
            Configuration(**size, update="late", **longer),
            Configuration(**size, update="in_backward", num_micro=3),
            Configuration(**size, update="late", device="copies", tape="host", num_micro=2),
            Configuration(**size, update="in_backward", device="copies", slots=2 + number % 3),
        ]
    middle: dict[str, Any] = {"hidden": 1024, "inner": 2816, "vocab": 32000}
    found += [
        Configuration(**middle, layers=4, update="late"),
        Configuration(**middle, layers=4, update="in_backward", tied=True),
        Configuration(**middle, layers=4, update="late", rows=4, chunk_tokens=256),
        Configuration(**middle, layers=8, update="in_backward", num_micro=2, length=128),
        Configuration(**middle, layers=8, update="late", device="copies", tape="host"),
        Configuration(**middle, layers=12, update="late", length=512),
        Configuration(**middle, layers=16, update="in_backward", length=128),
        Configuration(**middle, layers=16, update="late", device="copies", slots=4, length=64),
    ]
    large: dict[str, Any] = middle | {"hidden": 1792, "inner": 6144, "layers": 16, "length": 64}
    found += [
        Configuration(**large, update="in_backward"),
        Configuration(**large, update="late", num_micro=2),
    ]
    for state in ("bf16", "8bit"):
        found += [
            Configuration(**middle, layers=8, update="late", state=state),
            Configuration(**middle, layers=8, update="in_backward", device="copies", state=state),
            Configuration(**large, update="late", state=state),
        ]
    found += [
        Configuration(**middle, layers=8, update="late", tier="states"),
        Configuration(**middle, layers=8, update="late", tier="states", device="copies"),
        Configuration(**middle, layers=8, update="in_backward", tier="states", state="8bit"),
    ]
    found += [
        Configuration(**middle, layers=16, update="late", rank=16),
        Configuration(**middle, layers=8, update="late", device="copies", tape="host", rank=16),
        Configuration(**large, update="late", rank=64),
    ]
    return found


def predicted_bytes(configuration: Configuration, base_bytes: int) -> int:
    """Return the host total of the ledger for a run that saves nothing."""
    profile = plain_profile(base_bytes).changed(unified=configuration.device == "views")
    return held_on_host(predicted_ledger(profile, configuration.workload, configuration.settings))


def held_on_host(ledger: Ledger) -> int:
    """Return the planned bytes of host memory in a run that saves nothing."""
    saves = sum(line.num_bytes for line in ledger.lines if line.purpose == "save buffers")
    return ledger.total("host") - saves


def compared(predicted: float, measured: float) -> dict[str, object]:
    """Return the figures of a row."""
    return {
        "predicted_mib": round(predicted / 2**20, 1),
        "measured_mib": round(measured / 2**20, 1),
        "ratio": round(predicted / measured, 4),
    }


def errors_of(rows: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Return how far plan and measurement are apart in such rows, which come with it."""
    errors = [abs(float(str(row["ratio"])) - 1) for row in rows]
    return {
        "configurations": len(rows),
        "worst": round(max(errors), 4),
        "median": round(statistics.median(errors), 4),
        "rows": rows,
        "targets": MEMORY_TARGETS,
    }


def measure_memory(
    chosen: Sequence[Configuration], environment: Mapping[str, str]
) -> dict[str, object]:
    """Return the figures with --memory."""
    base = _alone(NOTHING, environment)["peak"] - predicted_bytes(NOTHING, 0)
    rows: list[dict[str, object]] = []
    for configuration in chosen:
        measured = _alone(configuration, environment)["peak"]
        predicted = predicted_bytes(configuration, base)
        named = {"configuration": str(configuration), "params": configuration.model.params}
        rows.append(named | compared(predicted, measured))
        print(rows[-1], file=sys.stderr, flush=True)
    return {"base_mib": round(base / 2**20, 1), **errors_of(rows)}


def _alone(configuration: Configuration, environment: Mapping[str, str]) -> dict[str, int]:
    """Return the resident bytes of two steps in a process of their own."""
    command = [sys.executable, "-m", "benchmarks.plan", "--alone"]
    command.append(json.dumps(asdict(configuration)))
    variables = {**os.environ, **environment}
    output = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, env=variables
    ).stdout
    figures: dict[str, int] = json.loads(output)
    return figures


def run_alone(configuration: Configuration) -> dict[str, int]:
    """Take two steps; return what was resident at most, and afterwards."""
    with configuration.engine() as engine:
        for _ in range(2):
            engine.step(configuration.batch())
    del engine
    peak = peak_bytes()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return {"peak": peak, "settled": resident_bytes()}


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    match = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert match is not None
    return int(match[1]) * 1024
