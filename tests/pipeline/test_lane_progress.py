"""The laws of progress.py: when waits end, what a stuck lane's error says."""

from __future__ import annotations

import threading
import time

import pytest

from megatrain.errors import LaneStuck
from megatrain.pipeline.hazards import Ticket
from megatrain.pipeline.lane_progress import Progress, Stopped
from megatrain.pipeline.ops import Op, OpKind
from tests.pipeline.streams import LateEvent
from tests.pipeline.toys import eventually


def ticket(number: int, *, lane: str = "in", event: LateEvent | None = None) -> Ticket:
    return Ticket(Op(kind=OpKind.FETCH, block=number), lane, number, event)


def in_thread(action: object, *args: object) -> threading.Thread:
    thread = threading.Thread(target=action, args=args)  # type: ignore[arg-type]
    thread.start()
    return thread


def test_an_op_without_event_is_complete_when_issued() -> None:
    progress = Progress(["in"], deadline_s=10)
    first, second = ticket(0), ticket(1)
    assert not progress.is_complete(first)
    progress.issue(first)
    assert progress.is_complete(first)
    assert not progress.is_issued(second)


def test_an_op_with_event_is_complete_when_its_device_has_passed_it() -> None:
    progress = Progress(["in"], deadline_s=10)
    first, second = ticket(0, event=LateEvent()), ticket(1, event=LateEvent())
    for each in (first, second):
        progress.issue(each)
    assert progress.is_issued(second)
    assert not progress.is_complete(first)
    first.event.passed.set()
    assert progress.is_complete(first)
    assert not progress.is_complete(second)


def test_a_wait_ends_when_its_op_is_there_and_not_before() -> None:
    progress = Progress(["in"], deadline_s=10)
    waiter = in_thread(progress.await_issued, ticket(1))
    progress.issue(ticket(0))
    waiter.join(0.05)
    assert waiter.is_alive()
    progress.issue(ticket(1))
    waiter.join(5)
    assert not waiter.is_alive()


def test_a_wait_for_completion_ends_with_the_device() -> None:
    progress = Progress(["in"], deadline_s=10)
    late = ticket(0, event=LateEvent())
    waiter = in_thread(progress.await_complete, late)
    progress.issue(late)
    waiter.join(0.05)
    assert waiter.is_alive()
    late.event.passed.set()
    waiter.join(5)
    assert not waiter.is_alive()


@pytest.mark.parametrize("event", [None, LateEvent()])
def test_every_wait_ends_when_all_stops(event: LateEvent | None) -> None:
    progress = Progress(["in"], deadline_s=10)
    awaited = ticket(0, event=event)
    if event is not None:
        progress.issue(awaited)
    ended: list[type[Exception]] = []

    def wait() -> None:
        try:
            progress.await_complete(awaited)
        except Stopped as stopped:
            ended.append(type(stopped))

    waiter = in_thread(wait)
    time.sleep(0.02)
    progress.fail(ValueError("first"))
    progress.fail(ValueError("second"))
    waiter.join(5)
    assert ended == [Stopped]
    assert str(progress.failure) == "first"


@pytest.mark.parametrize("event", [None, LateEvent()])
def test_a_wait_without_progress_ends_by_deadline(event: LateEvent | None) -> None:
    progress = Progress(["in", "compute"], deadline_s=0.1)
    awaited = ticket(0, event=event)
    if event is not None:
        progress.issue(awaited)
    start = time.monotonic()
    with pytest.raises(Stopped):
        progress.await_complete(awaited)
    assert 0.1 <= time.monotonic() - start < 2
    assert isinstance(progress.failure, LaneStuck)


def test_the_deadline_counts_from_the_last_progress_of_any_lane() -> None:
    progress = Progress(["in", "compute"], deadline_s=0.8)
    waiter = in_thread(progress.await_issued, ticket(0))
    for number in range(5):
        time.sleep(0.2)
        progress.issue(ticket(number, lane="compute"))
    assert waiter.is_alive()
    progress.issue(ticket(0))
    waiter.join(5)
    assert progress.failure is None


def test_a_device_that_moves_is_progress_too() -> None:
    progress = Progress(["in", "compute"], deadline_s=0.8)
    on_device = [ticket(number, lane="compute", event=LateEvent()) for number in range(5)]
    for each in on_device:
        progress.issue(each)
    waiter = in_thread(progress.await_issued, ticket(0))
    for each in on_device:
        time.sleep(0.2)
        each.event.passed.set()
    assert waiter.is_alive()
    assert progress.failure is None
    progress.issue(ticket(0))
    waiter.join(5)
    assert progress.failure is None


def test_stuck_lanes_are_told_with_all_stacks() -> None:
    progress = Progress(["in", "compute", "out"], deadline_s=0.1)
    now = time.monotonic()
    inside, before = progress.activities["in"], progress.activities["compute"]
    inside.op, inside.since = Op(kind=OpKind.FETCH, block=3), now - 2
    before.op, before.since = Op(kind=OpKind.FORWARD, block=3, micro=1), now - 1
    before.awaited = ticket(3)
    text = str(progress.stuck())
    assert text.startswith("no lane moved for ")
    assert "(deadline 0.1 s)\n" in text
    assert "  in       inside FETCH(3) for 2." in text
    assert "  compute  before FORWARD(3,1), waiting 1." in text
    assert "s for FETCH(3) on lane in\n" in text
    assert "  out      idle\n" in text
    assert "thread MainThread, most recent call last:\n" in text
    assert "test_stuck_lanes_are_told_with_all_stacks" in text


def test_only_who_can_go_on_is_woken() -> None:
    progress = Progress(["in"], deadline_s=10)
    waiters = [in_thread(progress.await_issued, ticket(number)) for number in range(3)]
    assert eventually(lambda: len(progress._sleepers) == 3)
    for number, waiter in enumerate(waiters):
        progress.issue(ticket(number))
        waiter.join(5)
        assert len(progress._sleepers) == 2 - number
