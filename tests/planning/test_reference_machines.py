"""Known machines: every figure within its physics, every name found."""

from __future__ import annotations

import pytest

from megatrain.errors import ConfigError
from megatrain.planning.profile import MachineProfile
from megatrain.planning.reference_machines import GIB, MACHINES, ReferenceMachine, find_machine

WANTED = (
    "RTX 3060 12GB", "RTX 3080 10GB", "RTX 3090", "RTX 4090", "RTX 5090", "RTX A6000", "L40S",
    "A100 80GB", "H100 PCIe", "H100 SXM", "H200", "GH200", "DGX Spark", "MI300X",
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


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("4090", "RTX 4090"),
        ("RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("rtx-3090", "RTX 3090"),
        ("a6000", "RTX A6000"),
        ("H200", "H200"),
        ("GH200", "GH200"),
        ("h100 sxm", "H100 SXM"),
        ("spark", "DGX Spark"),
        ("mi300x", "MI300X"),
    ],
)
def test_names_as_people_write_them(text: str, name: str) -> None:
    assert find_machine(text)[0].name == name
    assert find_machine(text)[1] is None


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("24GB", "RTX 3090"),
        ("24GiB", "RTX 3090"),
        ("12GB", "RTX 3060 12GB"),
        ("16GB", "RTX 3090"),
        ("48GB", "RTX A6000"),
        ("80GB", "A100 80GB"),
        ("500GB", "MI300X"),
    ],
)
def test_a_size_means_the_slowest_card_that_has_it(text: str, name: str) -> None:
    machine, size = find_machine(text)
    assert size is not None
    assert machine.name == name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h100", "could be H100 PCIe or H100 SXM; say which"),
        ("potato", "give a size like 24GB, or one of: RTX 3060 12GB, "),
        ("24", "give a size like 24GB"),
        ("", "give a size"),
    ],
)
def test_what_is_not_understood_is_said(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_machine(text)


def test_host_memory_can_be_given() -> None:
    card = MACHINES[0]
    assert card.profile(ram_bytes=32 * GIB).ram_bytes == 32 * GIB
    assert card.profile().ram_bytes == card.ram_gib * GIB
