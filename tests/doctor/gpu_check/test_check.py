"""doctor --gpu as a whole, small, on the processor; what fails decides the exit code."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megatrain.cli.app import app
from megatrain.doctor import examine
from megatrain.doctor.gpu_check import check as module
from megatrain.doctor.gpu_check.check import check_device, rate_checks
from megatrain.doctor.gpu_check.facts import Link, SystemFacts
from megatrain.doctor.gpu_check.findings import Check
from megatrain.doctor.rates import Bench
from megatrain.errors import ConfigError, NoDevice, OutOfDeviceMemory
from megatrain.planning.catalog.asked_machines import find_machine
from megatrain.planning.machine.examination import kept_examination
from megatrain.planning.machine.profile import MachineProfile

OK = Check(name="lanes", state="ok", found="equal")
WRONG = Check(name="lanes", state="wrong", found="3 differ", exit_code=5)
WIDE = Link(speed=16.0, lanes=16, most_speed=16.0, most_lanes=16)


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements of a second."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(examine, "PARAMS", 1 << 16)
    monkeypatch.setattr(examine, "COPY_BYTES", 1 << 20)
    monkeypatch.setattr(examine, "NEEDED_BYTES", 1 << 20)
    monkeypatch.setattr(examine, "shapes_for", lambda own_memory: iter([(32, 64), (16, 32)]))
    monkeypatch.setattr(examine, "elementwise_rate", lambda bench: 1e9)
    monkeypatch.setattr(examine, "_dram_rate", lambda kernel, num_threads: 1e10)
    monkeypatch.setattr(examine, "calibrated", lambda profile, shapes: profile)
    monkeypatch.setattr(Bench, "seconds", lambda bench, work: max(bench._timed(work), 1e-9))


@pytest.mark.merge
def test_the_command_checks_writes_and_keeps(small: None, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["doctor", "--gpu", "--device", "cpu", "--quick"])
    assert done.exit_code == 0, done.output
    assert "This device computes correctly" in done.stdout
    assert "send doctor-gpu.json" in done.stderr
    text = (tmp_path / "doctor-gpu.json").read_text()
    found = json.loads(text)
    assert found["device"] == "cpu"
    assert {check["state"] for check in found["checks"]} <= {"ok", "slow"}
    assert found["profile"]["copy_in_bytes_per_s"] > 0
    assert str(tmp_path) not in text
    kept = kept_examination()
    assert kept is not None
    assert json.loads(kept.profile.to_json()) == found["profile"]


def test_a_device_that_is_wrong_is_not_kept(
    small: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "laws", lambda subject, say: [WRONG])
    done = CliRunner().invoke(app, ["doctor", "--gpu", "--device", "cpu", "--quick", "--json"])
    assert done.exit_code == WRONG.exit_code
    assert done.stdout == (tmp_path / "doctor-gpu.json").read_text() + "\n"
    assert json.loads(done.stdout)["profile"] is not None
    assert kept_examination() is None


def test_without_an_accelerator_the_error_says_what_to_look_at() -> None:
    with pytest.raises(NoDevice, match=r"finds no accelerator .* check the driver"):
        check_device("auto", Path(), lambda what: None)


def test_a_device_without_gpu_is_refused() -> None:
    done = CliRunner().invoke(app, ["doctor", "--device", "cuda"])
    assert isinstance(done.exception, ConfigError)
    assert "--device is cuda, but without --gpu" in str(done.exception)


def test_a_full_device_ends_the_rates_alone(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OutOfDeviceMemory("device memory: products need 4.0 GiB, 1.0 GiB are free")

    monkeypatch.setattr(module, "laws", lambda subject, say: [OK])
    monkeypatch.setattr(module, "examine", full)
    found = check_device("cpu", Path(), lambda what: None)
    assert found.exit_code == OutOfDeviceMemory.exit_code
    assert [check.name for check in found.checks if check.state == "wrong"] == ["rates"]
    assert found.examination is None
    assert "Wrong: rates." in found.text()


def card(**changes: Any) -> MachineProfile:
    machine, _ = find_machine("4090")
    return machine.profile().changed(device="NVIDIA GeForce RTX 4090", **changes)


def slow_rates(
    profile: MachineProfile, pinning: float | None = 5e9, link: Link = WIDE, **facts: Any
) -> dict[str, str]:
    checks = rate_checks(profile, pinning, SystemFacts(values=facts, link=link))
    return {check.name: check.found for check in checks if check.state == "slow"}


@pytest.mark.parametrize(
    ("changes", "facts", "name", "text"),
    [
        ({"copy_in_bytes_per_s": 9e9}, {}, "copies", "9 GB/s in"),
        ({}, {"link": replace(WIDE, lanes=8)}, "copies", "16 GT/s x8 of 16 GT/s x16"),
        ({"duplex_share": 0.5}, {}, "copies", "both at once"),
        ({}, {"pinning": None}, "pinning", "cannot be pinned"),
        ({}, {"pinning": 3e8}, "pinning", "0.3 GB/s"),
        (
            {"forward_flops": ((4096, 4096, 5e13),)},
            {},
            "products",
            "% of what this device sustains elsewhere",
        ),
        ({}, {"throttled": ["sw_thermal_slowdown"]}, "products", "throttled: sw_thermal_slowdown"),
        ({"fp32_efficiency": 3.0}, {}, "products", "fp32 is 3 times as fast"),
    ],
)
def test_what_is_slow_is_named(
    changes: dict[str, Any], facts: dict[str, Any], name: str, text: str
) -> None:
    slow = slow_rates(card(**changes), **facts)
    assert list(slow) == [name]
    assert text in slow[name]
