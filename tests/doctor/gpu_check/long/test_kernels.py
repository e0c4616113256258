"""Kernels of a trace: the longest, the launches of each op, the time without any."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from megatrain.doctor.gpu_check.long.kernels import measure, summary, uncovered
from tests.doctor.gpu_check.long.givens import Kept, given_on_cpu


def event(cat: str, name: str, ts: float, dur: float, tid: int = 1) -> dict[str, Any]:
    return {"cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid}


EVENTS = [
    event("user_annotation", "FORWARD(1,0)", 0, 10),
    event("user_annotation", "FORWARD(2,0)", 10, 10),
    event("user_annotation", "FETCH(1)", 0, 5, tid=2),
    event("cuda_runtime", "cudaLaunchKernel", 1, 1),
    event("cuda_runtime", "cudaLaunchKernel", 3, 1),
    event("cuda_runtime", "cudaLaunchKernel", 12, 1),
    event("cuda_runtime", "cudaMemcpyAsync", 2, 1, tid=2),
    event("kernel", "gemm", 100, 40, tid=7),
    event("kernel", "norm", 150, 10, tid=7),
    event("gpu_memcpy", "copy", 120, 60, tid=8),
]


def test_time_without_kernels_is_what_no_interval_covers() -> None:
    assert uncovered(event("kernel", "x", ts, dur) for ts, dur in [(0, 10), (5, 3), (20, 5)]) == 10
    assert uncovered([]) == 0
    kernels = [one for one in EVENTS if one["cat"] in ("kernel", "gpu_memcpy")]
    assert uncovered(kernels) == 0
    assert uncovered(one for one in kernels if one["cat"] == "kernel") == 10


def test_launches_count_for_the_op_of_their_thread() -> None:
    found = summary(EVENTS)
    rows = {row["op"]: row for row in found["tables"]["Launches by kind of op"]}
    assert rows["FORWARD"] == {"op": "FORWARD", "ops": 2, "launches_per_op": 1.5}
    assert rows["FETCH"]["launches_per_op"] == 1
    longest = [row["name"] for row in found["tables"]["Longest kernels"]]
    assert longest == ["copy", "gemm", "norm"]
    assert found["lead"] == "No kernel ran for 0 % of the step."


@pytest.mark.merge
def test_a_step_is_profiled_and_says_that_it_saw_no_kernels(tmp_path: Path) -> None:
    kept = Kept()
    found = measure(given_on_cpu(kept, tmp_path))
    assert "sees no kernels of this device" in found["lead"]
    assert found["tables"]["Longest ops of torch"]
    trace = json.loads(gzip.decompress(kept.files["kernels-trace.json.gz"]))
    assert set(trace) == {"deviceProperties", "traceEvents"}
    assert str(tmp_path) not in json.dumps(trace)
    assert b"BACKWARD" in kept.files["kernels-lanes.json"]
