"""Trial steps on a device tell how long the host takes to issue a layer."""

from __future__ import annotations

import pytest

from megatrain.devices.accelerator import AcceleratorDevice
from megatrain.doctor import trial_steps
from testkit.machines import DESKTOP
from testkit.simulated.accelerator import Simulator
from testkit.simulated.watched import watched


def test_the_time_that_a_host_takes_to_issue_a_layer_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trial_steps, "ISSUED", (64, 16))
    monkeypatch.setattr(trial_steps, "TRIAL_VOCABULARY", 128)
    simulator = Simulator(policy="early")
    with watched(simulator):
        found = trial_steps.with_issue_times(DESKTOP, AcceleratorDevice(simulator))
    assert 0 < found.forward_issue_s < found.backward_issue_s
    assert found.changed(forward_issue_s=0.0, backward_issue_s=0.0) == DESKTOP
