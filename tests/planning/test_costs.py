"""The cost of an update follows the states that the optimizer declares."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatrain.memory.kinds import Kind
from megatrain.optim.states import ADAMW
from megatrain.planning.costs import Cost, Costs
from megatrain.planning.simulate import simulate, steady_step, step_shape
from megatrain.planning.workload import Workload
from megatrain.step.ops import OpKind
from megatrain.step.settings import StepSettings
from testkit.lion import LION
from testkit.machines import DESKTOP, EIGHT, SMALL

SETTINGS = StepSettings(micro_batch_tokens=2048)
PROFILE = replace(DESKTOP, op_overhead_s=1e-12)


def cost_of(kind: OpKind, states: tuple[Kind, ...]) -> Cost:
    workload = Workload(model=SMALL, step_tokens=2048, states={"fp32": states})
    ops = steady_step(step_shape(SETTINGS, workload, unified=False))
    return Costs(PROFILE, workload, SETTINGS).of(next(op for op in ops if op.kind is kind))


def test_an_update_takes_the_traffic_of_its_states() -> None:
    adamw, lion = (cost_of(OpKind.UPDATE, states) for states in (ADAMW, LION))
    assert lion.seconds / adamw.seconds == pytest.approx(18 / 26)
    assert lion.dram_rate == pytest.approx(adamw.dram_rate)
    num_params = adamw.num_bytes / 2
    assert adamw.seconds == pytest.approx(num_params / PROFILE.update_params_per_s)


@pytest.mark.parametrize("head_pieces", [2, 5])
def test_pieces_of_the_vocabulary_cost_one_more_product_of_the_head(head_pieces: int) -> None:
    """And their drains, together, what the drain of the whole head costs."""
    workload = Workload(model=replace(SMALL, tied=False), step_tokens=2048)

    def costs_of(settings: StepSettings) -> dict[OpKind, float]:
        costs, found = Costs(PROFILE, workload, settings), dict[OpKind, float]()
        for op in steady_step(step_shape(settings, workload, unified=False)):
            if op.block == workload.model.num_blocks - 1:
                found[op.kind] = found.get(op.kind, 0.0) + costs.of(op).seconds
        return found

    whole, cut = costs_of(SETTINGS), costs_of(SETTINGS.changed(head_pieces=head_pieces))
    assert cut[OpKind.PIECE] == pytest.approx(whole[OpKind.HEAD])
    assert 0.2 * whole[OpKind.HEAD] < cut[OpKind.HEAD] < 0.5 * whole[OpKind.HEAD]
    assert cut[OpKind.DRAIN] == pytest.approx(whole[OpKind.DRAIN])


def test_other_ops_do_not_depend_on_the_states() -> None:
    for kind in (OpKind.NORM, OpKind.FETCH, OpKind.DRAIN):
        assert cost_of(kind, LION) == cost_of(kind, ADAMW)


def test_tiles_cost_a_few_percent_of_compute() -> None:
    workload = Workload(model=EIGHT, step_tokens=32768, sequence=32768, packed=True)
    settings = StepSettings(micro_batch_tokens=32768, tape="host")
    full, tiled = (
        simulate(PROFILE, workload, settings.changed(tile_tokens=tile)).busy_s["compute"]
        for tile in (None, 4096)
    )
    assert full < tiled < 1.05 * full
