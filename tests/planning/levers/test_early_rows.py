"""Rows of the embedding are made ahead of its update where forward would wait for the table."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from megatrain.planning.costs import Costs
from megatrain.planning.levers.early_rows import rows_made_ahead
from megatrain.planning.machine.profile import NOT_MEASURED, MachineProfile
from megatrain.planning.plan import Plan, make_plan
from megatrain.planning.simulate import simulate, steady_step, step_shape
from megatrain.planning.workload import Workload
from megatrain.step.ops import OpKind
from megatrain.step.settings import StepSettings
from testkit.machines import DESKTOP, EIGHT, GIB

ROOMY = DESKTOP.changed(ram_bytes=256 * GIB)
SHORT = Workload(model=EIGHT, step_tokens=16384)


def plan_of(profile: MachineProfile = ROOMY, workload: Workload = SHORT, **pinned: Any) -> Plan:
    return make_plan(profile, workload, StepSettings(**pinned), dict.fromkeys(pinned, "set by you"))


def test_a_short_step_waits_for_rows_and_not_for_the_table() -> None:
    first, ahead = plan_of(rows_ahead=False), plan_of()
    assert ahead.settings.rows_ahead
    assert ahead.settings.gather_embedding
    assert ahead.step_s < 0.99 * first.step_s
    assert re.fullmatch(r"\+\d+\.\d%: forward waits for no table", ahead.reasons["rows_ahead"])
    assert "rows_ahead" in ahead.text(details=True)
    assert "rows_ahead" not in first.text(details=True).replace("set by you", "")


@pytest.mark.merge
@pytest.mark.parametrize(
    ("profile", "workload", "pinned"),
    [
        (ROOMY, replace(SHORT, step_tokens=1 << 20), {}),
        (ROOMY, replace(SHORT, max_grad_norm=None), {}),
        (ROOMY, replace(SHORT, model=replace(EIGHT, tied=True)), {}),
        (ROOMY, SHORT, {"gather_embedding": False}),
        (ROOMY, SHORT, {"state": "8bit"}),
        (ROOMY.changed(disk_bytes=2000 * GIB), SHORT, {"tier": "states"}),
        (ROOMY.changed(source=NOT_MEASURED), SHORT, {}),
    ],
)
def test_others_update_the_table_in_its_turn(
    profile: MachineProfile, workload: Workload, pinned: dict[str, Any]
) -> None:
    assert not plan_of(profile, workload, **pinned).settings.rows_ahead


def test_rows_cost_their_update_and_copies() -> None:
    settings = StepSettings(gather_embedding=True, rows_ahead=True)
    ops = steady_step(step_shape(settings, SHORT, unified=False))
    costs = Costs(ROOMY, SHORT, settings)
    rows, table = (
        costs.of(next(op for op in ops if op.kind is kind and op.block == 0))
        for kind in (OpKind.ROWS, OpKind.UPDATE)
    )
    share = rows_made_ahead(SHORT) / EIGHT.embedding.trained_elements()
    assert share < 0.2
    assert share * table.seconds < rows.seconds < 4 * share * table.seconds
    assert simulate(ROOMY, SHORT, settings).step_s > 0
