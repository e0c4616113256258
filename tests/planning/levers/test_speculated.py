"""Blocks are updated ahead of the norm where late updates hold up a step and memory is left."""

from __future__ import annotations

import re
from typing import Any

import pytest

from megatrain.engine import undo_log
from megatrain.memory.kinds import store_kinds
from megatrain.memory.layout import build_layout
from megatrain.memory.store import Store
from megatrain.models.adapters.lora import Lora
from megatrain.optim.states import STATES
from megatrain.planning.costs import Costs
from megatrain.planning.levers.speculated import UNDO_LOG
from megatrain.planning.machine.profile import NOT_MEASURED, MachineProfile
from megatrain.planning.memory.predicted import predicted_ledger
from megatrain.planning.model.skeleton import shape_of
from megatrain.planning.plan import Plan, make_plan
from megatrain.planning.simulate import simulate, steady_step, step_shape
from megatrain.planning.workload import Workload
from megatrain.step.ops import OpKind
from megatrain.step.settings import StepSettings
from testkit.machines import DESKTOP, EIGHT, GIB
from testkit.rehearsed import decoder_of

ROOMY = DESKTOP.changed(ram_bytes=256 * GIB)
SHORT = Workload(model=EIGHT, step_tokens=16384)
LAYERS = range(1, EIGHT.num_layers + 1)


def plan_of(profile: MachineProfile = ROOMY, workload: Workload = SHORT, **pinned: Any) -> Plan:
    return make_plan(profile, workload, StepSettings(**pinned), dict.fromkeys(pinned, "set by you"))


def test_a_short_step_hides_its_updates_where_memory_is_left() -> None:
    late, ahead = plan_of(speculated_blocks=0), plan_of()
    assert ahead.settings.changed(speculated_blocks=0) == late.settings
    assert 0 < ahead.settings.speculated_blocks < EIGHT.num_blocks
    assert ahead.step_s < 0.9 * late.step_s
    assert late.simulation.chain["optimizer"] > 0.3 * late.step_s
    assert ahead.simulation.chain["optimizer"] < 0.06 * ahead.step_s
    without = simulate(
        ROOMY, SHORT, ahead.settings.changed(update="in_backward", speculated_blocks=0)
    )
    assert ahead.step_s < 1.02 * without.step_s
    assert re.fullmatch(r"\+\d+%; more are not faster", ahead.reasons["speculated_blocks"])


@pytest.mark.merge
def test_what_is_left_of_memory_bounds_them() -> None:
    counts = []
    for ram in (114, 124, 134, 160):
        plan = plan_of(DESKTOP.changed(ram_bytes=ram * GIB))
        assert plan.fits
        counts.append(plan.settings.speculated_blocks)
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert counts[-1] > counts[1] > 0
    reason = plan_of(DESKTOP.changed(ram_bytes=124 * GIB)).reasons["speculated_blocks"]
    assert re.search(r"; \d+ need \d+\.\d [GM]iB more host memory$", reason)


@pytest.mark.parametrize(
    ("profile", "workload", "pinned"),
    [
        (ROOMY, Workload(model=EIGHT, step_tokens=262144), {}),
        (ROOMY, Workload(model=EIGHT, step_tokens=16384, max_grad_norm=None), {}),
        (ROOMY.changed(disk_bytes=2000 * GIB), SHORT, {"tier": "states"}),
        (ROOMY.changed(source=NOT_MEASURED), SHORT, {}),
    ],
    ids=["long steps", "no clipping", "disk", "not measured"],
)
def test_elsewhere_none_is(
    profile: MachineProfile, workload: Workload, pinned: dict[str, Any]
) -> None:
    assert plan_of(profile, workload, **pinned).settings.speculated_blocks == 0


@pytest.mark.parametrize("state", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("lora", [None, Lora(rank=8, alpha=16.0)], ids=["whole", "adapters"])
@pytest.mark.parametrize("blocks", [1, 2, 99])
def test_the_undo_log_to_the_byte(state: Any, lora: Lora | None, blocks: int) -> None:
    decoder = decoder_of("llama", lora=lora)
    workload = Workload(model=shape_of(decoder), step_tokens=64, sequence=64)
    settings = StepSettings(micro_batch_tokens=64, state=state, speculated_blocks=blocks)
    states = STATES["adamw"][state]
    store = Store(build_layout(decoder.blocks, store_kinds(states, waits=True)))
    shape = step_shape(settings, workload, unified=False)
    log = undo_log.UndoLog(store, states, shape.speculated_blocks)
    lines = predicted_ledger(DESKTOP, workload, settings).lines
    (planned,) = (line for line in lines if line.purpose == UNDO_LOG == undo_log.UNDO_LOG)
    assert planned.num_bytes == log.num_bytes > 0


def test_an_update_ahead_costs_its_log_and_leaves_nothing_to_do() -> None:
    settings = StepSettings(micro_batch_tokens=8192, speculated_blocks=4)
    costs = Costs(ROOMY, SHORT, settings)
    found: dict[tuple[OpKind, bool], float] = {}
    for op in steady_step(step_shape(settings, SHORT, unified=False)):
        if op.block in LAYERS:
            found[op.kind, op.speculated] = costs.of(op).seconds - ROOMY.op_overhead_s
    late, ahead = found[OpKind.UPDATE, False], found[OpKind.SPECULATE, False]
    assert ahead / late == pytest.approx(50 / 26)
    assert found[OpKind.UPDATE, True] == 0
