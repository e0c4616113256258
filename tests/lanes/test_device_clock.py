"""Times of a device: its own, whatever the host did meanwhile, from events that are used again."""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import pairwise

import pytest

from megatrain.lanes.device_clock import DeviceClock
from megatrain.lanes.lane import Action, Lane
from megatrain.lanes.player import Player
from megatrain.lanes.trace import StepSummary, Trace
from megatrain.step.ops import DEVICE_LANES, LANES, Op, OpKind
from megatrain.step.shape import StepShape
from testkit.schedules import build_step
from testkit.simulated.accelerator import SimStream, Simulator
from testkit.simulated.timeline import SimTimedEvent

STEP = build_step(StepShape(num_blocks=6, num_micro=2, tape="host", update="late"), pending=True)
LINK = {OpKind.FETCH: 20e-3, OpKind.FORWARD: 2e-3, OpKind.BACKWARD: 4e-3, OpKind.UPDATE: 1e-3}
OPTIMIZER = {OpKind.FETCH: 1e-3, OpKind.FORWARD: 1e-3, OpKind.BACKWARD: 2e-3, OpKind.UPDATE: 40e-3}
COMPUTE = {OpKind.FETCH: 2e-3, OpKind.FORWARD: 10e-3, OpKind.BACKWARD: 20e-3, OpKind.UPDATE: 5e-3}
DRAINS = LINK | {OpKind.FETCH: 1e-3, OpKind.DRAIN: 40e-3}


class Device(Simulator):
    """Ops that take as long as they are told to; it counts its timed events."""

    num_events = 0

    def timed_event(self) -> SimTimedEvent:
        self.num_events += 1
        return super().timed_event()

    def lanes(self, *, clocked: bool = True) -> list[Lane]:
        clock = DeviceClock(self) if clocked else None
        return [
            Lane(name, stream=self.stream(name), clock=clock)
            if name in DEVICE_LANES
            else Lane(name)
            for name in LANES
        ]

    def actions(self, seconds: Mapping[OpKind, float]) -> dict[OpKind, Action]:
        def act(op: Op) -> int:
            entered: SimStream | None = self.entered
            (time.sleep if entered is None else entered.sleep)(seconds.get(op.kind, 0.0))
            return 7

        return dict.fromkeys(OpKind, act)


def played(
    seconds: Mapping[OpKind, float], *, clocked: bool = True, steps: int = 2
) -> tuple[Trace, Device]:
    device, trace = Device(policy="early"), Trace()
    with Player(device.lanes(clocked=clocked), trace=trace) as player:
        for _ in range(steps):
            player.play(STEP, device.actions(seconds)).wait()
    return trace, device


def last_step(seconds: Mapping[OpKind, float], *, clocked: bool = True) -> StepSummary:
    return played(seconds, clocked=clocked)[0].step_summaries()[-1]


@pytest.mark.parametrize(
    ("seconds", "limit"),
    [(LINK, "link in"), (OPTIMIZER, "optimizer"), (COMPUTE, "compute"), (DRAINS, "link out")],
    ids=["link in", "optimizer", "compute", "link out"],
)
def test_what_limits_a_step_on_a_device_is_named(
    seconds: Mapping[OpKind, float], limit: str
) -> None:
    summary = last_step(seconds)
    assert summary.bottleneck == limit
    assert summary.limits_s[limit] > 0.6 * summary.seconds


def test_a_step_whose_work_takes_no_time_is_limited_by_the_host_that_issues_it() -> None:
    """On a busy machine other lanes are slow to issue too: the best of a few steps counts."""
    limits = [last_step({}).limits_s for _ in range(8)]
    assert any(each["host"] > each.get("compute", 0.0) for each in limits)
    assert last_step(COMPUTE).limits_s["host"] < last_step(COMPUTE).limits_s["compute"]
    assert last_step({}, clocked=False).host_paced_s == 0.0


def test_spans_have_the_times_of_the_device_and_know_those_of_the_issue() -> None:
    trace, _ = played(COMPUTE)
    ops = [span for span in trace.spans if span.awaited is None]
    assert sorted(map(str, STEP * 2)) == sorted(str(span.op) for span in ops)
    for span in ops:
        assert span.num_bytes == 7
        assert (span.issued_ns is None) == (span.lane not in DEVICE_LANES)
        if span.issued_ns is not None:
            begin_ns, end_ns = span.issued_ns
            told = COMPUTE.get(span.op.kind, 0.0)
            assert told <= span.seconds + 1e-6
            assert span.start_ns >= begin_ns - 1_000_000, "not before it was issued"
            assert span.end_ns >= end_ns + 1e9 * told - 1e9 * span.seconds - 1_000_000
    for lane in LANES:
        spans = [span for span in trace.spans if span.lane == lane]
        assert all(a.end_ns <= b.start_ns for a, b in pairwise(spans))


def test_a_wait_lasts_until_the_last_of_what_was_awaited_is_done() -> None:
    """In list order, without lanes: starts are the largest of what is known to end before."""
    trace, _ = played(LINK, steps=1)
    ends = {str(span.op): span.end_ns for span in trace.spans if span.awaited is None}
    starts = {str(span.op): span.start_ns for span in trace.spans if span.awaited is None}
    waits = [span for span in trace.spans if span.awaited is not None and span.lane == "compute"]
    assert waits
    for wait in waits:
        assert wait.end_ns == min(ends[str(wait.awaited)], starts[str(wait.op)])


def test_a_steady_step_creates_no_event() -> None:
    device, trace = Device(policy="early"), Trace()
    counts = []
    with Player(device.lanes(), trace=trace) as player:
        for _ in range(4):
            player.play(STEP, device.actions({})).wait()
            counts.append(device.num_events)
    assert counts[0] > len(STEP)
    assert counts[1:] == counts[:1] * 3


def test_without_a_trace_the_clock_is_never_asked() -> None:
    device = Device(policy="early")
    with Player(device.lanes()) as player:
        player.play(STEP, device.actions({})).wait()
    assert device.num_events == 0


def test_ops_that_the_device_has_not_done_are_left_for_later() -> None:
    device, trace = Device(policy="early"), Trace()
    with Player(device.lanes(), trace=trace) as player:
        step = player.play(STEP, device.actions({OpKind.BACKWARD: 50e-3}))
        step.wait(OpKind.UPDATE)
        assert not any(str(span.op) == "DRAIN(0)" for span in trace.spans)
        step.wait()
    assert len([span for span in trace.spans if span.awaited is None]) == len(STEP)
