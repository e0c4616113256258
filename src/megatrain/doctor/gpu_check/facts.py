"""Facts of a device and its host that explain figures: nothing here is measured.

    torch       versions, what it is built for, the device's own properties
    /sys, /proc the link, NUMA nodes, memory limits, huge pages, the driver, WSL2
    nvidia-smi  temperature, power, clocks and why they are low, if the tool is there

Laws (tests/doctor/gpu_check/test_facts.py)
    1. A fact that the system does not report is left out, never an exception.
    2. No fact names a path, a user or a host.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatrain.devices.runtime import pci_address
from megatrain.doctor.subject import Subject
from megatrain.memory.host import free_bytes, read_system_file
from megatrain.planning.machine.facts import host_facts

LANE_BYTES_PER_S = {
    2.5: 0.25e9,
    5.0: 0.5e9,
    8.0: 0.985e9,
    16.0: 1.969e9,
    32.0: 3.938e9,
    64.0: 7.56e9,
}
"""Bytes per second of one PCIe lane, each way, by its GT/s."""
_ASKED = {
    "temperature_c": "temperature.gpu",
    "power_w": "power.draw",
    "power_limit_w": "power.limit",
    "clock_mhz": "clocks.sm",
    "clock_most_mhz": "clocks.max.sm",
}
_THROTTLES = ("sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown")
Ask = Callable[[Sequence[str]], str]
"""Runs a command; returns what it prints, or nothing if it fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The link between a device and host memory, as the bus reports it."""

    speed: float
    """GT/s of a lane, now; a link that is idle may report less."""
    lanes: int
    most_speed: float
    most_lanes: int

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second that its lanes can carry each way, packets included."""
        return LANE_BYTES_PER_S.get(self.speed, 0.0) * self.lanes

    @property
    def is_narrow(self) -> bool:
        return self.lanes < self.most_lanes or self.speed < self.most_speed

    def __str__(self) -> str:
        return f"{self.speed:g} GT/s x{self.lanes} of {self.most_speed:g} GT/s x{self.most_lanes}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemFacts:
    """All that is known."""

    values: dict[str, Any]
    """Figures by name, in units that the name says."""
    link: Link | None = None


def system_facts(subject: Subject, root: Path = Path("/"), ask: Ask | None = None) -> SystemFacts:
    """Return the facts of a subject and its host."""
    host = host_facts(root)
    address = pci_address(str(subject.place))
    link = None if address is None else read_link(root / "sys/bus/pci/devices" / address)
    values: dict[str, Any] = {
        **host.versions,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "driver": _driver(root),
        "cpu": host.processor,
        "cores": host.cores,
        "numa_nodes": host.numa_nodes,
        "ram_bytes": host.ram_bytes,
        "free_bytes": free_bytes(root),
        "group_limit_bytes": host.group_limit_bytes,
        "memlock_bytes": host.memlock_bytes,
        "huge_pages": _chosen(root / "sys/kernel/mm/transparent_hugepage/enabled"),
        "iommu": _has_iommu(root),
        "wsl2": "microsoft" in platform.release().lower(),
        "load": round(os.getloadavg()[0], 1),
        "gpus": list(host.gpus),
        **_device(subject),
        **({} if link is None else {"link": str(link)}),
        **({} if address is None else _place(root, address)),
        **_asked_of_driver(ask or _run_tool, address),
    }
    return SystemFacts(
        values={name: value for name, value in values.items() if value not in (None, "", [])},
        link=link,
    )


def read_link(device: Path) -> Link | None:
    """Return the link that a folder of /sys/bus/pci/devices describes."""
    texts = {
        name: read_system_file(device / name).strip()
        for name in (
            "current_link_speed", "current_link_width", "max_link_speed", "max_link_width",
        )
    }  # fmt: skip
    numbers = [re.match(r"\d+(\.\d+)?", text) for text in texts.values()]
    if not all(numbers):
        return None
    speed, lanes, most_speed, most_lanes = (float(found[0]) for found in numbers if found)
    return Link(speed=speed, lanes=int(lanes), most_speed=most_speed, most_lanes=int(most_lanes))


def _device(subject: Subject) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "device_name": subject.name or "the processor",
        "device_free_bytes": subject.device_bytes or None,
    }
    if subject.place.type == "cpu":
        return facts
    module = torch.get_device_module(subject.place)
    if not hasattr(module, "get_device_properties"):
        return facts
    properties = module.get_device_properties(subject.place)
    facts["device_bytes"] = getattr(properties, "total_memory", None)
    if hasattr(properties, "major"):
        facts["capability"] = f"{properties.major}.{properties.minor}"
    facts["integrated"] = bool(getattr(properties, "is_integrated", False)) or None
    return facts


def _place(root: Path, address: str) -> dict[str, Any]:
    node = read_system_file(root / "sys/bus/pci/devices" / address / "numa_node").strip()
    return {"device_numa_node": int(node)} if node.isdigit() else {}


def _driver(root: Path) -> str:
    found = re.search(r"(\d+\.\d+(\.\d+)?)", read_system_file(root / "proc/driver/nvidia/version"))
    return found[1] if found else ""


def _has_iommu(root: Path) -> bool | None:
    folder = root / "sys/class/iommu"
    return any(folder.iterdir()) if folder.is_dir() else None


def _chosen(path: Path) -> str:
    found = re.search(r"\[(\w+)\]", read_system_file(path))
    return found[1] if found else ""


def _asked_of_driver(ask: Ask, address: str | None) -> dict[str, Any]:
    """Return what NVIDIA's tool says of the device at `address`."""
    if address is None:
        return {}
    tool = ["nvidia-smi", f"--id={address}"]
    told = ask([*tool, f"--query-gpu={','.join(_ASKED.values())}", "--format=csv,noheader,nounits"])
    found: dict[str, Any] = {}
    for name, text in zip(_ASKED, told.split(","), strict=False):
        if re.fullmatch(r"\s*\d+(\.\d+)?\s*", text):
            found[name] = float(text)
    fields = ",".join(f"clocks_throttle_reasons.{name}" for name in _THROTTLES)
    told = ask([*tool, f"--query-gpu={fields}", "--format=csv,noheader"])
    states = zip(_THROTTLES, told.split(","), strict=False)
    found["throttled"] = [name for name, state in states if state.strip() == "Active"]
    told = ask([*tool, "--query-compute-apps=pid", "--format=csv,noheader"])
    others = [line for line in told.split() if line.isdigit() and int(line) != os.getpid()]
    return found | {"other_processes": len(others) or None}


def _run_tool(command: Sequence[str]) -> str:
    """Return what a tool of the system prints; nothing if it is missing or fails."""
    tool = shutil.which(command[0])
    if tool is None:
        return ""
    try:
        done = subprocess.run(
            [tool, *command[1:]], check=True, capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout
