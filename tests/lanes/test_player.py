"""The laws of player.py: overlap changes nothing, failures surface, nothing is left behind."""

from __future__ import annotations

import random
import re
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.errors import LaneTimeout, PlayerStopped, ScheduleError
from megatrain.lanes.lane import Action, Lane
from megatrain.lanes.player import Player
from megatrain.lanes.reference import Reference
from megatrain.step.hazards import Hazards, Ticket
from megatrain.step.ops import DEVICE_LANES, LANES, Op, OpKind, Resource
from megatrain.step.shape import StepShape
from testkit.effort import require_effort
from testkit.patience import HANG_S, eventually
from testkit.schedules import build_flush, build_forward, build_step
from testkit.slow_lane import SlowLane
from testkit.streams import LateStream, deferred
from testkit.toys import IntegerMachine, short_life, shorten_deadline

History = dict[Resource, list[int]]
SMALL = StepShape(num_blocks=5, num_micro=2, tape="host", update="late", tied=True, tier="states")
OF_MATRICES = (
    OpKind.MOMENTUM, OpKind.SEND, OpKind.COLLECT, OpKind.ORTHOGONALIZE, OpKind.RETURN
)  # fmt: skip
IN_BACKWARD = StepShape(num_blocks=5, num_micro=2, update="in_backward")

plain_shapes = st.builds(
    StepShape,
    num_blocks=st.integers(3, 7),
    num_micro=st.integers(1, 3),
    slots=st.integers(2, 4),
    grad_slots=st.integers(1, 2),
    tape=st.sampled_from(["device", "host"]),
    tape_slots=st.integers(2, 3),
    kept_layers=st.integers(0, 3),
    copying=st.booleans(),
    update=st.sampled_from(["none", "in_backward", "late"]),
    tied=st.booleans(),
)
shapes = st.builds(
    lambda shape, tier: shape if shape.update == "none" else replace(shape, tier=tier),
    plain_shapes,
    st.sampled_from(["none", "states"]),
)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before  # one of another test may have ended meanwhile


def random_pause(seed: int, *, longest_s: float = 4e-4) -> Callable[[], float]:
    """Return a source of delays, most of them none at all."""
    source = random.Random(seed)
    return lambda: source.random() * longest_s if source.random() < 0.3 else 0.0


def host_lanes(seed: int | None = None) -> list[Lane]:
    if seed is None:
        return [Lane(name) for name in LANES]
    pauses = [random_pause(seed + number) for number in range(len(LANES))]
    return [
        SlowLane(name, delay=lambda op, pause=pause: pause())  # type: ignore[misc]
        for name, pause in zip(LANES, pauses, strict=True)
    ]


@contextmanager
def device_lanes(seed: int) -> Iterator[list[Lane]]:
    """All lanes but those of the host have a stream that dawdles."""
    with ExitStack() as streams:
        lanes = [Lane("host"), Lane("disk")]
        for number, name in enumerate(DEVICE_LANES):
            stream = LateStream(random_pause(seed + number))
            streams.callback(stream.close)
            lanes.append(Lane(name, stream=stream))
        yield lanes


def by_reference(schedules: list[list[Op]]) -> History:
    machine = IntegerMachine()
    for ops in schedules:
        Reference().play(ops, machine.actions())
    return machine.history


def by_player(
    schedules: list[list[Op]], lanes: list[Lane], wrap: Callable[[Action], Action] = lambda act: act
) -> History:
    machine = IntegerMachine(pause=lambda: time.sleep(0))
    with Player(lanes, deadline_s=HANG_S) as player:
        for ops in schedules:
            player.play(ops, dict.fromkeys(OpKind, wrap(machine.act)))
    return machine.history


# Overlap changes nothing.


@pytest.mark.merge
@settings(max_examples=60, derandomize=True)
@given(shapes, st.integers(0, 2**32))
def test_any_timing_of_the_lanes_gives_the_reference(shape: StepShape, seed: int) -> None:
    schedules = short_life(shape)
    assert by_player(schedules, host_lanes(seed)) == by_reference(schedules)


@settings(max_examples=30, derandomize=True)
@given(shapes, st.integers(0, 2**32))
def test_any_timing_of_the_streams_gives_the_reference(shape: StepShape, seed: int) -> None:
    schedules = short_life(shape)
    with device_lanes(seed) as lanes:
        assert by_player(schedules, lanes, deferred) == by_reference(schedules)


def test_steps_of_different_shapes_may_follow_each_other() -> None:
    other = StepShape(num_blocks=5, num_micro=3, slots=3, update="late")
    schedules = [
        build_step(SMALL),
        build_step(other, pending=True),
        build_step(SMALL, pending=True),
        build_flush(SMALL),
        build_forward(other),
    ]
    assert by_player(schedules, host_lanes(1)) == by_reference(schedules)


@pytest.mark.parametrize("on_device", [False, True])
def test_without_waits_the_result_would_differ(
    monkeypatch: pytest.MonkeyPatch, on_device: bool
) -> None:
    feed = Hazards.feed
    monkeypatch.setattr(Hazards, "feed", lambda self, op: (feed(self, op)[0], []))
    schedules = short_life(SMALL)
    if on_device:
        with device_lanes(0) as lanes:
            assert by_player(schedules, lanes, deferred) != by_reference(schedules)
    else:
        assert by_player(schedules, host_lanes(0)) != by_reference(schedules)


def test_play_returns_at_once_and_steps_overlap() -> None:
    """The second step is in its layers while the host still updates its last blocks."""
    begun: list[str] = []
    returned, in_layers = threading.Event(), threading.Event()

    def act(op: Op) -> None:
        assert returned.wait(HANG_S)
        begun.append(str(op))
        if begun.count("FORWARD(1,0)") == 2:
            in_layers.set()
        if str(op) == "UPDATE(7)":
            assert in_layers.wait(HANG_S)

    shape = StepShape(num_blocks=8, update="late")
    with Player(host_lanes(), deadline_s=HANG_S) as player:
        for pending in (False, True):
            player.play(build_step(shape, pending=pending), dict.fromkeys(OpKind, act))
        returned.set()
    assert begun.count("FORWARD(1,0)") == 2


def test_waiting_for_some_kinds_does_not_wait_for_others() -> None:
    release = threading.Event()
    drained: list[Op] = []
    actions: dict[OpKind, Action] = dict.fromkeys(OpKind, lambda op: None)

    def drain(op: Op) -> None:
        release.wait(HANG_S)
        drained.append(op)

    with Player(host_lanes(), deadline_s=HANG_S) as player:
        step = player.play(build_step(IN_BACKWARD), actions | {OpKind.DRAIN: drain})
        step.wait(OpKind.HEAD)
        assert drained == []
        release.set()
        step.wait()
        assert len(drained) == IN_BACKWARD.num_blocks


def test_a_kind_that_is_not_in_the_list_is_not_waited_for() -> None:
    with Player(host_lanes(), deadline_s=HANG_S) as player:
        step = player.play(build_forward(SMALL), dict.fromkeys(OpKind, lambda op: None))
        step.wait(OpKind.UPDATE)
        step.wait()
        player.settle()


# Failures surface.


class BoomError(Exception):
    pass


def failing_at(machine: IntegerMachine, kind: OpKind, block: int | None) -> Action:
    def explode(op: Op) -> int:
        if (op.kind, op.block) == (kind, block):
            raise BoomError(str(op))
        return machine.act(op)

    return explode


def sites(shape: StepShape) -> list[tuple[OpKind, int | None]]:
    ops = build_step(shape) + (build_flush(shape) if shape.update == "late" else [])
    return sorted({(op.kind, op.block) for op in ops}, key=str)


@pytest.mark.parametrize(
    ("shape", "kind", "block"),
    [(shape, *site) for shape in (SMALL, IN_BACKWARD) for site in sites(shape)],
    ids=lambda value: value.update if isinstance(value, StepShape) else str(value),
)
def test_a_failure_anywhere_surfaces_with_its_traceback(
    shape: StepShape, kind: OpKind, block: int | None
) -> None:
    machine = IntegerMachine(pause=lambda: time.sleep(1e-4))
    actions = dict.fromkeys(OpKind, failing_at(machine, kind, block))
    late = shape.update == "late"
    with Player(host_lanes(), deadline_s=HANG_S) as player:
        with pytest.raises(BoomError) as caught:  # noqa: PT012
            player.play(build_step(shape), actions)
            player.play(build_step(shape, pending=late), actions)
            player.settle()
        assert machine.num_inside == 0
        frames = traceback.extract_tb(caught.value.__traceback__)
        assert frames[-1].name == "explode"
        (note,) = caught.value.__notes__
        assert note.endswith(f", at {caught.value}")
        with pytest.raises(PlayerStopped, match="has stopped; create a new one") as refused:
            player.play(build_step(shape), actions)
        assert refused.value.__cause__ is caught.value


def test_a_failure_is_raised_at_the_end_of_the_block_if_nobody_waited() -> None:
    actions = dict.fromkeys(OpKind, failing_at(IntegerMachine(), OpKind.HEAD, 4))
    with pytest.raises(BoomError), Player(host_lanes(), deadline_s=HANG_S) as player:
        player.play(build_step(SMALL), actions)


def test_the_callers_own_exception_is_not_masked_and_ends_the_lanes() -> None:
    actions = dict.fromkeys(OpKind, failing_at(IntegerMachine(), OpKind.HEAD, 4))
    with pytest.raises(KeyboardInterrupt), Player(host_lanes()) as player:  # noqa: PT012
        player.play(build_step(SMALL), actions)
        raise KeyboardInterrupt


def test_close_tells_a_failure_that_nobody_has_seen() -> None:
    player = Player(host_lanes(), deadline_s=HANG_S)
    player.play(
        build_step(SMALL), dict.fromkeys(OpKind, failing_at(IntegerMachine(), OpKind.FETCH, 0))
    )
    assert eventually(lambda: player._progress.stopped)
    with pytest.raises(BoomError):
        player.close()
    player.close()


def test_a_list_that_cannot_be_played_is_refused_as_a_whole() -> None:
    fetch, spill = Op(kind=OpKind.FETCH, block=1), Op(kind=OpKind.DRAIN, lane="disk", block=1)
    done: list[Op] = []
    with Player([Lane("in")], deadline_s=HANG_S) as player:
        with pytest.raises(
            ScheduleError, match=r"^DRAIN\(1\) is for lane disk; the lanes are \['in'\]$"
        ):
            player.play([fetch, spill], dict.fromkeys(OpKind, done.append))
        with pytest.raises(
            ScheduleError, match=r"^FETCH\(1\) has no action; the actions are \['drain'\]$"
        ):
            player.play([fetch], {OpKind.DRAIN: done.append})
        player.settle()
    assert done == []


def test_more_work_does_not_put_off_the_deadline() -> None:
    release = threading.Event()
    player = Player([Lane("in")], deadline_s=0.3)
    fetch = [Op(kind=OpKind.FETCH, block=1)]
    try:
        for _ in range(5):
            step = player.play(fetch, {OpKind.FETCH: lambda op: int(release.wait(HANG_S))})
            time.sleep(0.1)
        with pytest.raises(LaneTimeout):
            step.wait()
    finally:
        release.set()
        player._deadline_s = HANG_S
        player.close()


def test_a_closed_player_refuses_work() -> None:
    player = Player(host_lanes(), deadline_s=HANG_S)
    player.close()
    player.close()
    with pytest.raises(PlayerStopped, match="has stopped"):
        player.play(build_step(SMALL), {})


# A stuck lane is told by deadline.


@pytest.mark.few(16)
@pytest.mark.parametrize("kind", OpKind)
def test_a_stuck_lane_is_told_with_its_op_and_all_stacks(kind: OpKind) -> None:
    release = threading.Event()
    stuck_at: list[Op] = []

    def never_ends(op: Op) -> None:
        stuck_at.append(op)
        release.wait(HANG_S)

    actions: dict[OpKind, Action] = dict.fromkeys(OpKind, lambda op: None)
    shape = replace(SMALL, tied=False, divided=True, balances=True)
    if kind in OF_MATRICES:
        shape = replace(shape, tier="none", matrices=(False, True, True, True, False))
    player = Player(host_lanes(), deadline_s=HANG_S)
    try:
        for pending in (False, True):
            step = build_step(shape, pending=pending)
            player.play(step, actions | {kind: never_ends})
        assert eventually(lambda: stuck_at)
        shorten_deadline(player, 0.15)
        with pytest.raises(LaneTimeout) as caught:
            player.settle()
        text = str(caught.value)
        assert f"inside {stuck_at[0]} for " in text
        assert re.match(r"no progress for \d+\.\d+ s \(deadline 0\.15 s\)\n", text)
        assert f"thread lane {stuck_at[0].lane}, most recent call last" in text
        assert "in never_ends" in text
    finally:
        release.set()
        player.close()


def no_watcher_is_left() -> bool:
    return not any(thread.name.startswith("watcher") for thread in threading.enumerate())


def test_a_stuck_device_is_told_too() -> None:
    release = threading.Event()
    with ExitStack() as cleanup:
        cleanup.callback(lambda: eventually(no_watcher_is_left))  # it is blocked until the release
        stream = LateStream()
        cleanup.callback(stream.close)
        cleanup.callback(release.set)
        player = Player([Lane("compute", stream=stream)], deadline_s=0.15)
        cleanup.callback(player.close)
        op = Op(kind=OpKind.FORWARD, block=1, micro=0)
        hang = deferred(lambda op: int(release.wait(HANG_S)))
        playing = player.play([op], {OpKind.FORWARD: hang})
        with pytest.raises(LaneTimeout, match="no progress for"):
            playing.wait()


def test_close_ends_within_the_deadline_and_tells_who_did_not() -> None:
    release, entered = threading.Event(), threading.Event()

    def never_ends(op: Op) -> None:
        entered.set()
        release.wait(HANG_S)

    player = Player([Lane("in")], deadline_s=0.15)
    player.play([Op(kind=OpKind.FETCH, block=1)], {OpKind.FETCH: never_ends})
    assert entered.wait(HANG_S)
    try:
        with pytest.raises(LaneTimeout, match=r"inside FETCH\(1\)"):
            player.close()
    finally:
        release.set()
        player._deadline_s = HANG_S
        player.close()


# Cost.


def test_an_op_costs_little() -> None:
    """Measured about 10 us: four lanes, a tape on the host, actions that do nothing."""
    shape = StepShape(num_blocks=34, num_micro=16, tape="host", tape_slots=4, update="late")
    ops = build_step(shape)
    with Player(host_lanes(), deadline_s=HANG_S) as player:
        nothing = dict.fromkeys(OpKind, lambda op: None)
        require_effort(lambda: player.play(ops, nothing).wait(), at_most=1.5e-3 * len(ops))


def test_tickets_of_done_ops_are_not_kept() -> None:
    """Playing for ever must not grow: only the last users of each resource stay known."""
    hazards = Hazards()
    ops = build_step(SMALL)
    known: list[set[Ticket]] = []
    for _ in range(3):
        for op in ops:
            hazards.feed(op)
        readers = {ticket for each in hazards._readers.values() for ticket in each.values()}
        known.append(readers | set(hazards._writer.values()))
    assert len(known[1]) == len(known[2])
