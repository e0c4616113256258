"""A run that is killed and resumed has the losses of the whole run; another would be found."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatrain.doctor.gpu_check.long import end_to_end as module
from megatrain.doctor.gpu_check.long.end_to_end import STEPS, differences, measure, model_for
from megatrain.doctor.gpu_check.long.results import CannotRun
from testkit.machines import DESKTOP
from tests.doctor.gpu_check.long.givens import Kept, given_on_cpu


@pytest.mark.merge
def test_a_killed_run_continues_with_its_bits(tmp_path: Path) -> None:
    found = measure(given_on_cpu(Kept(), tmp_path))
    figures = found["figures"]
    assert found["lead"].endswith("The run that was killed continues with the same bits.")
    assert (figures["compared_steps"], figures["largest_difference"]) == (STEPS, 0.0)
    assert figures["first_step_s"] > 0
    whole, killed, resumed = found["tables"]["Runs"]
    assert (whole["steps"], resumed["steps"]) == (STEPS, STEPS)
    assert module.SAVED_STEP < killed["steps"] < STEPS


def test_losses_that_differ_are_found() -> None:
    whole = {1: 5.0, 2: 4.0, 3: 3.0}
    assert differences(whole, whole) == {1: 0.0, 2: 0.0, 3: 0.0}
    assert differences(whole, {1: 5.0, 2: 4.5}) == {1: 0.0, 2: 0.5}


def test_the_model_leaves_room_on_the_disk() -> None:
    large, small = model_for(DESKTOP, 1.0, 10**13), model_for(DESKTOP, 1.0, 10**10)
    sizes = [one.workload(128, packed=True).model.params for one in (large, small)]
    assert sizes[0] > sizes[1]
    assert sizes[1] * module.DISK_BYTES <= 10**10
    with pytest.raises(CannotRun, match="of disk and this memory"):
        model_for(DESKTOP, 1.0, 10**3)


def test_a_run_that_fails_is_said(tmp_path: Path) -> None:
    given = given_on_cpu(Kept(), tmp_path, command=(sys.executable, "-c", "raise SystemExit(3)"))
    with pytest.raises(RuntimeError, match="the run whole ended with exit code 3"):
        measure(given)
