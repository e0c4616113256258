"""Facts of a device's place in its host: read where the system has them, left out where not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from megatrain.doctor.gpu_check import facts as module
from megatrain.doctor.gpu_check.facts import system_facts
from megatrain.doctor.subject import CPU

ADDRESS = "0000:65:00.0"


def write_link(folder: Path, speed: str, lanes: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "current_link_speed").write_text(f"{speed} GT/s PCIe\n")
    (folder / "current_link_width").write_text(f"{lanes}\n")
    (folder / "max_link_speed").write_text("16.0 GT/s PCIe\n")
    (folder / "max_link_width").write_text("16\n")
    (folder / "numa_node").write_text("1\n")
    return folder


def test_what_the_system_tells_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_link(tmp_path / "sys/bus/pci/devices" / ADDRESS, "16.0", "16")
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23\n"
    )
    (tmp_path / "sys/class/iommu/dmar0").mkdir(parents=True)
    monkeypatch.setattr(module, "pci_address", lambda device: ADDRESS)

    def ask(command: Sequence[str]) -> str:
        assert command[:2] == ["nvidia-smi", f"--id={ADDRESS}"]
        if "compute-apps" in command[2]:
            return "4242\n"
        if "throttle" in command[2]:
            return "Active, Not Active, Not Active\n"
        return "83, 349.5, 350, 1410, [N/A]\n"

    found = system_facts(CPU, tmp_path, ask).values
    assert found["link"] == "16 GT/s x16 of 16 GT/s x16"
    assert found["device_numa_node"] == 1
    assert found["driver"] == "570.86.15"
    assert found["iommu"] is True
    assert found["throttled"] == ["sw_thermal_slowdown"]
    assert found["other_processes"] == 1
    assert (found["temperature_c"], found["power_w"], found["clock_mhz"]) == (83, 349.5, 1410)
    assert "clock_most_mhz" not in found


def test_what_it_does_not_tell_is_left_out(tmp_path: Path) -> None:
    found = system_facts(CPU, tmp_path, lambda command: "")
    assert found.link is None
    assert not {"driver", "iommu", "huge_pages", "link", "throttled"} & set(found.values)
    assert found.values["device_name"] == "the processor"
