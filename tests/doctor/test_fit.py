"""A profile from a trace gives back the rates that the trace was made with."""

from __future__ import annotations

import pytest

from megatrain.doctor.fit import fitted
from megatrain.lanes.trace import Span
from megatrain.planning.costs import Costs
from megatrain.planning.machine.profile import FlopRate, MachineProfile
from megatrain.planning.simulate import simulate, steady_step, step_shape
from megatrain.planning.workload import Workload
from megatrain.step.ops import OpKind
from megatrain.step.settings import StepSettings
from testkit.machines import DESKTOP, PROCESSOR, SMALL

WORK = Workload(model=SMALL, step_tokens=2048)
SETTINGS = StepSettings(micro_batch_tokens=2048, tape="host")


def one_at_a_time(profile: MachineProfile) -> list[Span]:
    """A step in which every op has the machine to itself."""
    costs, now, spans = Costs(profile, WORK, SETTINGS), 0, []
    for op in steady_step(step_shape(SETTINGS, WORK, unified=profile.unified)):
        end = now + round(costs.of(op).seconds * 1e9)
        spans.append(Span(0, op.lane, op, now, end))
        now = end
    return spans


def wrong(profile: MachineProfile) -> MachineProfile:
    """The machine before it was measured."""
    return profile.changed(
        forward_flops=(FlopRate(1024, 2048, 1e12),),
        backward_flops=(FlopRate(1024, 2048, 1e12),),
        update_params_per_s=1e6,
        copy_in_bytes_per_s=1e6,
        copy_out_bytes_per_s=1e6,
        head_efficiency=0.1,
    )


@pytest.mark.parametrize("true", [DESKTOP, PROCESSOR], ids=lambda profile: profile.name)
def test_rates_come_back(true: MachineProfile) -> None:
    true = true.changed(
        backward_flops=(FlopRate(1024, 2048, 0.7 * true.forward_flops[0].flops),),
        head_efficiency=0.6,
    )
    found = fitted(wrong(true), WORK, SETTINGS, one_at_a_time(true))
    assert found.forward_rate(1024, 2048) == pytest.approx(true.forward_flops[0].flops, rel=1e-3)
    assert found.backward_rate(1024, 2048) == pytest.approx(true.backward_flops[0].flops, rel=1e-3)
    assert found.update_params_per_s == pytest.approx(true.update_params_per_s, rel=1e-3)
    assert found.head_efficiency == pytest.approx(0.6, rel=1e-3)
    if not true.unified:
        assert found.copy_in_bytes_per_s == pytest.approx(24e9, rel=1e-3)
        assert found.copy_out_bytes_per_s == pytest.approx(24e9, rel=1e-3)
    expected, predicted = (simulate(one, WORK, SETTINGS).step_s for one in (true, found))
    assert predicted == pytest.approx(expected, rel=1e-2)
    assert simulate(wrong(true), WORK, SETTINGS).step_s > 2 * expected


def test_what_a_trace_does_not_show_stays() -> None:
    spans = [span for span in one_at_a_time(DESKTOP) if span.op.kind is OpKind.FETCH]
    before = wrong(DESKTOP)
    found = fitted(before, WORK, SETTINGS, spans)
    assert found.copy_in_bytes_per_s == pytest.approx(24e9, rel=1e-3)
    assert found.changed(copy_in_bytes_per_s=1e6) == before
