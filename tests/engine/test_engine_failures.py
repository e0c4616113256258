"""Failures of the engine: they surface, nothing hangs or stays, and the store is whole or torn.

A store is *whole* if its weights, remainders and moments are those after some number of steps.
"""

from __future__ import annotations

import functools
import gc
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from megatrain.devices.device import CpuDevice
from megatrain.engine.actions import StepActions
from megatrain.engine.engine import Engine
from megatrain.errors import LaneTimeout, PlayerStopped
from megatrain.lanes.lane import Action
from megatrain.lanes.player import Player
from megatrain.step.ops import LANES, Op, OpKind
from megatrain.step.shape import StepShape, Update
from testkit.patience import HANG_S, eventually
from testkit.schedules import build_flush, build_step
from testkit.slow_lane import SlowLane
from testkit.states import State, same, state_of, threads_end
from testkit.toys import shorten_deadline
from testkit.worlds import Case, make_batch, world_of

SORT = "llama of 2 layers"
SHAPES = ((1, 4), (2, 3))
Site = tuple[OpKind, int | None]


def sites(update: Update) -> list[Site]:
    """Every kind and block that steps of SORT have."""
    shape = StepShape(num_blocks=4, num_micro=2, tape="host", update=update)
    ops = build_step(shape) + (build_flush(shape) if update == "late" else [])
    return sorted({(op.kind, op.block) for op in ops}, key=str)


class BoomError(Exception):
    pass


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    with threads_end():
        yield


@pytest.fixture
def break_at(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lets actions of one kind and block fail, from the `at_step`-th time they are due."""
    table = StepActions.table

    def break_(site: Site, *, at_step: int = 1, how: Callable[[], None] | None = None) -> None:
        due: list[object] = []

        def broken(action: Action, op: Op) -> int | None:
            if (op.kind, op.block) == site and op.micro in (None, 0):
                due.append(op)
                if len(due) >= at_step:
                    explode(op) if how is None else how()
            return action(op)

        def explode(op: Op) -> None:
            raise BoomError(str(op))

        monkeypatch.setattr(
            StepActions,
            "table",
            lambda self: {
                kind: functools.partial(broken, action) for kind, action in table(self).items()
            },
        )

    return break_


def case_of(update: Update) -> Case:
    return Case(sort=SORT, steps=(SHAPES,) * 3, update=update, tape="host", copying=True)


def player_of(engine: Engine) -> Player:
    assert isinstance(engine._player, Player)
    return engine._player


@functools.cache
def whole_states(update: Update) -> list[State]:
    """The states after 0, 1, 2 and 3 steps."""
    world = world_of(SORT)
    with world.engine(case_of(update), reference=True) as engine:
        states = [state_of(world)]
        for number in range(3):
            engine.step(make_batch(SHAPES, seed=number))
            engine.synchronize()
            states.append(state_of(world))
    return states


def train(engine: Engine, num_steps: int = 3) -> None:
    for number in range(num_steps):
        engine.step(make_batch(SHAPES, seed=number))
    engine.synchronize()


@pytest.mark.few(34)
@pytest.mark.parametrize("at_step", [1, 2])
@pytest.mark.parametrize(
    ("update", "site"),
    [
        pytest.param(update, (kind, block), id=f"{update}-{kind}-{block}")
        for update in ("none", "in_backward", "late")
        for kind, block in sites(update)
    ],
)
def test_a_failure_anywhere_surfaces_and_the_store_is_whole_or_torn(
    site: Site, update: Update, at_step: int, break_at: Callable[..., None]
) -> None:
    wholes = whole_states(update)
    world = world_of(SORT)
    engine = world.engine(case_of(update))
    break_at(site, at_step=at_step)
    with engine:
        with pytest.raises(BoomError) as caught:
            train(engine)
        assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "explode"
        (note,) = caught.value.__notes__
        assert note.endswith(f", at {caught.value}")
        is_consistent = any(same(state_of(world), whole) for whole in wholes)
        assert engine.weights_inconsistent == (not is_consistent)
        with pytest.raises(PlayerStopped) as refused:
            engine.step(make_batch(SHAPES, seed=0))
        assert refused.value.__cause__ is caught.value
    assert (
        any(same(state_of(world), whole) for whole in wholes) == is_consistent
    )  # close wrote nothing


def test_failures_tear_exactly_when_some_blocks_had_their_update(
    break_at: Callable[..., None],
) -> None:
    """The test above would pass an engine that never updates anything: here are both answers."""
    torn = {}
    for update, site in [
        ("late", (OpKind.UPDATE, 2)),
        ("late", (OpKind.FORWARD, 0)),
        ("in_backward", (OpKind.UPDATE, 2)),
        ("in_backward", (OpKind.FORWARD, 0)),
    ]:
        engine = world_of(SORT).engine(case_of(update))  # type: ignore[arg-type]
        break_at(site)
        with engine, suppress(BoomError):
            train(engine)
        torn[update, site[0]] = engine.weights_inconsistent
    assert torn == {
        ("late", OpKind.UPDATE): True,
        ("late", OpKind.FORWARD): False,
        ("in_backward", OpKind.UPDATE): True,
        ("in_backward", OpKind.FORWARD): False,
    }


def test_an_update_that_fails_behind_the_caller_is_told_by_the_next_step_as_torn(
    break_at: Callable[..., None],
) -> None:
    """In backward, a step returns while its last updates are under way."""
    world = world_of(SORT)
    lanes = [SlowLane(name, delay=(lambda op: 0.02) if name == "host" else None) for name in LANES]
    engine = world.engine(case_of("in_backward"), lanes=lanes)
    break_at((OpKind.UPDATE, 0))
    with engine:
        engine.step(make_batch(SHAPES, seed=0))
        assert eventually(lambda: player_of(engine)._progress.stopped)
        with pytest.raises(BoomError):
            engine.step(make_batch(SHAPES, seed=1))
        assert engine.weights_inconsistent


def test_a_late_update_that_fails_in_the_next_step_is_torn(break_at: Callable[..., None]) -> None:
    engine = world_of(SORT).engine(case_of("late"))
    break_at((OpKind.UPDATE, 3))
    with engine:
        engine.step(make_batch(SHAPES, seed=0))
        assert not engine.weights_inconsistent
        with pytest.raises(BoomError):
            engine.step(make_batch(SHAPES, seed=1))
        assert engine.weights_inconsistent


@pytest.mark.parametrize("finish", ["synchronize", "evaluate", "close"])
def test_an_update_that_fails_at_the_end_is_told_by_whoever_finishes_it(
    finish: str, break_at: Callable[..., None]
) -> None:
    engine = world_of(SORT).engine(case_of("late"))
    break_at((OpKind.UPDATE, 1))
    batch = make_batch(SHAPES, seed=0)
    engine.step(batch)
    with pytest.raises(BoomError):
        engine.evaluate(batch) if finish == "evaluate" else getattr(engine, finish)()
    assert engine.weights_inconsistent
    engine.close()


def test_the_callers_own_error_is_not_masked_by_a_lanes(break_at: Callable[..., None]) -> None:
    engine = world_of(SORT).engine(case_of("in_backward"))
    break_at((OpKind.UPDATE, 0))

    def own() -> None:
        engine.step(make_batch(SHAPES, seed=0))
        assert eventually(lambda: player_of(engine)._progress.stopped)
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as caught, engine:
        own()
    (note,) = caught.value.__notes__
    assert note == "and then, closing the engine: BoomError('UPDATE(0)')"


def test_a_callers_own_error_still_finishes_late_updates() -> None:
    world = world_of(SORT)
    engine = world.engine(case_of("late"))

    def own() -> None:
        engine.step(make_batch(SHAPES, seed=0))
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"), engine:
        own()
    assert same(state_of(world), whole_states("late")[1])


@pytest.mark.parametrize("update", ["in_backward", "late"])
def test_an_interrupted_step_ends_the_lanes_before_the_caller_looks(
    update: Update, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while the caller waits: no lane may go on and write weights behind `torn`."""
    wholes, world = whole_states(update), world_of(SORT)
    engine = world.engine(
        case_of(update), lanes=[SlowLane(n, delay=lambda op: 2e-3) for n in LANES]
    )
    wait = player_of(engine).wait_for

    def interrupted(tickets: object) -> None:
        if engine._num_steps == 1:
            time.sleep(0.06)  # some ops of the second step are done
            raise KeyboardInterrupt
        wait(tickets)  # type: ignore[arg-type]

    monkeypatch.setattr(engine._player, "wait_for", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(engine)
    monkeypatch.undo()
    assert not [t for t in threading.enumerate() if t.name.startswith("lane ")]
    assert engine.weights_inconsistent == (
        not any(same(state_of(world), whole) for whole in wholes)
    )
    engine.close()


@pytest.mark.few(6)
@pytest.mark.parametrize(
    "site", [s for s in sites("late") if s[1] in (None, 1)], ids=lambda s: str(s[0])
)
def test_a_stuck_lane_is_told_by_deadline_with_all_stacks(
    site: Site, break_at: Callable[..., None]
) -> None:
    release = threading.Event()

    def never_ends() -> None:
        shorten_deadline(player_of(engine), 0.4)
        release.wait(HANG_S)

    engine = world_of(SORT).engine(case_of("late"), deadline_s=HANG_S)
    break_at(site, how=never_ends)
    try:
        with pytest.raises(LaneTimeout) as caught:
            train(engine)
        text = str(caught.value)
        assert "no progress for" in text
        assert f"inside {site[0].name}" in text
        assert "in never_ends" in text
        for name in LANES:
            assert f"thread lane {name}, most recent call last" in text
    finally:
        release.set()
        engine.close()


def test_the_reference_fails_in_the_callers_thread(break_at: Callable[..., None]) -> None:
    wholes, world = whole_states("late"), world_of(SORT)
    engine = world.engine(case_of("late"), reference=True)
    break_at((OpKind.BACKWARD, 1), at_step=2)
    with engine, pytest.raises(BoomError):
        train(engine)
    assert not engine.weights_inconsistent
    assert same(state_of(world), wholes[1])


@pytest.mark.parametrize("tape", ["device", "host"])
def test_a_step_that_failed_leaves_nothing_but_what_stays_between_steps(
    break_at: Callable[..., None], tape: str
) -> None:
    """Slots, and the tape's room; no hidden states, and no gradients of them."""
    engine = world_of(SORT).engine(case_of("late"), reference=True, tape=tape)
    assert isinstance(engine.device, CpuDevice)
    with engine:
        train(engine, num_steps=1)
        at_rest = engine.device.meter.live_bytes
        break_at((OpKind.BACKWARD, 2))
        with pytest.raises(BoomError):
            train(engine)
        gc.collect()  # a traceback and its frames hold each other
        assert engine.device.meter.live_bytes == at_rest


def test_an_engine_that_failed_leaves_nothing_on_the_device(break_at: Callable[..., None]) -> None:
    engine = world_of(SORT).engine(case_of("late"))
    device = engine.device
    assert isinstance(device, CpuDevice)
    break_at((OpKind.BACKWARD, 1))
    with engine, suppress(BoomError):
        train(engine)
    assert device.meter.live_bytes > 0
    del engine
    gc.collect()
    assert device.meter.live_bytes == 0
