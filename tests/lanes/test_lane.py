"""A lane alone: order, throttle, waits of host and device lanes, its end."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from megatrain.lanes.lane import Action, Lane, Stream, Work
from megatrain.lanes.progress import Progress
from megatrain.step.hazards import Ticket
from megatrain.step.ops import Op, OpKind
from testkit.patience import HANG_S, eventually
from testkit.slow_lane import SlowLane
from testkit.streams import LateEvent, LateStream, deferred

if TYPE_CHECKING:
    import torch

    def torch_streams_fit(stream: torch.Stream) -> Stream:
        return stream


OP = Op(kind=OpKind.FETCH, block=1)


@pytest.fixture
def progress() -> Iterator[Progress]:
    progress = Progress(["in", "compute", "out"], deadline_s=HANG_S)
    yield progress
    progress.stop()


def start(lane: Lane, progress: Progress) -> Lane:
    lane.start(progress, None)
    return lane


def work(number: int, action: Action, waits: list[Ticket] | None = None, lane: str = "in") -> Work:
    return Work(Ticket(OP, lane, number), waits or [], action, step=0)


def test_a_lane_does_its_work_in_order(progress: Progress) -> None:
    lane = start(Lane("in"), progress)
    done: list[int] = []
    works = [work(number, lambda op, n=number: done.append(n)) for number in range(50)]  # type: ignore[misc]
    for each in works:
        lane.put(each)
    progress.await_complete(works[-1].ticket)
    assert done == list(range(50))
    progress.stop()
    assert lane.join(HANG_S)


def test_a_lane_runs_on_its_cores_and_nobody_else_moves(progress: Progress) -> None:
    before = os.sched_getaffinity(0)
    one = frozenset({max(before)})
    lane, free = start(Lane("in", cores=one), progress), start(Lane("out"), progress)
    seen: dict[str, set[int]] = {}
    works = [
        work(0, lambda op, n=n: seen.update({n: os.sched_getaffinity(0)}), lane=n)  # type: ignore[misc]
        for n in ("in", "out")
    ]
    for each, runner in zip(works, (lane, free), strict=True):
        runner.put(each)
        progress.await_complete(each.ticket)
    assert seen == {"in": one, "out": before}
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize(
    ("num_bytes", "copied_s", "slept_s"),
    [(0, 0.0, 0.0), (20_000, 0.005, 0.015), (20_000, 0.2, 0.0)],
)
def test_a_throttled_copy_takes_its_time_and_counts_what_the_copy_took_itself(
    num_bytes: int, copied_s: float, slept_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, slept = [100.0], list[float]()
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=slept.append)
    monkeypatch.setattr("testkit.slow_lane.time", clock)

    def copy(op: Op) -> int:
        now[0] += copied_s
        return num_bytes

    assert SlowLane("in", bandwidth=1e6).act(OP, copy) == num_bytes
    assert slept == [pytest.approx(slept_s)]


def test_a_host_lane_waits_for_the_device_and_a_device_lane_does_not(progress: Progress) -> None:
    stream = LateStream()
    host, device = start(Lane("out"), progress), start(Lane("compute", stream=stream), progress)
    awaited = Ticket(OP, "in", 0, LateEvent())
    progress.issue(awaited)
    done: list[str] = []
    on_host = work(0, lambda op: done.append("host"), [awaited], lane="out")
    on_device = work(0, deferred(lambda op: done.append("device")), [awaited], lane="compute")
    host.put(on_host)
    device.put(on_device)
    assert eventually(lambda: progress.is_issued(on_device.ticket))
    time.sleep(0.02)
    assert done == []
    assert not progress.is_issued(on_host.ticket)
    assert not progress.is_complete(on_device.ticket)
    awaited.event.passed.set()
    progress.await_complete(on_device.ticket)
    progress.await_complete(on_host.ticket)
    assert sorted(done) == ["device", "host"]
    progress.stop()
    assert host.join(HANG_S)
    assert device.join(HANG_S)
    stream.close()


def test_a_failing_action_stops_all_and_says_where(progress: Progress) -> None:
    lane = start(Lane("in"), progress)

    def explode(op: Op) -> None:
        raise ValueError("no such slot")

    lane.put(work(0, explode))
    assert eventually(lambda: progress.stopped)
    assert str(progress.failure) == "no such slot"
    assert progress.failure is not None
    assert progress.failure.__notes__ == ["raised in lane in, at FETCH(1)"]
    assert lane.join(HANG_S)


def test_no_work_is_begun_after_the_stop(progress: Progress) -> None:
    lane = start(Lane("in"), progress)
    entered, release, done = threading.Event(), threading.Event(), list[str]()

    def block(op: Op) -> None:
        entered.set()
        release.wait(HANG_S)

    lane.put(work(0, block))
    lane.put(work(1, lambda op: done.append("late")))
    assert entered.wait(HANG_S)
    progress.stop()
    assert not lane.join(0.02)
    release.set()
    assert lane.join(HANG_S)
    assert done == []


def test_a_forgotten_lane_does_not_keep_the_process() -> None:
    """Nobody closes it: it does what is queued, and ends once the main thread is gone."""
    program = (
        "from megatrain.lanes.lane import Lane\n"
        "from megatrain.step.ops import OpKind, Op\n"
        "from megatrain.lanes.player import Player\n"
        "op = Op(kind=OpKind.FETCH, block=1)\n"
        "Player([Lane('in')]).play([op] * 3, {OpKind.FETCH: lambda op: print('done')})\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert ended.stdout.split() == ["done"] * 3
