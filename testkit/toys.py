"""Small worlds for the tests of the pipeline: chains of schedules, integers, a virtual clock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

from megatrain.lanes.lane import Action
from megatrain.lanes.player import Player
from megatrain.step.hazards import Hazards
from megatrain.step.ops import Op, OpKind, Resource
from megatrain.step.shape import StepShape
from testkit.schedules import build_flush, build_forward, build_step


def two_steps(shape: StepShape) -> list[list[Op]]:
    """Return two training steps, and the updates they leave."""
    step = build_step(shape)
    if shape.update != "late":
        return [step, step]
    flush = build_flush(shape)
    return [step, build_step(shape, pending=True), flush]


def short_life(shape: StepShape) -> list[list[Op]]:
    """Return two training steps, an evaluation, and two more training steps."""
    return [*two_steps(shape), build_forward(shape), *two_steps(shape)]


class IntegerMachine:
    """Ops as arithmetic: each write is a hash of the op and all that it read.

    So any read of a wrong or half-done thing changes everything downstream, and `history`, which
    keeps all values ever written to each resource, differs.
    """

    def __init__(self, pause: Callable[[], None] = lambda: None) -> None:
        self.history: dict[Resource, list[int]] = {}
        self.num_inside = 0
        self._pause = pause
        self._lock = threading.Lock()

    def act(self, op: Op) -> int:
        with self._lock:
            self.num_inside += 1
        seen = [self.history.get(resource, [0])[-1] for resource in op.reads]
        self._pause()
        for resource in op.writes:
            self.history.setdefault(resource, []).append(hash((str(op), *seen)))
        with self._lock:
            self.num_inside -= 1
        return len(op.writes)

    def actions(self) -> dict[OpKind, Action]:
        return dict.fromkeys(OpKind, self.act)


def virtual_times(
    schedules: Iterable[Sequence[Op]], cost: Mapping[OpKind, float] | Callable[[Op], float]
) -> list[tuple[Op, float, float]]:
    """Return (op, start, end) of every op if lanes had nothing to do but wait and work."""
    cost_of = cost if callable(cost) else lambda op: cost.get(op.kind, 0.0)
    hazards = Hazards()
    lane_end: dict[str, float] = {}
    ticket_end: dict[object, float] = {}
    times = []
    for ops in schedules:
        for op in ops:
            ticket, waits = hazards.feed(op)
            start = max([lane_end.get(op.lane, 0.0), *(ticket_end[awaited] for awaited in waits)])
            end = lane_end[op.lane] = ticket_end[ticket] = start + cost_of(op)
            times.append((op, start, end))
    return times


def compute_waited(times: Iterable[tuple[Op, float, float]], kind: OpKind) -> float:
    """Return how long lane compute stood still before ops of `kind`."""
    waited, free_at = 0.0, 0.0
    for op, start, end in times:
        if op.lane == "compute":
            waited += start - free_at if op.kind is kind else 0.0
            free_at = end
    return waited


def shorten_deadline(player: Player, deadline_s: float) -> None:
    """Give the lanes less time from now on: what must happen before has happened."""
    progress = player._progress
    with progress._lock:
        progress._deadline_s = deadline_s
        for sleeper in progress._sleepers:
            sleeper.condition.notify()
