"""The laws of progress.py: when waits end, what a stuck lane's error says."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest

from megatrain.errors import LaneTimeout
from megatrain.lanes.progress import Progress, Stopped
from megatrain.step.hazards import Ticket
from megatrain.step.ops import Op, OpKind
from testkit.patience import HANG_S, eventually
from testkit.streams import LateEvent


def ticket(number: int, *, lane: str = "in", event: LateEvent | None = None) -> Ticket:
    return Ticket(Op(kind=OpKind.FETCH, block=number), lane, number, event)


def in_thread(action: object, *args: object) -> threading.Thread:
    thread = threading.Thread(target=action, args=args)  # type: ignore[arg-type]
    thread.start()
    return thread


def test_an_op_without_event_is_complete_when_issued() -> None:
    progress = Progress(["in"], deadline_s=HANG_S)
    first, second = ticket(0), ticket(1)
    assert not progress.is_complete(first)
    progress.issue(first)
    assert progress.is_complete(first)
    assert not progress.is_issued(second)


def test_an_op_with_event_is_complete_when_its_device_has_passed_it() -> None:
    progress = Progress(["in"], deadline_s=HANG_S)
    first, second = ticket(0, event=LateEvent()), ticket(1, event=LateEvent())
    for each in (first, second):
        progress.issue(each)
    assert progress.is_issued(second)
    assert not progress.is_complete(first)
    first.event.passed.set()
    assert progress.is_complete(first)
    assert not progress.is_complete(second)


def test_a_wait_ends_when_its_op_is_there_and_not_before() -> None:
    progress = Progress(["in"], deadline_s=HANG_S)
    waiter = in_thread(progress.await_issued, ticket(1))
    progress.issue(ticket(0))
    waiter.join(0.05)
    assert waiter.is_alive()
    progress.issue(ticket(1))
    waiter.join(HANG_S)
    assert not waiter.is_alive()


def test_a_wait_for_completion_ends_with_the_device() -> None:
    progress = Progress(["in"], deadline_s=HANG_S)
    late = ticket(0, event=LateEvent())
    waiter = in_thread(progress.await_complete, late)
    progress.issue(late)
    waiter.join(0.05)
    assert waiter.is_alive()
    late.event.passed.set()
    waiter.join(HANG_S)
    assert not waiter.is_alive()


@pytest.mark.parametrize("event", [None, LateEvent()])
def test_every_wait_ends_when_all_stops(event: LateEvent | None) -> None:
    progress = Progress(["in"], deadline_s=HANG_S)
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
    waiter.join(HANG_S)
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
    assert time.monotonic() - start >= 0.1
    assert isinstance(progress.failure, LaneTimeout)


class Clock:
    """The clock of lane_progress.py, set by hand."""

    def __init__(self) -> None:
        self.now = 100.0
        self.sleep = time.sleep

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("megatrain.lanes.progress.time", clock)
    return clock


@pytest.mark.parametrize("moved", ["a lane", "a device", "nothing"])
def test_the_deadline_counts_from_the_last_progress_of_any_lane(moved: str, clock: Clock) -> None:
    progress = Progress(["in", "compute"], deadline_s=0.8)
    others = [ticket(n, lane="compute", event=LateEvent()) for n in range(5)]
    for each in [ticket(0, event=LateEvent()), *(others if moved == "a device" else [])]:
        progress.issue(each)

    def sleep_on() -> bool:
        """Return whether one who waits goes on to wait."""
        with progress._lock, suppress(Stopped):
            return progress._time_left() > 0
        return False

    waits = []
    for each in others:
        clock.now += 0.7
        if moved == "a lane":
            progress.issue(ticket(each.number, lane="compute"))
        elif moved == "a device":
            each.event.passed.set()
        waits.append(sleep_on())
    assert waits == ([True, *[False] * 4] if moved == "nothing" else [True] * 5)
    assert isinstance(progress.failure, LaneTimeout) == (moved == "nothing")


# Law 4: nobody spins.


class CountedEvent(LateEvent):
    """Knows which threads looked whether it has passed. It must not be blocked on."""

    def __init__(self) -> None:
        super().__init__()
        self.looked: list[str] = []

    def query(self) -> bool:
        self.looked.append(threading.current_thread().name)
        return super().query()

    def synchronize(self) -> None:
        raise AssertionError("on CUDA this spins")


def looks_of_a_wait(monkeypatch: pytest.MonkeyPatch, num_pauses: int) -> tuple[list[str], float]:
    """Let three threads wait while a watcher pauses so often.

    Return which threads looked at the event after all had begun to wait, and the seconds that
    were slept meanwhile.
    """
    progress, event = Progress(["in"], deadline_s=HANG_S), CountedEvent()
    awaited, begun = ticket(0, event=event), threading.Event()
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        assert begun.wait(HANG_S)
        pauses.append(seconds)
        if len(pauses) == num_pauses:
            event.passed.set()

    clock = SimpleNamespace(monotonic=time.monotonic, sleep=sleep)
    monkeypatch.setattr("megatrain.lanes.progress.time", clock)
    progress.issue(awaited)
    waiters = [in_thread(progress.await_complete, awaited) for _ in range(3)]
    assert eventually(lambda: len(progress._sleepers) == 3)
    event.looked.clear()
    begun.set()
    for waiter in waiters:
        waiter.join(HANG_S)
        assert not waiter.is_alive()
    progress.stop()
    assert progress.join(HANG_S)
    return event.looked, sum(pauses)


def test_one_thread_looks_for_all_and_sleeps_between_looks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked, slept_s = looks_of_a_wait(monkeypatch, 200)
    by_watcher = [name for name in looked if name == "watcher in"]
    assert len(by_watcher) == 201, "one look after each pause, and one to wake who waits"
    assert len(looked) <= 204, "who waits looks once more when it is woken"
    assert slept_s > 0.95 * 200 * 5e-4, "a wait that lasts is looked at 2,000 times a second"


def test_a_short_wait_is_not_made_long(monkeypatch: pytest.MonkeyPatch) -> None:
    _, slept_s = looks_of_a_wait(monkeypatch, 3)
    assert slept_s == pytest.approx(2e-5 + 4e-5 + 8e-5)


def test_a_watcher_of_a_device_that_hangs_ends_when_all_stops() -> None:
    progress = Progress(["in"], deadline_s=0.05)
    awaited = ticket(0, event=CountedEvent())
    progress.issue(awaited)
    with pytest.raises(Stopped):
        progress.await_complete(awaited)
    assert progress.join(HANG_S)


def test_a_watcher_sets_the_device_before_it_asks() -> None:
    calls: list[str] = []
    event = CountedEvent()
    progress = Progress(
        ["in"],
        deadline_s=HANG_S,
        set_device=lambda: calls.append(f"{threading.current_thread().name}, {len(event.looked)}"),
    )
    awaited = ticket(0, event=event)
    progress.issue(awaited)
    event.looked.clear()
    waiter = in_thread(progress.await_complete, awaited)
    assert eventually(lambda: "watcher in" in event.looked)
    event.passed.set()
    waiter.join(HANG_S)
    progress.stop()
    assert progress.join(HANG_S)
    assert len(calls) == 1
    assert calls[0].startswith("watcher in, ")
    assert event.looked.index("watcher in") >= int(calls[0].split(", ")[1])


def test_a_watcher_works_for_ops_in_any_order() -> None:
    progress = Progress(["in"], deadline_s=HANG_S)
    tickets = [ticket(number, event=LateEvent()) for number in range(4)]
    for each in tickets:
        progress.issue(each)
    waiters = [in_thread(progress.await_complete, tickets[number]) for number in (3, 1, 0)]
    for each in tickets:
        each.event.passed.set()
    for waiter in waiters:
        waiter.join(HANG_S)
        assert not waiter.is_alive()


def test_who_looks_first_wakes_who_sleeps() -> None:
    """The watcher has not looked yet: another thread finds that the op is complete."""
    progress, event = Progress(["in"], deadline_s=HANG_S), LateEvent()
    awaited = ticket(0, event=event)
    progress.issue(awaited)
    progress._watchers["in"] = SimpleNamespace(look=threading.Condition(progress._lock))  # type: ignore[assignment]
    waiter = in_thread(progress.await_complete, awaited)
    assert eventually(lambda: len(progress._sleepers) == 1)
    event.passed.set()
    assert progress.is_complete(awaited)
    waiter.join(HANG_S)
    assert not waiter.is_alive()


def test_what_a_device_raises_stops_all() -> None:
    class Broken(LateEvent):
        def query(self) -> bool:
            if threading.current_thread().name == "watcher in":
                raise RuntimeError("illegal address")
            return False

    progress = Progress(["in"], deadline_s=HANG_S)
    awaited = ticket(0, event=Broken())
    progress.issue(awaited)
    with pytest.raises(Stopped):
        progress.await_complete(awaited)
    assert str(progress.failure) == "illegal address"


def test_stuck_lanes_are_told_with_all_stacks(clock: Clock) -> None:
    progress = Progress(["in", "compute", "out"], deadline_s=0.1)
    now = clock.now
    inside, before = progress.activities["in"], progress.activities["compute"]
    inside.op, inside.since = Op(kind=OpKind.FETCH, block=3), now - 2
    before.op, before.since = Op(kind=OpKind.FORWARD, block=3, micro=1), now - 1
    before.awaited = ticket(3)
    text = str(progress.stuck())
    assert text.startswith("no progress for ")
    assert "(deadline 0.1 s)\n" in text
    assert "  in       inside FETCH(3) for 2.00 s\n" in text
    assert "  compute  before FORWARD(3,1), waiting 1.00 " in text
    assert "s for FETCH(3) on lane in\n" in text
    assert "  out      idle\n" in text
    assert "thread MainThread, most recent call last:\n" in text
    assert "test_stuck_lanes_are_told_with_all_stacks" in text


def test_only_who_can_go_on_is_woken() -> None:
    progress = Progress(["in"], deadline_s=HANG_S)
    waiters = [in_thread(progress.await_issued, ticket(number)) for number in range(3)]
    assert eventually(lambda: len(progress._sleepers) == 3)
    for number, waiter in enumerate(waiters):
        progress.issue(ticket(number))
        waiter.join(HANG_S)
        assert len(progress._sleepers) == 2 - number
