"""Without any one of its waits the engine on an accelerator is found out."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from megatrain.devices.accelerator import AcceleratorDevice
from megatrain.engine.actions import StepActions
from megatrain.lanes.lane import Action, Lane, Work
from megatrain.memory.kinds import TensorKind
from megatrain.step.ops import Op
from proofs.races import Run, play, reference, simulator_of, world_of
from testkit.cases import at_a_push
from testkit.patience import HANG_S
from testkit.simulated.accelerator import Policy
from testkit.simulated.mutants import MUTANTS, NOT_WAITS, Mutant, mutated, sites
from testkit.simulated.watched import WatchedOptimizer, watched
from testkit.worlds import Case, make_batch

STEPS = (((1, 4), (2, 5)), ((2, 5), (1, 4)))
STUCK_S = 3.0
"""After so long a mutant counts as stuck. Whole code has HANG_S, however busy the machine is."""


Scene = Callable[[float], list[str]]
"""Plays something within a deadline; returns the faults it found."""


def run(update: str, tape: str, *, policy: Policy = "late", staged: bool = False) -> Run:
    case = Case(
        sort="",
        steps=STEPS,
        update=update,  # type: ignore[arg-type]
        tape=tape,  # type: ignore[arg-type]
        evaluates_after=(0,),
        form="padded",
    )
    return Run(
        family="llama",
        dtype="bf16",
        case=case,
        policy=policy,
        seed=1,
        staged=staged,
    )


def paged() -> Run:
    """A mixture whose experts come in pages."""
    one = run("late", "device")
    return replace(one, family="mixtral", case=replace(one.case, expert_pages=3))


def faults_of(one: Run, deadline_s: float) -> list[str]:
    simulator = simulator_of(one)
    found = play(one, simulator, deadline_s=deadline_s)
    return [*found.differences(reference(one)), *simulator.races, *map(repr, simulator.failures)]


def on_lanes(one: Run) -> Scene:
    return lambda deadline_s: faults_of(one, deadline_s)


def by_the_reference(deadline_s: float) -> list[str]:
    """The reference plays in the caller's thread: here on a stream of its own."""
    one = run("late", "host")
    simulator, act = simulator_of(one), Lane.act
    stream = simulator.stream()

    def act_on_stream(lane: Lane, op: Op, action: Action) -> int:
        with stream:
            return act(lane, op, action)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lane, "act", act_on_stream)
        found = play(one, simulator, reference=True)
    return [*found.differences(reference(one)), *simulator.races]


def with_a_slow_host(deadline_s: float) -> list[str]:
    """What the host lane asks for has long been issued when it asks."""
    perform = Lane._perform

    def perform_late(lane: Lane, work: Work) -> None:
        issued, until = lane._progress._num_issued, time.monotonic() + deadline_s
        while lane.name == "host" and time.monotonic() < until:
            if all(issued[awaited.lane] > awaited.number for awaited in work.waits):
                break
            time.sleep(0.001)
        perform(lane, work)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lane, "_perform", perform_late)
        return faults_of(run("late", "device", policy="random"), deadline_s)


def weights_are_read(deadline_s: float) -> list[str]:
    """After `synchronize`, which must wait for updates that the host lane is slow to make."""
    one = run("in_backward", "device")
    simulator, world = simulator_of(one), world_of(one.family, one.dtype)
    optimizer = WatchedOptimizer(world.optimizer(), simulator)
    update = optimizer.update

    def update_late(*args: Any, **counts: Any) -> None:
        time.sleep(0.05)
        update(*args, **counts)

    optimizer.update = update_late  # type: ignore[method-assign]
    with watched(simulator):
        device = AcceleratorDevice(simulator)
        settings: dict[str, Any] = {"device": device, "optimizer": optimizer}
        with world.engine(one.case, **settings, deadline_s=deadline_s) as engine:
            engine.step(make_batch(STEPS[0], seed=0))
            engine.synchronize()
            simulator.touch(world.store.arena(TensorKind.HI), writes=False, what="the caller")
    return simulator.races


def a_failed_step(deadline_s: float) -> list[str]:
    """After the error is raised, the caller looks at gradients and weights."""
    one = run("none", "host")
    simulator, world = simulator_of(one), world_of(one.family, one.dtype)
    backward = StepActions._backward

    def fail(actions: StepActions, op: Op) -> None:
        if op.block == 1:
            raise ZeroDivisionError
        backward(actions, op)

    with pytest.MonkeyPatch.context() as patch, watched(simulator):
        patch.setattr(StepActions, "_backward", fail)
        device = AcceleratorDevice(simulator)
        engine = world.engine(one.case, device=device, lanes=None, deadline_s=deadline_s)
        with suppress(ZeroDivisionError):
            engine.step(make_batch(STEPS[0], seed=0))
        for kind in (TensorKind.HI, TensorKind.GRAD):
            simulator.touch(world.store.arena(kind), writes=True, what="the caller")
        engine.close()
    return simulator.races


def a_closed_device(deadline_s: float) -> list[str]:
    """Memory is unpinned, and given back, only when no copy uses it any more."""
    one = run("none", "host")
    simulator, world = simulator_of(one), world_of(one.family, one.dtype)
    with watched(simulator):
        device = AcceleratorDevice(simulator)
        arena = world.store.arena(TensorKind.HI)
        device.pin("weights", arena)
        with simulator.stream():
            device.copy(device.allocate(arena.nbytes, "slot"), arena)
        device.close()
        simulator.touch(arena, writes=True, what="the caller")
    return simulator.races


SCENES: dict[str, Scene] = {
    "late": on_lanes(run("late", "host")),
    "in backward": on_lanes(run("in_backward", "device")),
    "staged": on_lanes(run("in_backward", "host", staged=True)),
    "gradients alone": on_lanes(run("none", "host", policy="random")),
    "pages": on_lanes(paged()),
    "a slow host": with_a_slow_host,
    "by the reference": by_the_reference,
    "weights are read": weights_are_read,
    "a failed step": a_failed_step,
    "a closed device": a_closed_device,
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "host memory:")
        yield


@pytest.mark.merge
@pytest.mark.parametrize("scene", SCENES)
def test_whole_code_has_no_fault(scene: str) -> None:
    assert SCENES[scene](HANG_S) == []


def is_found(mutant: Mutant, scene: str, deadline_s: float) -> bool:
    with mutated(mutant):
        try:
            return bool(SCENES[scene](deadline_s))
        except Exception:
            return True


@pytest.mark.merge
@pytest.mark.parametrize("mutant", at_a_push([m for m in MUTANTS if not m.equivalent], 16), ids=str)
def test_a_mutant_is_found(mutant: Mutant) -> None:
    assert is_found(mutant, mutant.scene, STUCK_S)


@pytest.mark.merge
@pytest.mark.parametrize("scene", at_a_push(list(SCENES), 3))
@pytest.mark.parametrize("mutant", [m for m in MUTANTS if m.equivalent], ids=str)
def test_an_equivalent_mutant_is_not_found(mutant: Mutant, scene: str) -> None:
    assert not is_found(mutant, scene, HANG_S)


def test_every_mutant_has_its_lines() -> None:
    """A push plays some mutants; code that has moved is seen for all of them."""
    for mutant in MUTANTS:
        with mutated(mutant):
            pass


def test_every_wait_has_a_mutant() -> None:
    named = Counter({(mutant.where, mutant.call) for mutant in MUTANTS})
    assert {site for site in sites() if site not in named} == set(NOT_WAITS)


def test_a_simulator_that_looks_away_would_be_noticed() -> None:
    """Values alone do not show a race: on an early device they are right by luck."""
    mutant = next(m for m in MUTANTS if m.what == "its stream does not wait")
    one = run("none", "device", policy="early")
    simulator = simulator_of(one)
    with mutated(mutant):
        found = play(one, simulator)
    assert found.differences(reference(one)) == []
    assert simulator.races
