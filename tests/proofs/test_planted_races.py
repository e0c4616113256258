"""The detector finds what it is for: planted races, each kind in every schedule of the device.

A small pipeline of the engine's kind: weights go up into two slots, a kernel makes gradients of
them, those come down, and the host changes the weights with them. Each plant breaks one thing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from testkit.simulated.accelerator import Policy, SimEvent, Simulator

SCHEDULES: list[tuple[Policy, int]] = [
    ("late", 0),
    ("early", 0),
    *(("random", seed) for seed in range(6)),
]
SIZE, ROUNDS = 16, 4


class Pipeline:
    """Two slots, two gradient buffers, three streams and the host."""

    def __init__(self, simulator: Simulator, plant: str) -> None:
        self.simulator, self.plant = simulator, plant
        self.up, self.compute, self.down = (simulator.stream(n) for n in ("up", "compute", "down"))
        self.slots = [self._floats(simulator.empty) for _ in range(2)]
        self.gradients = [self._floats(simulator.empty) for _ in range(2)]
        self.weights = [self._floats(simulator.pinned).zero_() for _ in range(ROUNDS)]
        self.drained = [self._floats(simulator.pinned).zero_() for _ in range(ROUNDS)]
        self.filled: list[SimEvent | None] = [None, None]
        self.used: list[SimEvent | None] = [None, None]
        self.made: list[SimEvent | None] = [None, None]
        self.moved: list[SimEvent] = []

    def run(self) -> list[str]:
        with self.simulator.default:
            for number in range(ROUNDS):
                self._fetch(number)
                self._compute(number)
                self._drain(number)
            for number in range(ROUNDS):
                self._update(number)
            self.simulator.synchronize()
        return self.simulator.races

    def _fetch(self, number: int) -> None:
        slot = number % 2
        with self.up as stream:
            early = stream.record_event()
            if self.plant == "slot written by two streams" and number:
                with self.down:
                    self.slots[slot].copy_(self.weights[number], non_blocking=True)
            if self.plant not in ("fetch does not wait for compute", "fetch waits behind the copy"):
                self._wait(stream, self.used[slot])
            self.slots[slot].copy_(self.weights[number], non_blocking=True)
            if self.plant == "fetch waits behind the copy":
                self._wait(stream, self.used[slot])
            wrong = self.plant == "fetched, recorded on the wrong stream"
            late = (self.down if wrong else stream).record_event()
            self.filled[slot] = early if self.plant == "fetched, recorded too early" else late

    def _compute(self, number: int) -> None:
        slot = number % 2
        with self.compute as stream:
            if self.plant != "compute does not wait for fetch":
                other = self.plant == "compute waits for the other slot"
                self._wait(stream, self.filled[1 - slot if other else slot])
            if self.plant != "compute does not wait for drain":
                self._wait(stream, self.moved[number - 2] if number >= 2 else None)
            early = stream.record_event()
            self.gradients[slot].copy_(self.slots[slot] * 2 + 1)
            self.used[slot] = self.made[slot] = stream.record_event()
            if self.plant == "made, recorded too early":
                self.made[slot] = early
            if self.plant == "used, recorded too early":
                self.used[slot] = early

    def _drain(self, number: int) -> None:
        slot = number % 2
        with self.down as stream:
            if self.plant != "drain does not wait for compute":
                self._wait(stream, self.made[slot])
            self.drained[number].copy_(self.gradients[slot], non_blocking=True)
            self.moved.append(stream.record_event())
            if self.plant == "freed while another stream uses it":
                temporary = self._floats(self.simulator.empty)
                with self.up:
                    temporary.copy_(self.weights[number], non_blocking=True)
                del temporary

    def _update(self, number: int) -> None:
        if self.plant == "another thread updates unasked":
            thread = threading.Thread(target=self._write, args=(number,))
            thread.start()
            thread.join()
            return
        if self.plant != "host reads before the drain is done":
            self.moved[number].synchronize()
        self._write(number)
        if self.plant == "host writes what is being fetched" and number + 1 < ROUNDS:
            self.simulator.touch(self.weights[number + 1], writes=True, what="update")

    def _write(self, number: int) -> None:
        self.simulator.touch(self.drained[number], writes=False, what="update")
        self.simulator.touch(self.weights[number], writes=True, what="update")

    @staticmethod
    def _floats(make: Callable[[int], Tensor]) -> Tensor:
        return make(4 * SIZE).view(torch.float32)

    @staticmethod
    def _wait(stream: object, event: SimEvent | None) -> None:
        if event is not None:
            stream.wait_event(event)  # type: ignore[attr-defined]


PLANTS = [
    "compute does not wait for fetch",
    "fetch does not wait for compute",
    "compute does not wait for drain",
    "drain does not wait for compute",
    "compute waits for the other slot",
    "fetch waits behind the copy",
    "fetched, recorded too early",
    "made, recorded too early",
    "used, recorded too early",
    "fetched, recorded on the wrong stream",
    "slot written by two streams",
    "host reads before the drain is done",
    "host writes what is being fetched",
    "another thread updates unasked",
    "freed while another stream uses it",
]


@pytest.mark.parametrize(("policy", "seed"), SCHEDULES)
def test_the_whole_pipeline_has_no_race(policy: Policy, seed: int) -> None:
    assert Pipeline(Simulator(seed, policy), "").run() == []


@pytest.mark.parametrize(("policy", "seed"), SCHEDULES)
@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_race_is_found(plant: str, policy: Policy, seed: int) -> None:
    assert Pipeline(Simulator(seed, policy), plant).run() != []


def test_the_plants_are_all_there() -> None:
    assert len(set(PLANTS)) == len(PLANTS) >= 12


@pytest.mark.parametrize("told", [True, False])
def test_an_allocator_that_was_told_of_a_stream_waits_for_it(told: bool) -> None:
    simulator = Simulator(policy="late")
    source = simulator.pinned(64)
    with simulator.default:
        memory = simulator.empty(64)
        with simulator.stream() as other:
            memory.copy_(source, non_blocking=True)
        if told:
            simulator.record_stream(memory, other)
        del memory
    assert bool(simulator.races) == (not told)


@pytest.mark.parametrize("name", ["casts", ""])
def test_streams_of_one_name_are_one_queue_and_others_are_not(name: str) -> None:
    """As on CUDA: work on them needs no event between, and cannot overlap."""
    simulator = Simulator(policy="late")
    source = simulator.pinned(64)
    with simulator.default:
        memory = simulator.empty(64)
    with simulator.stream(name) as first:
        memory.copy_(source, non_blocking=True)
    with simulator.stream(name) as second:
        memory.zero_()
    assert (first is second) == (not simulator.races) == bool(name)


def test_a_race_is_told_by_both_sides() -> None:
    races = Pipeline(Simulator(policy="late"), "compute does not wait for fetch").run()
    assert "reads what copy_ by up writes" in races[0]


def test_host_memory_in_a_device_op_is_refused() -> None:
    simulator, host = Simulator(), torch.zeros(16)
    memory = simulator.empty(64).view(torch.float32)
    with (
        simulator.stream(),
        pytest.raises(AssertionError, match=r"^add_: a host tensor \(16,\) meets device memory$"),
    ):
        memory.add_(host)


def test_a_copy_that_changes_the_dtype_on_its_way_is_refused() -> None:
    simulator = Simulator()
    source = simulator.pinned(64).view(torch.float32)
    memory = simulator.empty(32).view(torch.bfloat16)
    with simulator.stream(), pytest.raises(AssertionError, match="changes the dtype"):
        memory.copy_(source, non_blocking=True)


def test_copies_that_the_host_waits_for_are_counted() -> None:
    simulator, pageable = Simulator(), torch.zeros(64, dtype=torch.uint8)
    pinned, memory = simulator.pinned(64), simulator.empty(64)
    with simulator.stream():
        memory.copy_(pinned, non_blocking=True)
        assert simulator.num_syncs == 0
        memory.copy_(pinned)
        assert simulator.num_syncs == 1
        memory.copy_(pageable, non_blocking=True)
        assert simulator.num_syncs == 2
        assert float(memory.sum()) >= 0
        assert simulator.num_syncs == 3
