"""Rates from a run: wrong ones are corrected where the trace tells, and nowhere else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatrain.doctor import examine
from megatrain.doctor.refine import (
    MOST_LOAD,
    MOST_SPREAD,
    StepTrace,
    disturbed,
    keep_refined,
    refined,
)
from megatrain.planning.machine.examination import Examination, kept_examination
from megatrain.planning.machine.facts import host_facts
from megatrain.planning.machine.profile import FlopRate, MachineProfile
from megatrain.planning.plan import Plan, make_plan
from megatrain.planning.simulate import simulate
from megatrain.planning.workload import Workload
from megatrain.step.ops import OpKind
from testkit.machines import DESKTOP, PROCESSOR, SMALL

WORK = Workload(model=SMALL, step_tokens=16384)
TRUE = DESKTOP.changed(
    forward_flops=(FlopRate(1024, 1024, 90e12), FlopRate(1024, 8192, 100e12)),
    backward_flops=(FlopRate(1024, 1024, 80e12), FlopRate(1024, 8192, 95e12)),
    head_efficiency=0.8,
)


def assumed(true: MachineProfile, times: float = 2.0) -> MachineProfile:
    """The machine as it was believed to be: faster than it is."""
    return true.changed(
        forward_flops=tuple(one._replace(flops=times * one.flops) for one in true.forward_flops),
        backward_flops=tuple(one._replace(flops=times * one.flops) for one in true.backward_flops),
        copy_in_bytes_per_s=times * true.copy_in_bytes_per_s,
        copy_out_bytes_per_s=times * true.copy_out_bytes_per_s,
        update_params_per_s=times * true.update_params_per_s,
    )


def steps_on(true: MachineProfile, plan: Plan, count: int = 3, **changes: Any) -> list[StepTrace]:
    """Steps of the plan, on the real machine: ops slow each other down there."""
    played = simulate(true, plan.workload, plan.settings)
    sizes = plan.workload.micro_sizes(plan.settings.micro_batch_tokens)
    step = StepTrace(
        spans=tuple(played.trace().spans), micro_tokens=tuple(sizes), seconds=played.step_s
    )
    return [replace(step, **changes)] * count


@pytest.mark.parametrize("times", [0.5, 2.0])
@pytest.mark.parametrize("true", [TRUE, PROCESSOR], ids=["device", "processor"])
def test_a_run_corrects_wrong_rates_and_the_next_plan_is_nearer(
    true: MachineProfile, times: float
) -> None:
    plan = make_plan(assumed(true, times), WORK)
    steps = steps_on(true, plan)
    found = refined(plan, steps)
    assert {"forward_flops", "backward_flops"} <= set(found.figures)
    truth = steps[0].seconds
    before, after = (
        abs(simulate(one, WORK, plan.settings).step_s / truth - 1)
        for one in (plan.profile, found.profile)
    )
    assert before > 0.2
    assert after < 0.05
    again = make_plan(found.profile, WORK)
    real = simulate(true, WORK, again.settings).step_s
    assert abs(again.step_s / real - 1) < before / 2


def without(steps: list[StepTrace], *kinds: OpKind) -> list[StepTrace]:
    return [
        replace(step, spans=[span for span in step.spans if span.op.kind not in kinds])
        for step in steps
    ]


def test_what_the_trace_does_not_constrain_stays() -> None:
    plan = make_plan(assumed(TRUE), WORK)
    steps = steps_on(TRUE, plan)
    found = refined(plan, without(steps, OpKind.FETCH))
    assert "copy_in_bytes_per_s" not in found.figures
    assert found.profile.copy_in_bytes_per_s == plan.profile.copy_in_bytes_per_s
    assert "copy_in_bytes_per_s" in refined(plan, steps).figures, "the test notices it"
    other = steps_on(TRUE, plan, micro_tokens=(plan.settings.micro_batch_tokens // 2,) * 9)
    assert not {"forward_flops", "backward_flops", "head_efficiency"} & set(
        refined(plan, other).figures
    )
    shorter = steps_on(TRUE, plan, micro_tokens=(int(0.9 * plan.settings.micro_batch_tokens),) * 9)
    fewer = refined(plan, shorter).profile.forward_rate(1024, 16384)
    assert fewer < refined(plan, steps).profile.forward_rate(1024, 16384)
    for name in ("dram_bytes_per_s", "duplex_share", "attention_efficiency", "disk_bytes"):
        assert getattr(found.profile, name) == getattr(plan.profile, name)


def test_a_device_that_waits_for_its_host_tells_nothing_of_its_products() -> None:
    slow_host = {"forward_issue_s": 1.0, "backward_issue_s": 1.0}
    plan = make_plan(assumed(TRUE).changed(**slow_host), WORK)
    found = refined(plan, steps_on(TRUE.changed(**slow_host), plan))
    assert not {"forward_flops", "backward_flops"} & set(found.figures)


def test_rates_that_predict_no_better_are_not_taken() -> None:
    plan = make_plan(TRUE, WORK)
    steps = steps_on(assumed(TRUE), plan, seconds=plan.step_s)
    assert refined(plan, steps).figures == ()
    assert refined(plan, []).figures == ()


def test_kept_figures_say_where_they_come_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path))
    plan = make_plan(assumed(TRUE), WORK)
    found = refined(plan, steps_on(TRUE, plan))
    assert not keep_refined(found, "a run"), "nothing was measured that could be corrected"
    assert kept_examination() is None
    examine.keep(
        Examination(
            facts=host_facts(),
            profile=assumed(TRUE),
            kernel="native",
            folder="",
            when="",
            seconds=1,
        )
    )
    assert keep_refined(found, "a run of small")
    kept = kept_examination()
    assert kept is not None
    assert kept.profile.copy_in_bytes_per_s == found.profile.copy_in_bytes_per_s
    assert kept.profile.ram_bytes == TRUE.ram_bytes
    assert dict(kept.origins) == dict.fromkeys(found.figures, "a run of small")
    assert "From a run of small: " in kept.text()
    assert max(map(len, kept.text().splitlines())) <= 80


def timed(*seconds: float, tokens: int = 100) -> list[StepTrace]:
    return [StepTrace(spans=(), micro_tokens=(tokens,), seconds=one) for one in seconds]


def test_a_busy_machine_is_named() -> None:
    steady = timed(1.0, 1.01, 0.99, 1.0, 1.02)
    assert disturbed(steady, load=1.0) == ""
    busy = f"the machine is busy, {MOST_LOAD + 1:.1f} runnable threads per core"
    assert disturbed(steady, load=MOST_LOAD + 1) == busy


def test_so_are_steps_of_one_size_that_take_different_times() -> None:
    found = disturbed(timed(1.0, 1.0, 1.5, 2.0, 3.0), load=0.0)
    assert found == "the machine is busy, step times vary by 67%"
    longer = [*timed(1.0, 1.0), *timed(2.0, 2.0, 2.0, tokens=200)]
    assert disturbed(longer, load=0.0) == "", "they have more tokens"
    assert disturbed(timed(1.0, 1.0, 1.0, 1.0, 9.0), load=0.0) == "", "one of many is an accident"
    assert MOST_SPREAD < 0.67
