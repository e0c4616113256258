"""A step's time by cause adds up."""

from __future__ import annotations

import pytest

from megatrain.lanes.trace import Span, Trace
from megatrain.run.step_time import step_split
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
