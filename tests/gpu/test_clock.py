"""Where the time of a step went, on an accelerator: what the device did, not what the host issued.

Ops of one kind are made to last, on their stream or, for updates, in their thread. The host issues
most of them at once, so that its own times would tell another story.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

from megatrain.lanes.trace import Trace, step_split
from megatrain.step.ops import DEVICE_LANES, Op, OpKind
from testkit.slow_lane import SlowLane
from testkit.worlds import Case, make_batch, world_of
from tests.gpu.rigs import SPIN_CYCLES, HostGpuRig, Rig, SimulatedRig

CASE = Case(sort="llama of 2 layers", steps=(((1, 6),),) * 2, update="late", tape="host", slots=2)
LASTS_S = 0.3


def keep_busy(rig: Rig, seconds: float) -> None:
    """Let the stream that this thread has entered do nothing for so long."""
    if isinstance(rig, SimulatedRig):
        rig.runtime.current_stream().sleep(seconds)
    else:
        torch.get_device_module(rig.torch_device)._sleep(int(seconds * 1e3 * SPIN_CYCLES))


def working_at_once(rig: Rig) -> AbstractContextManager[None]:
    """Streams that work when they like would have times of their own liking."""
    if not isinstance(rig, HostGpuRig):
        return nullcontext()
    control = importlib.import_module("testkit.host_gpu.control")
    timed: AbstractContextManager[None] = control.timed("early")
    return timed


def traced(rig: Rig, seconds: Mapping[OpKind, float], *, clocked: bool = True) -> Trace:
    """Return the trace of the second step: the first warms up, and leaves updates behind."""
    world = world_of(CASE.sort)

    def lasting(op: Op) -> float:
        if op.lane not in DEVICE_LANES:
            return seconds.get(op.kind, 0.0)
        if op.kind in seconds:
            keep_busy(rig, seconds[op.kind])
        return 0.0

    with rig.running(world.store) as accelerator, working_at_once(rig):
        lanes = [
            SlowLane(
                lane.name,
                stream=lane._stream,
                clock=lane._clock if clocked else None,
                delay=lasting,
            )
            for lane in accelerator.lanes()
        ]
        chosen = {"device": accelerator, "lanes": lanes, "optimizer": rig.optimizer(world)}
        with world.engine(CASE, trace=True, **chosen) as engine:
            assert engine.trace is not None
            for number, shapes in enumerate(CASE.steps):
                engine.trace.spans.clear()
                engine.step(make_batch(shapes, seed=number))
            trace = Trace()
            trace.spans += engine.trace.spans
    return trace


@pytest.mark.merge
@pytest.mark.parametrize(
    ("kind", "limit", "part"),
    [
        (OpKind.FETCH, "link in", "fetch"),
        (OpKind.UPDATE, "optimizer", "update"),
        (OpKind.BACKWARD, "compute", "compute"),
    ],
    ids=["link in", "optimizer", "compute"],
)
def test_what_limits_a_step_is_named(rig: Rig, kind: OpKind, limit: str, part: str) -> None:
    (summary,) = (trace := traced(rig, {kind: LASTS_S})).step_summaries()
    limits, split = summary.limits_s, step_split(trace, summary.seconds, 0.0)
    assert sum(split.values()) == pytest.approx(summary.seconds, rel=1e-3)
    if isinstance(rig, SimulatedRig):  # it computes in Python, and that is the pace of the host
        limits.pop("host")
        split.pop("issue", None)
    assert max(limits, key=lambda name: limits[name]) == limit
    assert max(split, key=lambda name: split[name]) == part
