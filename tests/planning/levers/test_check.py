"""Memory is checked where that is hidden or nobody measured, and not where it costs much."""

from __future__ import annotations

from typing import Any

import pytest

from megatrain.config import Config
from megatrain.planning.from_config import pins_of
from megatrain.planning.levers.check import MOST_SLOWER
from megatrain.planning.machine.profile import NOT_MEASURED, MachineProfile
from megatrain.planning.plan import Plan, make_plan
from megatrain.planning.workload import Workload
from megatrain.step.settings import StepSettings
from testkit.machines import DESKTOP, EIGHT, GIB

ROOMY = DESKTOP.changed(ram_bytes=256 * GIB)
LONG, SHORT = (Workload(model=EIGHT, step_tokens=tokens) for tokens in (262144, 2048))


def plan_of(workload: Workload, profile: MachineProfile = ROOMY, **pinned: Any) -> Plan:
    return make_plan(profile, workload, StepSettings(**pinned), dict.fromkeys(pinned, "set by you"))


@pytest.mark.merge
def test_a_long_step_hides_the_check() -> None:
    plan = plan_of(LONG)
    assert plan.settings.check
    assert plan.step_s < (1 + MOST_SLOWER) * plan_of(LONG, check=False).step_s
    assert not any("check" in line.split() for line in plan.text().splitlines())


def test_a_short_step_is_not_checked_and_says_so() -> None:
    plan = plan_of(SHORT)
    assert not plan.settings.check
    assert plan_of(SHORT, check=True).step_s > (1 + MOST_SLOWER) * plan.step_s
    assert "not checked: steps would take" in plan.text(details=True)


def test_a_machine_that_was_not_measured_checks() -> None:
    assert plan_of(SHORT, ROOMY.changed(source=NOT_MEASURED)).settings.check


@pytest.mark.parametrize(("given", "pinned"), [("auto", False), ("on", True), ("off", True)])
def test_the_config_decides(given: str, pinned: bool) -> None:
    config = Config.model_validate(
        {"model": "m", "data": {"train": "rows.jsonl"}, "memory": {"check": given}}
    )
    assert ("check" in pins_of(config)) is pinned
