"""The roofline: below every step that is played, and set by the slowest lane."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatrain.planning.machine.profile import MachineProfile
from megatrain.planning.plan import make_plan
from megatrain.planning.roofline import roofline_of
from megatrain.planning.simulate import simulate
from megatrain.planning.workload import Workload
from testkit.machines import DESKTOP, EIGHT, PROCESSOR, SERVER, SMALL

SLOW_LINK = DESKTOP.changed(name="slow link", copy_in_bytes_per_s=5e8)
SLOW_HOST = DESKTOP.changed(name="slow host", update_params_per_s=1e8)


@pytest.mark.parametrize("norm", [1.0, None])
@pytest.mark.parametrize(
    "profile", [DESKTOP, SERVER, PROCESSOR, SLOW_LINK, SLOW_HOST], ids=lambda profile: profile.name
)
def test_no_step_is_shorter(profile: MachineProfile, norm: float | None) -> None:
    workload = Workload(model=SMALL, step_tokens=32768, packed=True, max_grad_norm=norm)
    plan = make_plan(profile, workload)
    seconds, _ = roofline_of(plan.simulation).of(workload.step_tokens)
    assert 0.2 * plan.step_s < seconds <= 1.001 * plan.step_s


@pytest.mark.parametrize(
    ("profile", "name"),
    [(DESKTOP, "compute"), (SLOW_LINK, "link in"), (SLOW_HOST, "optimizer")],
    ids=["desktop", "slow link", "slow host"],
)
def test_the_slowest_lane_sets_it(profile: MachineProfile, name: str) -> None:
    workload = Workload(model=EIGHT, step_tokens=4096)
    plan = make_plan(profile, workload)
    tokens = 65536 if name == "compute" else 4096
    assert roofline_of(plan.simulation).of(tokens)[1] == name


def test_a_step_of_fewer_tokens_has_a_roofline_of_its_own() -> None:
    whole = Workload(model=EIGHT, step_tokens=65536)
    plan = make_plan(DESKTOP, whole)
    half = replace(whole, step_tokens=32768)
    exact = roofline_of(simulate(DESKTOP, half, plan.settings)).of(32768)[0]
    assert roofline_of(plan.simulation).of(32768)[0] == pytest.approx(exact, rel=0.02)
    assert exact < 0.6 * plan.step_s
