"""On a simulated accelerator: the bits of the CPU, no race, no wait of the host, no loose end."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch

from megatrain.devices.accelerator import AcceleratorDevice
from megatrain.engine.engine import Engine
from megatrain.errors import OutOfDeviceMemory, ScratchFileCorrupted
from megatrain.memory.kinds import TensorKind
from megatrain.optim.states import M, V
from megatrain.step.ops import OpKind
from proofs.races import CONFIGS, Run, faults_of, run_of, simulator_of, world_of
from testkit.cases import at_a_push
from testkit.schedules import lose_waits
from testkit.simulated.accelerator import Simulator
from testkit.simulated.watched import WatchedOptimizer, watched
from testkit.worlds import Case, World, make_batch

pytestmark = pytest.mark.merge

NUM_RUNS = 210
SHAPES = ((1, 4), (2, 5))


@pytest.mark.parametrize("number", at_a_push(range(NUM_RUNS), 24))
def test_a_run_has_the_bits_of_the_cpu_and_no_race(number: int) -> None:
    assert faults_of(run_of(number)) == []


@pytest.mark.parametrize("update", ["late", "in_backward"])
@pytest.mark.parametrize("kind", [OpKind.SEND, OpKind.ORTHOGONALIZE, OpKind.RETURN])
def test_a_lost_wait_of_directions_is_noticed(
    kind: OpKind, update: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An op that does not say what it touches races, or finds what is not there yet."""
    case = Case(sort="", steps=(SHAPES, SHAPES), update=update)
    run = Run(family="llama", dtype="bf16", case=case, policy="late", seed=1, optimizer="muon")
    assert faults_of(run) == []
    touched = ("grad", "host_grad", "grad_slot")
    lose_waits(monkeypatch, kind, reads=touched, writes=touched)
    assert faults_of(run) != []


def test_staged_copies_of_two_lanes_without_their_lock_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case(sort="", steps=(SHAPES, SHAPES), update="in_backward", tape="host", expert_pages=3)
    run = Run(family="mixtral", dtype="bf16", case=case, policy="random", seed=0, staged=True)
    monkeypatch.setattr("testkit.simulated.watched.HeardLock", lambda _: nullcontext())
    assert faults_of(run) != []


def engine_on(simulator: Simulator, world: World, case: Case, **sizes: int) -> Engine:
    optimizer = None
    if case.update != "none":
        optimizer = WatchedOptimizer(world.optimizer(), simulator)
    device = AcceleratorDevice(simulator, **sizes)
    return world.engine(case, device=device, optimizer=optimizer)


@pytest.fixture
def simulated() -> Iterator[Simulator]:
    simulator = Simulator(policy="late")
    with watched(simulator):
        yield simulator
    assert simulator.races == []
    assert simulator.failures == []


@pytest.mark.parametrize("form", ["plain", "padded", "packed", "flat"])
@pytest.mark.parametrize("family", CONFIGS)
def test_in_a_steady_step_no_lane_waits_for_the_device(
    family: str, form: Any, simulated: Simulator
) -> None:
    case = Case(sort="", steps=(), update="late", tape="host", form=form)
    with engine_on(simulated, world_of(family, "bf16"), case) as engine:
        engine.step(make_batch(SHAPES, seed=1, form=form))
        before = simulated.num_syncs
        engine.step(make_batch(SHAPES, seed=2, form=form))
        engine.step(make_batch(SHAPES, seed=3, form=form))
        assert simulated.num_syncs == before


@pytest.mark.parametrize("dropped", [OpKind.READ, OpKind.WRITE, OpKind.UPDATE])
def test_an_undeclared_use_of_the_ring_would_be_noticed(
    dropped: OpKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the declaration nothing orders disk and update, whatever their timing."""
    lose_waits(monkeypatch, dropped, reads=("tier_slot",), writes=("tier_slot",))
    case = Case(sort="", steps=(SHAPES, SHAPES), update="late", tier="states")
    simulator = Simulator(policy="late")
    with watched(simulator), suppress(ScratchFileCorrupted):
        engine = engine_on(simulator, world_of("llama", "bf16"), case)
        with engine:
            for number in range(2):
                engine.step(make_batch(SHAPES, seed=number))
    assert any("tier ring" in race for race in simulator.races)


def test_a_wait_of_the_host_would_be_noticed(
    simulated: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(sort="", steps=(), update="none")
    monkeypatch.setattr(
        AcceleratorDevice, "counted", lambda self, tensor, purpose: _looked_at(tensor)
    )
    with engine_on(simulated, world_of("llama", "bf16"), case) as engine:
        engine.step(make_batch(SHAPES, seed=1))
        before = simulated.num_syncs
        engine.step(make_batch(SHAPES, seed=2))
        assert simulated.num_syncs > before


def _looked_at(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.sum().item() is not None
    return tensor


# Memory that is refused.


def state_of(world: World) -> dict[str, torch.Tensor]:
    return world.bytes_of(TensorKind.HI, TensorKind.LO, M, V)


def num_allocations(update: Any) -> int:
    simulator = Simulator(policy="late")
    case = Case(sort="", steps=(), update=update)
    with watched(simulator), engine_on(simulator, world_of("llama", "bf16"), case) as engine:
        engine.step(make_batch(SHAPES, seed=1))
    return simulator.num_allocations


def fail_at(number: int, update: Any) -> None:
    simulator = Simulator(policy="late", fails_at_allocation=number)
    world = world_of("llama", "bf16")
    case = Case(sort="", steps=(), update=update)
    world.rewind()
    before = state_of(world)
    engines: list[Engine] = []

    def step() -> None:
        with engine_on(simulator, world, case) as engine:
            engines.append(engine)
            engine.step(make_batch(SHAPES, seed=1))

    with watched(simulator), pytest.raises(OutOfDeviceMemory, match=r"^device memory: ") as caught:
        step()
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    torn = any(engine.weights_inconsistent for engine in engines)
    assert not torn or update == "in_backward"
    changed = [n for n, part in state_of(world).items() if not torch.equal(part, before[n])]
    assert not changed or torn
    assert simulator.races == []


@pytest.mark.parametrize("update", ["late", "in_backward"])
def test_an_allocation_that_fails_leaves_the_store_as_it_was(update: str) -> None:
    last = num_allocations(update)
    for number in {*range(1, 40, 6), *range(40, last, last // 12), last}:
        fail_at(number, update)


@pytest.mark.long
def test_any_allocation_that_fails_leaves_the_store_as_it_was() -> None:
    for number in range(1, num_allocations("late") + 1):
        fail_at(number, "late")


# Host memory that is pinned in place.

PIECE = 4096


def planned_bytes(world: World, update: str) -> int:
    kinds = [TensorKind.HI] if update == "in_backward" else [TensorKind.HI, TensorKind.GRAD]
    return sum(world.store.arena(kind).nbytes for kind in kinds)


@pytest.mark.parametrize("update", ["none", "late"])
def test_what_is_registered_is_what_was_planned(update: Any, simulated: Simulator) -> None:
    world = world_of("llama", "bf16")
    case = Case(sort="", steps=(), update=update)
    with engine_on(simulated, world, case, piece_bytes=PIECE):
        assert simulated.registered_bytes == planned_bytes(world, update)
        assert simulated.num_registrations >= planned_bytes(world, update) // PIECE
    assert simulated.registered_bytes == 0


def test_a_registration_that_fails_is_told_once_and_costs_no_bit() -> None:
    run = dataclasses.replace(run_of(0), family="llama", dtype="bf16", policy="late", staged=False)
    run = dataclasses.replace(run, case=Case(sort="", steps=(SHAPES,), update="late", tape="host"))
    number, failed = 0, True
    while failed:
        number += 1
        failed = refused_at(number, run)
    assert number > 4  # two arenas and the tape, in pieces


def refused_at(number: int, run: Run) -> bool:
    """Play with the number-th registration refused; return whether there was one."""
    simulator = simulator_of(run)
    simulator.fails_at_registration = number
    world = world_of(run.family, run.dtype)
    expected = world.play(run.case, reference=True)
    with watched(simulator), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        device = AcceleratorDevice(simulator, piece_bytes=1 << 16, ring_buffer_bytes=1000)
        optimizer = WatchedOptimizer(world.optimizer(), simulator)
        found = world.play(run.case, device=device, lanes=None, optimizer=optimizer)
    assert found.differences(expected) == []
    assert simulator.races == []
    assert simulator.registered_bytes == 0
    failed = simulator.num_registrations >= number
    lines = [str(warning.message) for warning in told if "can be pinned" in str(warning.message)]
    assert len(lines) == failed
    return failed
