"""Measuring: a device that is slower by a known factor is found slower by it, within the budget."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatrain.devices.accelerator import AcceleratorDevice
from megatrain.devices.device import CpuDevice
from megatrain.doctor import rates
from megatrain.doctor.rates import (
    Bench,
    CopyRates,
    copy_rates,
    fp8_gain,
    product_rates,
)
from testkit.simulated.accelerator import Simulator
from testkit.simulated.watched import watched

HERE = Bench(place=torch.device("cpu"), synchronize=lambda: None, budget_s=0.02)


class SlowDevice(CpuDevice):
    """Copies at given rates on a clock of its own; `shared`: both directions share one link."""

    def __init__(self, into: float, out: float, *, shared: bool = False) -> None:
        super().__init__(copying=True)
        self._rates, self._shared = {True: into, False: out}, shared
        self._lock = threading.Lock()
        self.now = self._begin = 0.0
        self.inward: set[int] = set()

    def allocate(self, num_bytes: int, purpose: str) -> Tensor:
        made = super().allocate(num_bytes, purpose)
        self.inward.add(made.data_ptr())
        return made

    def copy(self, target: Tensor, source: Tensor) -> None:
        seconds = target.nbytes / self._rates[target.data_ptr() in self.inward]
        with self._lock:
            begin = self.now if self._shared else self._begin
            self.now = max(self.now, begin + seconds)

    def synchronize(self) -> None:
        self._begin = self.now


def _measured(device: SlowDevice, monkeypatch: pytest.MonkeyPatch) -> CopyRates:
    monkeypatch.setattr("megatrain.doctor.rates.time.perf_counter", lambda: device.now)
    return copy_rates(device, num_bytes=1 << 16, budget_s=1e-9)


def test_copies_are_measured_each_way(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = _measured(SlowDevice(1e8, 4e8), monkeypatch)
    assert rates.into == pytest.approx(1e8)
    assert rates.out == pytest.approx(4e8)
    assert rates.duplex_share == pytest.approx(1)


def test_a_link_that_is_shared_both_ways_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = _measured(SlowDevice(2e8, 2e8, shared=True), monkeypatch)
    assert rates.into == pytest.approx(2e8)
    assert rates.duplex_share == pytest.approx(0.5)


def test_shapes_that_would_take_too_long_are_left_out() -> None:
    forward, _ = product_rates(HERE, (32, 4096), (16, 65536), most_s=0.2)
    assert (32, 16) in [point[:2] for point in forward]
    assert (4096, 65536) not in [point[:2] for point in forward]


def test_a_device_that_does_not_multiply_fp8_gains_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert fp8_gain(HERE, 64, 64) == 1.0
    there = replace(HERE, place=torch.device("meta"))
    monkeypatch.setattr(rates, "why_not_fp8", lambda _place: "no kernel")
    assert fp8_gain(there, 64, 256) == 1.0
    monkeypatch.setattr(rates, "why_not_fp8", lambda _place: "")
    monkeypatch.setattr(rates, "_gain", lambda bench, width, rows: 1.8)
    assert fp8_gain(there, 64, 256) == 1.8


def test_a_time_is_near_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    naps, now = iter([9.0, 0.01, *[0.01, 0.05, 0.01, 0.02] * 10]), [0.0]
    monkeypatch.setattr("megatrain.doctor.rates.time.perf_counter", lambda: now[0])

    def work() -> None:
        now[0] += next(naps)

    assert HERE.seconds(work) == pytest.approx(0.01)


def test_the_same_code_measures_an_accelerator() -> None:
    simulator = Simulator(policy="late")
    with watched(simulator):
        device = AcceleratorDevice(simulator)
        rates = copy_rates(device, num_bytes=1 << 16, budget_s=0.01, stream=simulator.stream)
        device.close()
    assert rates.into > 0
    assert rates.out > 0
    assert simulator.failures == []
