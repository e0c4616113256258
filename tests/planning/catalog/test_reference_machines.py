"""Known machines: every figure within its physics."""

from __future__ import annotations

import pytest

from megatrain.planning.catalog.reference_machines import GIB, MACHINES, ReferenceMachine
from megatrain.planning.machine.profile import MachineProfile

WANTED = (
    "RTX 3060 12GB", "RTX 3080 10GB", "RTX 3090", "RTX 4090", "RTX 5060", "RTX 5060 Ti 16GB",
    "RTX 5070", "RTX 5070 Ti", "RTX 5080", "RTX 5090", "RTX A6000", "L40S", "A100 80GB",
    "H100 PCIe", "H100 SXM", "H200", "B200", "GH200", "DGX Spark", "MI300X",
)  # fmt: skip


def faults(machine: ReferenceMachine) -> list[str]:
    """Return what cannot be true of a machine."""
    found = []
    if not 0.45 * machine.peak <= machine.sustained <= 0.97 * machine.peak * machine.clock_share:
        found.append("sustained")
    if machine.clock_share > 1.1:
        found.append("clock")
    if not 0.5 <= machine.duplex_share <= 1:
        found.append("duplex")
    if not machine.source:
        found.append("source")
    if machine.link_in + machine.link_out > 0.92 * 900:  # NVLink-C2C, the fastest there is
        found.append("link")
    return found


def test_all_machines_are_there() -> None:
    assert tuple(machine.name for machine in MACHINES) == WANTED


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_figures_keep_to_physics(machine: ReferenceMachine) -> None:
    assert faults(machine) == []
    profile = machine.profile()
    assert MachineProfile.from_json(profile.to_json()) == profile
    assert profile.update_params_per_s * 26 == pytest.approx(profile.dram_bytes_per_s)
    assert profile.forward_rate(8192, 8192) == pytest.approx(machine.sustained * 1e12)
    assert profile.forward_rate(1024, 256) < profile.forward_rate(4096, 4096)


def test_a_figure_beyond_physics_would_be_noticed() -> None:
    (card,) = (machine for machine in MACHINES if machine.name == "RTX 3090")
    values = {name: getattr(card, name) for name in ReferenceMachine.__dataclass_fields__}
    # 142 is what the sheet gives for fp16 accumulation: the usual mistake
    assert faults(ReferenceMachine(**values | {"sustained": 142.0})) == ["sustained"]
    assert faults(ReferenceMachine(**values | {"source": ""})) == ["source"]


def test_host_memory_can_be_given() -> None:
    card = MACHINES[0]
    assert card.profile(ram_bytes=32 * GIB).ram_bytes == 32 * GIB
    assert card.profile().ram_bytes == card.ram_gib * GIB
