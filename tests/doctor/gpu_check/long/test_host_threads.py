"""A thread that spins is found by its CPU time, and its function by its stacks."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from megatrain.doctor.gpu_check.long.host_threads import (
    cpu_seconds,
    measure,
    sampled_while,
)
from testkit.patience import eventually
from tests.doctor.gpu_check.long.givens import Kept, given_on_cpu


def test_a_thread_that_spins_is_found() -> None:
    ended, sleeper = threading.Event(), threading.Thread(target=lambda: ended.wait(), name="sleeps")

    def spins_here() -> None:
        while not ended.is_set():
            sum(range(1000))

    spinner = threading.Thread(target=spins_here, name="spins")
    spinner.start()
    sleeper.start()

    def used(name: str) -> float:
        return sum(seconds for thread, seconds in cpu_seconds().values() if thread == name)

    def spins_on() -> None:
        begun = used("spins")
        eventually(lambda: used("spins") > begun + 0.2)

    try:
        found = sampled_while(spins_on)
    finally:
        ended.set()
        spinner.join()
        sleeper.join()
    cpu = {row["thread"]: row["cpu_s"] for row in found["CPU time"]}
    assert cpu["spins"] >= 0.2
    assert cpu.get("sleeps", 0.0) < 0.05
    first = next(row for row in found["Stacks"] if row["thread"] == "spins")
    assert ":spins_here:" in first["stack"]
    asleep = next(row for row in found["Stacks"] if row["thread"] == "sleeps")
    assert ":wait:" in asleep["stack"]


@pytest.mark.merge
def test_the_lanes_of_a_step_are_seen(tmp_path: Path) -> None:
    found = measure(given_on_cpu(Kept(), tmp_path))
    names = {row["thread"] for row in found["tables"]["Stacks"]}
    assert {"lane compute", "lane in", "lane out", "lane host"} <= names
    assert "busiest thread" in found["lead"]
