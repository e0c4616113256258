"""Traces: what is summed up, what Perfetto gets."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from megatrain.lanes.lane import Lane
from megatrain.lanes.player import Player
from megatrain.lanes.trace import Span, Trace, step_split
from megatrain.step.ops import LANES, Op, OpKind
from megatrain.step.shape import StepShape
from testkit.schedules import build_step
from testkit.slow_lane import SlowLane

FETCH = Op(kind=OpKind.FETCH, block=1)
FORWARD = Op(kind=OpKind.FORWARD, block=1, micro=0)
MS = 1_000_000


@pytest.fixture
def trace() -> Trace:
    """Two steps: a fetch of 4 ms, for which compute waits 3 ms, then 6 ms of forward."""
    trace = Trace()
    for step, origin in enumerate((0, 10 * MS)):
        trace.add(Span(step, "in", FETCH, origin, origin + 4 * MS, 1000))
        trace.add(Span(step, "compute", FORWARD, origin + 1 * MS, origin + 4 * MS, awaited=FETCH))
        trace.add(Span(step, "compute", FORWARD, origin + 4 * MS, origin + 10 * MS))
    return trace


def test_busy_seconds_are_work_and_not_waiting(trace: Trace) -> None:
    lanes = trace.lane_summaries()
    assert lanes["in"].busy_s == pytest.approx(8e-3)
    assert lanes["compute"].busy_s == pytest.approx(12e-3)
    assert (lanes["in"].num_ops, lanes["in"].num_bytes) == (2, 2000)


def test_a_step_says_what_compute_waited_for(trace: Trace) -> None:
    for summary in trace.step_summaries():
        assert summary.seconds == pytest.approx(10e-3)
        assert summary.compute_waited_s == pytest.approx({OpKind.FETCH: 3e-3})


def test_a_wait_is_blamed_on_what_held_up_the_awaited_lane() -> None:
    """Compute waits 10 ms for a fetch, which for 7 of them waits for an update."""
    update = Op(kind=OpKind.UPDATE, block=1)
    trace = Trace()
    trace.add(Span(0, "in", FETCH, -5 * MS, 7 * MS, awaited=update))
    trace.add(Span(0, "compute", FORWARD, 0, 10 * MS, awaited=FETCH))
    (summary,) = trace.step_summaries()
    assert summary.compute_waited_s == pytest.approx({OpKind.UPDATE: 7e-3, OpKind.FETCH: 3e-3})


def test_a_wait_is_blamed_on_what_the_awaited_lane_did_first() -> None:
    """Compute waits for a block input that came behind the weights of the block."""
    restore = Op(kind=OpKind.RESTORE, block=1, micro=0)
    trace = Trace()
    trace.add(Span(0, "in", FETCH, 0, 9 * MS))
    trace.add(Span(0, "in", restore, 9 * MS, 10 * MS))
    trace.add(Span(0, "compute", FORWARD, 2 * MS, 10 * MS, awaited=restore))
    (summary,) = trace.step_summaries()
    assert summary.compute_waited_s == pytest.approx({OpKind.FETCH: 7e-3, OpKind.RESTORE: 1e-3})
    assert summary.bottleneck == "link in"


def test_a_step_that_ends_after_compute_has_waited_for_what_ended_it() -> None:
    """The last gradient is drained, and its norm waits for that; the update may go on."""
    drain, norm, update = (
        Op(kind=kind, block=0) for kind in (OpKind.DRAIN, OpKind.NORM, OpKind.UPDATE)
    )
    trace = Trace()
    trace.add(Span(0, "compute", FORWARD, 0, 2 * MS))
    trace.add(Span(0, "out", drain, 2 * MS, 7 * MS))
    trace.add(Span(0, "host", norm, 0, 7 * MS, awaited=drain))
    trace.add(Span(0, "host", norm, 7 * MS, 8 * MS))
    trace.add(Span(0, "host", update, 8 * MS, 20 * MS))
    (summary,) = trace.step_summaries()
    assert summary.compute_waited_s == pytest.approx({OpKind.DRAIN: 5e-3, OpKind.NORM: 1e-3})


def test_the_last_step_is_the_last_list_that_trained() -> None:
    backward, update = Op(kind=OpKind.BACKWARD, block=1, micro=0), Op(kind=OpKind.UPDATE, block=1)
    trace = Trace()
    assert trace.last_step().spans == []
    for step, op in enumerate((backward, backward, FORWARD, update)):
        trace.add(Span(step, op.lane, op, step * MS, (step + 1) * MS))
    assert [span.step for span in trace.last_step().spans] == [1]


def test_waits_that_seem_to_go_in_a_circle_are_blamed_once() -> None:
    trace = Trace()
    trace.add(Span(0, "compute", FORWARD, 0, 10 * MS, awaited=FETCH))
    trace.add(Span(0, "in", FETCH, 9 * MS, 12 * MS, awaited=FORWARD))
    (summary,) = trace.step_summaries()
    assert sum(summary.compute_waited_s.values()) == pytest.approx(10e-3)


def test_perfetto_gets_one_row_per_lane(trace: Trace, tmp_path: Path) -> None:
    trace.write(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    rows = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert rows == {0: "in", 1: "compute"}
    fetch, wait, forward = [event for event in events if event["ph"] == "X"][:3]
    assert fetch == {
        "ph": "X",
        "name": "FETCH(1)",
        "cat": "fetch",
        "pid": 0,
        "tid": 0,
        "ts": 0.0,
        "dur": 4000.0,
        "args": {"step": 0, "block": 1, "micro": None, "bytes": 1000},
    }
    assert (wait["name"], wait["cat"], wait["tid"]) == ("wait for FETCH(1)", "wait", 1)
    assert (forward["name"], forward["ts"], forward["dur"]) == ("FORWARD(1,0)", 4000.0, 6000.0)


def test_a_played_step_has_a_span_for_every_op_and_none_overlap_in_a_lane() -> None:
    ops = build_step(StepShape(num_blocks=5, num_micro=2, tape="host", update="late"))
    trace = Trace()
    with Player([Lane(name) for name in LANES], trace=trace) as player:
        player.play(ops, dict.fromkeys(OpKind, lambda op: 7))
    worked = [span for span in trace.spans if span.awaited is None]
    assert sorted(map(str, ops)) == sorted(str(span.op) for span in worked)
    assert all(span.num_bytes == 7 for span in worked)
    for lane in LANES:
        spans = [span for span in trace.spans if span.lane == lane]
        assert all(a.end_ns <= b.start_ns for a, b in pairwise(spans))


def test_a_slow_link_shows_as_compute_waiting_for_fetches() -> None:
    ops = build_step(StepShape(num_blocks=5))
    trace = Trace()
    lanes = [SlowLane(name, delay=(lambda op: 30e-3) if name == "in" else None) for name in LANES]
    with Player(lanes, trace=trace) as player:
        player.play(ops, dict.fromkeys(OpKind, lambda op: None))
    (summary,) = trace.step_summaries()
    waited = summary.compute_waited_s
    assert waited[OpKind.FETCH] > 0.5 * summary.seconds
    assert waited[OpKind.FETCH] > 0.5 * sum(waited.values())


# Law 3: a step's time by cause.

SECOND = 1_000_000_000


def test_what_compute_waited_for_is_told_and_the_rest_is_compute() -> None:
    forward, fetch = Op(kind=OpKind.FORWARD, block=1, micro=0), Op(kind=OpKind.FETCH, block=1)
    trace = Trace()
    trace.add(Span(0, "in", fetch, 0, 2 * SECOND))
    trace.add(Span(0, "compute", forward, 0, 2 * SECOND, awaited=fetch))
    trace.add(Span(0, "compute", forward, 2 * SECOND, 5 * SECOND))
    split = step_split(trace, seconds=6.0, data_seconds=0.5)
    assert split == {"compute": 3.5, "fetch": 2.0, "drain": 0.0, "update": 0.0, "data": 0.5}
    assert sum(split.values()) == pytest.approx(6.0)


def test_a_device_at_the_pace_of_the_host_is_told_apart_from_compute() -> None:
    """The first op was done when it was issued; the second, issued in time, took its own."""
    forward = Op(kind=OpKind.FORWARD, block=1, micro=0)
    trace = Trace()
    trace.add(Span(0, "compute", forward, 0, 2 * SECOND, issued_ns=(0, 2 * SECOND - 1)))
    late = Span(0, "compute", forward, 3 * SECOND, 5 * SECOND, issued_ns=(2 * SECOND, 3 * SECOND))
    trace.add(late)
    split = step_split(trace, seconds=5.0, data_seconds=0.0)
    assert (split["issue"], split["compute"]) == (3.0, 2.0)
    on_host = Trace()
    on_host.add(late._replace(issued_ns=None))
    assert "issue" not in step_split(on_host, seconds=5.0, data_seconds=0.0)
