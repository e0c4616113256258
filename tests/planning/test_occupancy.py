"""Memory over the time of a simulated step stays within the ledger."""

from __future__ import annotations

import pytest

from megatrain.planning.ledger import predicted_ledger
from megatrain.planning.occupancy import Occupancy, occupancy, peaks
from megatrain.planning.profile import MachineProfile
from megatrain.planning.settings import Settings
from megatrain.planning.simulate import simulate
from megatrain.planning.workload import Workload
from tests.planning.machines import DESKTOP, EXPERTS, PROCESSOR, SMALL

WAYS = [
    Settings(micro_tokens=2048),
    Settings(micro_tokens=2048, tape="host"),
    Settings(micro_tokens=8192, update="in_backward", chunk_tokens=512),
]


def over_time(profile: MachineProfile, workload: Workload, settings: Settings) -> list[Occupancy]:
    return occupancy(profile, workload, settings, simulate(profile, workload, settings))


@pytest.mark.parametrize("profile", [DESKTOP, PROCESSOR], ids=lambda profile: profile.name)
@pytest.mark.parametrize("model", [SMALL, EXPERTS], ids=lambda model: model.name)
@pytest.mark.parametrize("settings", WAYS, ids=str)
def test_no_place_holds_more_than_its_ledger(
    profile: MachineProfile, model: object, settings: Settings
) -> None:
    workload = Workload(model=model, step_tokens=8192)  # type: ignore[arg-type]
    found = over_time(profile, workload, settings)
    ledger = predicted_ledger(profile, workload, settings)
    highest = peaks(found)
    assert highest["host"].num_bytes <= ledger.total("host")
    if not profile.unified:
        assert highest["device"].num_bytes <= ledger.total("device")
        assert highest["device"].num_bytes > 0.8 * ledger.total("device")


@pytest.mark.parametrize("settings", WAYS, ids=str)
def test_what_comes_goes(settings: Settings) -> None:
    found = over_time(DESKTOP, Workload(model=SMALL, step_tokens=8192), settings)
    for place in ("host", "device"):
        held = [change.num_bytes for change in found if change.place == place]
        assert held[0] == held[-1] == min(held)


def test_a_tape_on_the_host_is_seen_there() -> None:
    workload = Workload(model=SMALL, step_tokens=8192)
    device, host = (
        peaks(over_time(DESKTOP, workload, Settings(micro_tokens=2048, tape=tape)))
        for tape in ("device", "host")
    )
    tape = SMALL.num_layers * 8192 * SMALL.hidden * 2
    assert host["host"].num_bytes - device["host"].num_bytes == pytest.approx(tape, rel=0.2)
    assert host["device"].num_bytes < device["device"].num_bytes
