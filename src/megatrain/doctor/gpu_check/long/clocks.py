"""Part `clocks`: products for a minute, with power, temperature and clock beside their rate.

Other figures come from bursts of a quarter of a second. A device that is warm is slower; the rate
of the last third of the minute is what a run of hours has.

    sensors   NVML, if the module pynvml is there; else nvidia-smi; else none, and the page says so

Laws (tests/doctor/gpu_check/long/test_clocks.py)
    1. A device that slows down has a sustained rate below the first one.
    2. Sensors that are missing, or that stop, end nothing; what was read is named.
"""

from __future__ import annotations

import importlib
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch

from megatrain.devices.runtime import pci_address
from megatrain.doctor.gpu_check.facts import run_tool
from megatrain.doctor.gpu_check.long.given import Given
from megatrain.doctor.rates import Bench, block_products
from megatrain.text import flop_rate, percent

MINUTE_S = 60.0
_EVERY_S = 0.5
_BLOCK_FLOPS = 22
"""FLOPs of the products of a block, per token and width squared (doctor/rates.py)."""
_NAMES = ("power_w", "temperature_c", "clock_mhz")
Read = Callable[[], Mapping[str, float]]


def measure(given: Given) -> dict[str, Any]:
    """Return the rate of products from second to second, and what the sensors say."""
    point = max(given.profile.forward_flops, key=lambda point: point.flops)
    device = given.subject.new_device()
    bench = Bench(place=given.subject.place, synchronize=device.synchronize)
    forward, _ = block_products(bench, point.width, point.tokens, torch.bfloat16)
    flops = float(_BLOCK_FLOPS * point.tokens * point.width**2)
    seconds = max(1.0, given.scale * min(MINUTE_S, given.left_s() - 5))
    name, read = sensor(str(given.subject.place))
    given.say(f"products for {seconds:.0f} s; sensors: {name}")
    with_sensor = Sampler(read)
    rates = _sustained(bench, forward, flops, seconds, max(0.2, seconds / 30))
    samples = with_sensor.stop()
    return found_of(rates, samples, name) | {"rates": rates}


def _sustained(
    bench: Bench, work: Callable[[], None], flops: float, seconds: float, every_s: float
) -> list[float]:
    """Return FLOP/s in equal parts of the time."""
    work()
    bench.synchronize()
    rates, end = list[float](), time.perf_counter() + seconds
    while (begin := time.perf_counter()) < end:
        calls = 0
        while time.perf_counter() - begin < every_s:
            work()
            bench.synchronize()
            calls += 1
        rates.append(calls * flops / (time.perf_counter() - begin))
    return rates


def found_of(
    rates: Sequence[float], samples: Sequence[Mapping[str, float]], sensors: str
) -> dict[str, Any]:
    """Return first and sustained rate, and the range of each sensor."""
    third = max(1, len(rates) // 3)
    first, sustained = max(rates[:third]), statistics.median(rates[-third:])
    ranges = [
        {
            "sensor": name,
            "first": values[0],
            "least": min(values),
            "most": max(values),
            "last": values[-1],
        }
        for name in _NAMES
        if (values := [sample[name] for sample in samples if name in sample])
    ]
    lead = (
        f"{flop_rate(sustained)} sustained, {percent(sustained / first)} of the first "
        f"{flop_rate(first)}; sensors: {sensors}."
    )
    figures = {"first_flops": first, "sustained_flops": sustained, "samples": len(samples)}
    return {"lead": lead, "figures": figures, "tables": {"Sensors": ranges}}


class Sampler:
    """A thread that reads sensors until it is stopped, or until they fail."""

    def __init__(self, read: Read | None, every_s: float = _EVERY_S) -> None:
        self._read, self._every_s = read, every_s
        self._samples: list[Mapping[str, float]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sensors", daemon=True)
        self._thread.start()

    def stop(self) -> list[Mapping[str, float]]:
        """Return what was read."""
        self._ended.set()
        self._thread.join()
        return self._samples

    def _run(self) -> None:
        while self._read is not None:
            try:
                if sample := self._read():
                    self._samples.append(sample)
            except Exception:  # a driver that stops telling is no fault of the device
                return
            if self._ended.wait(self._every_s):
                return


def sensor(device: str) -> tuple[str, Read | None]:
    """Return the name of what tells clocks of a device, and how to read it; None: nothing does."""
    address = pci_address(device)
    if address is None:
        return "none for this type of device", None
    if find_spec("pynvml") is not None and (read := _nvml(address)) is not None:
        return "NVML", read
    if run_tool(["nvidia-smi", f"--id={address}", "--query-gpu=name", "--format=csv"]):
        return "nvidia-smi", lambda: _asked(address)
    return "none: neither pynvml nor nvidia-smi is there", None


def _nvml(address: str) -> Read | None:
    nvml = importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByPciBusId(address.encode())
    except nvml.NVMLError:
        return None

    def read() -> Mapping[str, float]:
        return {
            "power_w": nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
            "temperature_c": float(
                nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
            ),
            "clock_mhz": float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
        }

    return read


def _asked(address: str) -> Mapping[str, float]:
    asked = "--query-gpu=power.draw,temperature.gpu,clocks.sm"
    told = run_tool(["nvidia-smi", f"--id={address}", asked, "--format=csv,noheader,nounits"])
    words = [word.strip() for word in told.split(",")]
    pairs = zip(_NAMES, words, strict=False)
    return {name: float(word) for name, word in pairs if word.replace(".", "", 1).isdigit()}
