"""Known machines: every figure within its physics."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from importlib import resources

import pytest

from megatrain.errors import DoesNotFit
from megatrain.planning.catalog.reference_machines import GIB, MACHINES, ReferenceMachine
from megatrain.planning.machine.profile import MachineProfile
from megatrain.planning.machine.reserve import (
    INTEGRATED_SHARE,
    left_by_system,
    with_one_budget,
    with_reserve,
)
from megatrain.planning.memory.predicted import DEVICE_SHARE
from megatrain.planning.plan import Plan, make_plan
from megatrain.planning.workload import Workload
from megatrain.step.settings import StepSettings
from testkit.machines import EIGHT

WANTED = (
    "GTX 1660 Super", "RTX 2080 Ti", "T4", "RTX 3060 12GB", "RTX 3070", "RTX 3080 10GB", "RTX 3090",
    "RTX 4060", "RTX 4060 Ti 16GB", "RTX 4070", "RTX 4070 Super", "RTX 4070 Ti", "RTX 4080",
    "RTX 4090", "RTX 5060", "RTX 5060 Ti 16GB", "RTX 5070", "RTX 5070 Ti", "RTX 5080", "RTX 5090",
    "RTX 4060 Laptop", "RTX 5090 Laptop", "RTX A5000", "RTX A6000", "RTX 6000 Ada", "RTX Pro 6000",
    "A10", "L4", "L40S", "A100 40GB", "A100 80GB", "H100 PCIe", "H100 SXM", "H200", "B200", "GH200",
    "DGX Spark", "Strix Halo", "MI300A", "MI300X", "CPU",
)  # fmt: skip
CATALOG = tomllib.loads(
    resources.files("megatrain.planning.catalog").joinpath("machines.toml").read_text()
)


def faults(machine: ReferenceMachine) -> list[str]:
    """Return what cannot be true of a machine."""
    found = []
    if not 0.45 * machine.peak <= machine.sustained <= 0.97 * machine.peak:
        found.append("sustained")
    if not 0.5 <= machine.duplex_share <= 1:
        found.append("duplex")
    if not machine.source:
        found.append("source")
    if machine.host not in ("", *CATALOG["host"]):
        found.append("host")
    if (machine.rent > 0) != (machine.rent_ram_gib > 0) or machine.rent > 10:
        found.append("rent")
    if machine.link_in + machine.link_out > 0.92 * 900:  # NVLink-C2C, the fastest there is
        found.append("link")
    return found


def test_all_machines_are_there() -> None:
    names = [machine.name for machine in MACHINES]
    assert set(WANTED) <= set(names)
    assert len(set(names)) == len(names)
    said = [alias for machine in MACHINES for alias in machine.aliases]
    assert len(set(said)) == len(said), "an alias of two machines"


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_figures_keep_to_physics(machine: ReferenceMachine) -> None:
    assert faults(machine) == []
    profile = machine.profile()
    assert MachineProfile.from_json(profile.to_json()) == profile
    assert profile.update_params_per_s * 26 == pytest.approx(profile.dram_bytes_per_s)
    assert profile.forward_rate(8192, 8192) == pytest.approx(machine.sustained * 1e12)
    assert profile.forward_rate(1024, 256) < profile.forward_rate(4096, 4096)


def test_a_rate_above_the_sheet_is_noticed() -> None:
    (card,) = (machine for machine in MACHINES if machine.name == "RTX 4090")
    assert faults(replace(card, efficiency=168 / card.peak)) == ["sustained"]


def test_host_memory_can_be_given() -> None:
    card = MACHINES[0]
    assert card.profile(ram_bytes=32 * GIB).ram_bytes == 32 * GIB
    assert card.profile().ram_bytes == left_by_system(card.ram_gib * GIB)


def test_cards_gain_by_fp8_what_their_generation_does() -> None:
    gains = {machine.name: machine.profile().fp8_gain for machine in MACHINES}
    assert gains["RTX 4090"] == gains["RTX 5090"] == gains["H100 SXM"] == gains["L40S"] == 2.0
    assert gains["RTX 3090"] == gains["A100 80GB"] == gains["T4"] == gains["CPU"] == 1.0
    assert gains["MI300X"] == 1.0, "its formats of 8 bits are others"


def test_a_card_without_bf16_is_as_fast_in_fp32() -> None:
    by_name = {machine.name: machine.profile() for machine in MACHINES}
    assert by_name["T4"].fp32_efficiency == 1.0
    assert by_name["RTX 3090"].fp32_efficiency < 1.0
    assert by_name["CPU"].on_host
    assert not by_name["T4"].on_host


def planned(machine: MachineProfile) -> Plan:
    profile = with_reserve(with_one_budget(machine.changed(disk_bytes=0)))
    return make_plan(profile, Workload(model=EIGHT, step_tokens=16384), StepSettings(), {})


def handed_out(plan: Plan) -> int:
    """Return all that a plan takes, each byte once: that of the host, and that of the device."""
    host = [line for line in plan.ledger.lines if line.place == "host"]
    own = sum(line.num_bytes for line in host if line.purpose != DEVICE_SHARE)
    return own + plan.ledger.total("device")


@pytest.mark.parametrize("name", ["DGX Spark", "Strix Halo", "MI300A", "GH200"])
def test_no_plan_hands_out_more_than_the_one_memory(name: str) -> None:
    (machine,) = (each for each in MACHINES if each.name == name)
    profile = machine.profile()
    plan = planned(profile)
    assert plan.fits
    if machine.integrated:
        assert profile.unified
        assert not profile.on_host
        assert handed_out(plan) <= INTEGRATED_SHARE * machine.ram_gib * GIB
        assert {line.purpose for line in plan.ledger.lines}.isdisjoint({"weight slots", "outbox"})
    else:
        assert handed_out(plan) <= (machine.ram_gib + machine.memory_gib) * GIB
        assert plan.ledger.total("device") <= profile.device_bytes
        assert plan.ledger.total("host") <= profile.ram_bytes


def test_what_the_one_memory_does_not_hold_is_refused() -> None:
    (spark,) = (each for each in MACHINES if each.name == "DGX Spark")
    small = spark.profile(ram_bytes=40 * GIB)
    with pytest.raises(DoesNotFit, match="memory of host and device together"):
        planned(small).require()
