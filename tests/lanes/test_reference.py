"""The oracle: list order, in the caller's thread, nothing after a failure."""

from __future__ import annotations

import threading

import pytest

from megatrain.lanes.reference import Reference
from megatrain.lanes.trace import Trace
from megatrain.step.ops import Op, OpKind
from megatrain.step.shape import StepShape
from testkit.schedules import build_step

OPS = build_step(StepShape(num_blocks=4, num_micro=2, tape="host", update="late"))


def test_ops_are_done_in_list_order_in_this_thread() -> None:
    done: list[tuple[Op, int]] = []

    def act(op: Op) -> None:
        done.append((op, threading.get_ident()))

    reference = Reference()
    reference.play(OPS, dict.fromkeys(OpKind, act)).wait(OpKind.HEAD)
    reference.settle()
    assert done == [(op, threading.get_ident()) for op in OPS]


def test_nothing_is_done_after_a_failure() -> None:
    done: list[Op] = []

    def act(op: Op) -> None:
        done.append(op)
        if op.kind is OpKind.HEAD:
            raise RuntimeError("no loss")

    with pytest.raises(RuntimeError, match="no loss"):
        Reference().play(OPS, dict.fromkeys(OpKind, act))
    assert done[-1].kind is OpKind.HEAD
    assert sum(op.kind is OpKind.HEAD for op in done) == 1


def test_it_keeps_a_trace() -> None:
    trace = Trace()
    reference = Reference(trace=trace)
    for _ in range(2):
        reference.play(OPS, dict.fromkeys(OpKind, lambda op: 3))
    assert [span.op for span in trace.spans] == OPS * 2
    assert {span.step for span in trace.spans} == {0, 1}
    assert all(span.num_bytes == 3 and span.start_ns <= span.end_ns for span in trace.spans)
