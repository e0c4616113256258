"""Part `registration`: pinning host memory, in time and in device memory; memory against its plan.

    pinning        written arenas of 8, 32 and 128 GB, as far as host memory allows: bytes per
                   second, and the device memory that the driver's tables of them take
    device memory  a step's ledger against what torch's allocator has held and what the driver says

Both are assumed by planning/machine/reserve.py; these figures are there to correct it.

Law (tests/doctor/gpu_check/long/test_registration.py): no size takes more than its share of host
memory, and memory that cannot be pinned is a row that says why.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from typing import Any

from megatrain.devices.pinning import NotPinned
from megatrain.devices.runtime import TorchRuntime
from megatrain.doctor.gpu_check.long.given import Given
from megatrain.doctor.gpu_check.long.long_model import long_model, planned_step, steps_of
from megatrain.doctor.gpu_check.long.results import CannotRun
from megatrain.memory.arena import map_arena
from megatrain.memory.host import free_bytes
from megatrain.memory.prefault import prefault
from megatrain.planning.machine.reserve import LIBRARY_BYTES, PAGE_TABLE_SHARE
from megatrain.planning.search import reserves
from megatrain.text import byte_rate, size

SIZES = (8_000_000_000, 32_000_000_000, 128_000_000_000)
_SMALL_SHARE = 1 / 128
"""Share of these sizes, for a device that is measured in small."""
HOST_SHARE = 0.6
"""Share of free host memory that the largest may have."""
_NAME = "the pinning of gpu-check"


def measure(given: Given) -> dict[str, Any]:
    """Return the rates of pinning, and device memory as planned and as held."""
    runtime = given.subject.runtime
    if not isinstance(runtime, TorchRuntime):
        raise CannotRun("a processor has nothing to pin host memory for")
    rows = []
    for row in _pinned(given, runtime):
        rows.append(row)
        given.keep(_found(rows, []))
    return _found(rows, _memory(given, runtime))


def sizes_for(scale: float, free: int) -> list[int]:
    """Return the sizes that fit into the share of free host memory; at least a part of it."""
    wanted = [int(num_bytes * (1 if scale == 1 else _SMALL_SHARE)) for num_bytes in SIZES]
    most = int(HOST_SHARE * free)
    return [num_bytes for num_bytes in wanted if num_bytes <= most] or [most // 2]


def _pinned(given: Given, runtime: TorchRuntime) -> Iterator[dict[str, Any]]:
    for num_bytes in sizes_for(given.scale, free_bytes()):
        given.say(f"pinning {size(num_bytes)}")
        device = given.subject.new_device()
        arena = map_arena(_NAME, num_bytes)
        prefault(_NAME, arena)
        before = runtime.memory_facts()["driver_free_bytes"]
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            begin = time.perf_counter()
            device.pin(_NAME, arena)
            seconds = time.perf_counter() - begin
        row: dict[str, Any] = {"bytes": num_bytes, "seconds": seconds}
        refused = [str(one.message) for one in told if one.category is NotPinned]
        if refused:
            yield row | {"left_out": refused[0]}
        else:
            taken = before - runtime.memory_facts()["driver_free_bytes"]
            rates = {"bytes_per_s": num_bytes / seconds, "device_bytes": taken}
            yield row | rates | {"device_share": taken / num_bytes}
        device.close()
        del arena


def _memory(given: Given, runtime: TorchRuntime) -> list[dict[str, Any]]:
    model = long_model(given.profile, given.scale)
    plan = planned_step(given, model)
    given.say(f"device memory of steps of {model.step_tokens:,} tokens")
    before = runtime.memory_facts()["driver_free_bytes"]
    micro = plan.settings.micro_batch_tokens
    batch = model.with_step(model.step_tokens, packed=True, micro=micro).batch()
    device = given.subject.new_device()
    with steps_of(given, model).engine(plan.settings, device) as engine:
        for _ in range(2):
            engine.step(batch)
        engine.settle()
        held = runtime.memory_facts()
    taken = before - held["driver_free_bytes"]
    amounts = {
        "planned, without reserve": plan.ledger.total("device"),
        "planned reserve": reserves(plan.profile, plan.ledger).get("device", 0),
        "most that was allocated": held["peak_allocated_bytes"],
        "most that the allocator held": held["peak_reserved_bytes"],
        "taken from what the driver calls free": taken,
        "of that, not the allocator's": max(0, taken - held["peak_reserved_bytes"]),
    }
    return [{"memory": name, "bytes": amount} for name, amount in amounts.items()]


def _found(rows: list[dict[str, Any]], memory: list[dict[str, Any]]) -> dict[str, Any]:
    rates = [row["bytes_per_s"] for row in rows if "bytes_per_s" in row]
    lead = "Host memory cannot be pinned."
    if rates:
        share = max(row["device_share"] for row in rows if "device_share" in row)
        lead = f"Pinning at {byte_rate(min(rates))} or more, with {share:.2%} of it on the device."
    figures = {"assumed_share": PAGE_TABLE_SHARE, "assumed_library_bytes": LIBRARY_BYTES}
    return {
        "lead": lead,
        "figures": figures,
        "tables": {"Pinning": [*rows], "Device memory": memory},
    }
