"""A step's time by cause adds up."""

from __future__ import annotations

import pytest

from megatrain.lanes.split import step_split
from megatrain.lanes.trace import Span, Trace
from megatrain.step.ops import Op, OpKind

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
