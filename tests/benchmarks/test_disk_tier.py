"""The benchmark of the disk tier, on a model of no size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.disk_tier import MODES, SHARES, Steps, measure_speed
from benchmarks.plan.configurations import Configuration
from megatrain.step.ops import OpKind
from testkit.states import threads_end

TINY: dict[str, Any] = {"hidden": 64, "inner": 64, "layers": 3, "vocab": 128}


def test_every_mode_is_measured_against_memory_and_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with threads_end():
        rows = measure_speed(1, 1, TINY)
    assert len(rows) == len(MODES) * len(SHARES)
    assert all(row["over_bound"] > 0 for row in rows)
    assert list(tmp_path.iterdir()) == []


def test_the_raw_disk_moves_what_a_step_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    steps = Steps(Configuration(**TINY, update="late", tier="gradients"))
    steps.begin()
    moves = steps.moves()
    steps.close()
    for kind in (OpKind.READ, OpKind.WRITE, OpKind.SPILL):
        assert sorted(block for found, block, _ in moves if found is kind) == list(range(5))
    num_bytes = {kind: sum(n for found, _, n in moves if found is kind) for kind in OpKind}
    assert num_bytes[OpKind.READ] == num_bytes[OpKind.WRITE] + num_bytes[OpKind.SPILL]
