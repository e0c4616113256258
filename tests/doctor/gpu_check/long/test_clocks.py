"""Sustained rates: a device that slows down is found, and sensors that fail end nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from megatrain.doctor.gpu_check.long import clocks as module
from megatrain.doctor.gpu_check.long.clocks import Sampler, found_of, measure, sensor
from testkit.patience import eventually
from tests.doctor.gpu_check.long.givens import Kept, given_on_cpu


def test_a_device_that_slows_down_sustains_less() -> None:
    steady = found_of([100e12] * 30, [], "none")["figures"]
    assert steady["sustained_flops"] == steady["first_flops"]
    rates = [100e12] * 5 + [92e12] * 25
    samples: list[Mapping[str, float]] = [{"clock_mhz": 2700.0}, {"clock_mhz": 2500.0}]
    found = found_of(rates, samples, "NVML")
    assert found["figures"]["sustained_flops"] == 92e12
    assert found["lead"].startswith("92 TFLOP/s sustained, 92 % of the first 100 TFLOP/s")
    assert found["tables"]["Sensors"] == [
        {"sensor": "clock_mhz", "first": 2700.0, "least": 2500.0, "most": 2700.0, "last": 2500.0}
    ]


def test_sensors_that_stop_end_nothing() -> None:
    values = iter([{"power_w": 300.0}])
    sampler = Sampler(lambda: next(values), every_s=1e-3)
    assert eventually(lambda: not sampler._thread.is_alive())
    assert sampler.stop() == [{"power_w": 300.0}]
    assert Sampler(None).stop() == []


def test_tools_are_asked_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sensor("cpu") == ("none for this type of device", None)
    monkeypatch.setattr(module, "pci_address", lambda device: "0000:01:00.0")
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    monkeypatch.setattr(module, "run_tool", lambda command: "")
    assert sensor("cuda:0") == ("none: neither pynvml nor nvidia-smi is there", None)
    monkeypatch.setattr(module, "run_tool", lambda command: "301.5, 64, 2520")
    name, read = sensor("cuda:0")
    assert name == "nvidia-smi"
    assert read is not None
    assert read() == {"power_w": 301.5, "temperature_c": 64.0, "clock_mhz": 2520.0}
    monkeypatch.setattr(module, "run_tool", lambda command: "[N/A], 64, 2520")
    assert read() == {"temperature_c": 64.0, "clock_mhz": 2520.0}


def test_products_are_timed_for_their_share_of_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MINUTE_S", 1.0)
    found = measure(given_on_cpu(Kept(), tmp_path))
    assert found["figures"]["sustained_flops"] > 0
    assert "sensors: none for this type of device" in found["lead"]
