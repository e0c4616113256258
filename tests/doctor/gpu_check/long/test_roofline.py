"""Ops against peaks and plan: what costs what it should is at the plan's time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatrain.doctor.gpu_check.long.roofline import measure, op_rows
from megatrain.lanes.trace import Span
from megatrain.planning.costs import Costs
from megatrain.planning.plan import Plan, make_plan
from megatrain.planning.search import effective_profile
from megatrain.planning.simulate import steady_step, step_shape
from megatrain.planning.workload import Workload
from testkit.machines import DESKTOP, SMALL
from tests.doctor.gpu_check.long.givens import Kept, given_on_cpu

PLAN = make_plan(DESKTOP, Workload(model=SMALL, step_tokens=16384))


def spans_of(plan: Plan, times: float = 1.0) -> list[Span]:
    """A step in which every op takes `times` its cost."""
    profile = effective_profile(plan.profile, plan.ledger)
    costs = Costs(profile, plan.workload, plan.settings)
    ops = steady_step(step_shape(plan.settings, plan.workload, unified=False))
    return [
        Span(0, op.lane, op, 0, round(times * costs.of(op).seconds * 1e9), costs.of(op).num_bytes)
        for op in ops
    ]


def rows_of(times: float) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["op"], row["of"]): row for row in op_rows(PLAN, spans_of(PLAN, times))}


def test_ops_that_cost_what_they_should_are_at_the_plan() -> None:
    rows = rows_of(1.0)
    kinds = {kind for kind, _ in rows}
    assert {"forward", "backward", "head", "fetch", "drain", "update", "norm"} <= kinds
    for row in rows.values():
        assert row["over_plan"] == pytest.approx(1, rel=1e-3), row
    forward = rows["forward", "layer"]
    assert forward["unit"] == "FLOP"
    flops = SMALL.layers[0].matmul_flops_per_token * PLAN.settings.micro_batch_tokens
    assert forward["work"] > flops
    assert 0.3 < forward["of_peak"] <= 1
    assert rows["fetch", "layer"]["of_peak"] == pytest.approx(1, rel=0.25)
    assert rows["update", "layer"]["of_peak"] == pytest.approx(1, rel=0.25)


def test_ops_that_are_slow_have_a_smaller_share_of_the_peak() -> None:
    usual, slow = rows_of(1.0), rows_of(2.0)
    for key, row in slow.items():
        assert row["over_plan"] == pytest.approx(2, rel=1e-3)
        assert row["of_peak"] == pytest.approx(usual[key]["of_peak"] / 2, rel=1e-3)


@pytest.mark.merge
def test_a_step_is_measured_by_op(tmp_path: Path) -> None:
    kept = Kept()
    found = measure(given_on_cpu(kept, tmp_path))
    assert {row["op"] for row in found["tables"]["Ops"]} >= {"forward", "backward", "update"}
    assert found["figures"]["step_s"] > 0
    assert b"FORWARD" in kept.files["lanes-trace.json"]
