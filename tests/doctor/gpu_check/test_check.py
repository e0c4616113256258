"""gpu-check as a whole: small, on the processor; what fails decides the exit code and the words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from megatrain.cli.app import app
from megatrain.doctor import examine
from megatrain.doctor.gpu_check import check as module
from megatrain.doctor.gpu_check import sizes
from megatrain.doctor.gpu_check.check import GpuCheck, check_device
from megatrain.doctor.gpu_check.facts import SystemFacts
from megatrain.doctor.gpu_check.findings import Check
from megatrain.doctor.rates import Bench
from megatrain.errors import DeviceFull, NoDevice
from tests.report.reading import read

OK = Check(group="right", name="lanes", state="ok", found="equal")


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements of a second, and a step of a few milliseconds."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(examine, "PARAMS", 1 << 16)
    monkeypatch.setattr(examine, "COPY_BYTES", 1 << 20)
    monkeypatch.setattr(examine, "shapes_for", lambda own_memory: iter([(32, 64), (16, 32)]))
    monkeypatch.setattr(examine, "elementwise_rate", lambda bench: 1e9)
    monkeypatch.setattr(examine, "_dram_rate", lambda kernel, num_threads: 1e10)
    monkeypatch.setattr(examine, "calibrated", lambda profile, shapes: profile)
    monkeypatch.setattr(Bench, "seconds", lambda bench, work: max(bench._timed(work), 1e-9))
    monkeypatch.setattr(sizes, "STEP_S", 0.02)
    monkeypatch.setattr(sizes, "REDUCED_S", 0.02)
    monkeypatch.setattr(sizes, "LEAST_PARAMS", 1000)


@pytest.mark.merge
def test_the_command_checks_writes_and_says_what_to_send(small: None, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["gpu-check", "--device", "cpu", "--params", "300k"])
    assert done.exit_code == 0, done.output
    assert "This device computes correctly" in done.stdout
    assert "send gpu-check.json and gpu-check.html" in done.stdout
    found = json.loads((tmp_path / "gpu-check.json").read_text())
    assert found["device"] == "cpu"
    assert {check["state"] for check in found["checks"] if check["group"] == "right"} == {"ok"}
    assert found["step"]["step_s"] > 0
    assert str(tmp_path) not in json.dumps(found)
    page = read((tmp_path / "gpu-check.html").read_text())
    assert "One step by lane" in page.text
    again = CliRunner().invoke(app, ["gpu-check", "--device", "cpu", "--params", "0"])
    assert "--params is 0; give a number of parameters" in str(again.exception)


def test_without_an_accelerator_it_says_what_to_install() -> None:
    found = check_device("auto", 10**6, lambda what: None)
    assert found.exit_code == NoDevice.exit_code
    assert found.checks[0].causes == ("cpu torch",)
    assert "try: install the torch build for your device" in found.text()
    assert found.verdict() == "Do not train on this device yet. Wrong: accelerator."


def test_an_accelerator_that_cannot_be_driven_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available: torch.device("mps")
    )
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    found = check_device("auto", 10**6, lambda what: None)
    assert found.exit_code == NoDevice.exit_code
    assert found.checks[0].found.startswith("mps: MegaTrain cannot drive this type of device")
    assert found.checks[0].causes == ("not driven",)


def test_a_full_device_ends_the_step_alone(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise DeviceFull("device memory: weight slots needs 4.0 GiB, 1.0 GiB are free")

    monkeypatch.setattr(module, "laws", lambda subject, say: [OK])
    monkeypatch.setattr(module, "timed_figures", full)
    found = check_device("cpu", 10**6, lambda what: None)
    assert found.exit_code == DeviceFull.exit_code
    (wrong,) = [check for check in found.checks if check.state == "wrong"]
    assert (wrong.name, wrong.causes) == ("step", ("memory",))
    assert found.rates["copy_in_bytes_per_s"] > 0
    assert found.step == {}


def test_a_device_that_may_be_lost_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = Check(
        group="right", name="lanes", state="wrong", found="x", causes=("stuck",), exit_code=1
    )
    monkeypatch.setattr(module, "laws", lambda subject, say: [lost])
    monkeypatch.setattr(module, "measured_rates", lambda *_: pytest.fail("measured"))
    assert check_device("cpu", 10**6, lambda what: None).exit_code == 1


def machine_causes(**values: Any) -> dict[str, tuple[str, ...]]:
    usual = {"device_name": "x", "load": 0.1, "cores": 8, "free_bytes": 1 << 35}
    checks = module.machine_checks(SystemFacts(values=usual | values))
    return {check.name: check.causes for check in checks if check.causes}


def test_others_on_the_machine_are_named() -> None:
    assert machine_causes() == {}
    assert machine_causes(load=7.0) == {"host": ("busy host",)}
    assert machine_causes(other_processes=2) == {"accelerator": ("shared",)}
    used = {"device_bytes": 24 << 30, "device_free_bytes": 4 << 30}
    assert machine_causes(**used) == {"accelerator": ("shared",)}


def test_what_is_slow_is_no_error() -> None:
    slow = Check(group="fast", name="copies", state="slow", found="3 GB/s", causes=("slow link",))
    found = GpuCheck(
        device="cuda:0", when="", seconds=1.0, facts={}, checks=(OK, slow), rates={}, step={},
        profile={},
    )  # fmt: skip
    assert found.exit_code == 0
    assert found.verdict() == ("This device computes correctly. Slower than it should be: copies.")
    assert json.loads(found.to_json())["causes"].keys() == {"slow link"}
