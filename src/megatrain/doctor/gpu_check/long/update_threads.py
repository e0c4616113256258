"""Part `update`: the optimizer's kernel by threads, alone and beside copies to the device.

Updates and copies share host memory: how much each takes from the other is what plans must guess.

Law (tests/doctor/gpu_check/long/test_update_threads.py): each count of threads up to the cores has
a row, with the rates of both alone and together.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from megatrain.doctor.examine import update_work
from megatrain.doctor.gpu_check.long.given import Given
from megatrain.memory.host import num_cores
from megatrain.optim.native import load_kernel
from megatrain.text import byte_rate, figure, percent

THREADS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
PARAMS = 96 << 20
"""Params that are updated on a device that is measured in full: 2 GB, beyond any cache."""
COPY_BYTES = 1 << 30
POINT_S = 1.5


def measure(given: Given) -> dict[str, Any]:
    """Return a row for each number of threads."""
    scale, kernel = given.scale, load_kernel()
    params = int(PARAMS * (1 if scale == 1 else 1 / 64))
    num_bytes = int(COPY_BYTES * (1 if scale == 1 else 1 / 64))
    seconds = max(0.1, POINT_S * scale)
    device = given.subject.new_device()
    work = update_work(kernel, params)
    host = device.map_host(num_bytes, "the copies of gpu-check")
    host.fill_(1)
    there = device.allocate(num_bytes, "the copies of gpu-check")

    def copy() -> None:
        device.copy(there, host)
        device.synchronize()

    rows = list[dict[str, Any]]()
    try:
        copy_alone = num_bytes * _rate(copy, seconds)
        for row in _rows(given, work, copy, seconds, params, num_bytes):
            rows.append(row)
            given.keep(_found(rows, copy_alone, kernel.description))
    finally:
        device.unmap_host(host)
        device.close()
    return _found(rows, copy_alone, kernel.description)


def _rows(
    given: Given,
    work: Callable[[int], None],
    copy: Callable[[], None],
    seconds: float,
    params: int,
    num_bytes: int,
) -> Iterator[dict[str, Any]]:
    for threads in counts_for(num_cores()):
        if given.left_s() < 4 * seconds:
            yield {"threads": threads, "left_out": "no time was left"}
            continue
        given.say(f"updates by {threads} threads, alone and beside copies")
        update = partial(work, threads)
        alone = params * _rate(update, seconds)
        updates, copies = both_rates(update, copy, given.subject.new_stream, seconds)
        yield {
            "threads": threads,
            "update_params_per_s": alone,
            "beside_copies_params_per_s": params * updates,
            "copies_beside_bytes_per_s": num_bytes * copies,
        }


def counts_for(cores: int) -> list[int]:
    """Return the numbers of threads to try: usual ones up to the cores, and the cores."""
    return sorted({count for count in THREADS if count < cores} | {cores})


def _rate(work: Callable[[], None], seconds: float) -> float:
    """Return the calls per second."""
    work()
    begin, calls = time.perf_counter(), 0
    while calls < 2 or time.perf_counter() - begin < seconds:
        work()
        calls += 1
    return calls / (time.perf_counter() - begin)


def both_rates(
    first: Callable[[], None], second: Callable[[], None], stream: Callable[[], Any], seconds: float
) -> tuple[float, float]:
    """Return the calls per second of both at once; the second has a thread and a stream."""
    ended, calls, errors = threading.Event(), [0], list[BaseException]()

    def repeat() -> None:
        try:
            with stream():
                while not ended.is_set():
                    second()
                    calls[0] += 1
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=repeat, name="copies")
    thread.start()
    begin = time.perf_counter()
    try:
        rate = _rate(first, seconds)
    finally:
        ended.set()
        thread.join()
    if errors:
        raise errors[0]
    return rate, calls[0] / (time.perf_counter() - begin)


def _found(rows: list[dict[str, Any]], copy_alone: float, kernel: str) -> dict[str, Any]:
    done = [row for row in rows if "update_params_per_s" in row]
    lead = "Nothing was measured."
    if done:
        best = max(done, key=lambda row: row["update_params_per_s"])
        kept = best["copies_beside_bytes_per_s"] / copy_alone
        lead = (
            f"{figure(best['update_params_per_s'])} params/s by {best['threads']} threads; copies "
            f"keep {percent(kept)} of {byte_rate(copy_alone)} meanwhile."
        )
    figures = {"copy_alone_bytes_per_s": copy_alone, "kernel": kernel}
    return {"lead": lead, "figures": figures, "tables": {"Threads": [*rows]}}
