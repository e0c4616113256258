"""A step on a virtual clock: the very ops of the schedule, in their lanes, with their waits.

Each lane does its ops in order, one at a time; an op begins when those it waits for are done. While
several run at once they share what the machine has one of, and go as fast as that lets them:

    link      both directions at once keep `duplex_share` of their rates; what ranks send each
              other without links of their own takes its share of both
    memory    copies and the optimizer share the host's memory traffic, each by its demand
    cores     where compute is on the host's cores, so do all others

The simulated step is in the middle of a run: on top of its list are the updates that the step
before left behind, and it ends when its losses and norms are known, as the engine's does.

Laws (tests/planning/test_simulate.py)
    1. No op begins before the ops it waits for have ended; lanes are in order.
    2. A step takes no less than its busiest lane, and no more than all of its ops in turn.
    3. Faster never makes slower: in a lane alone.
    4. The bottleneck is what the chain of ops that ends last spent most of its time on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from megatrain.features.registry import build_ops
from megatrain.lanes.trace import Span, Trace
from megatrain.planning.costs import Cost, Costs
from megatrain.planning.machine.profile import MachineProfile
from megatrain.planning.workload import Workload
from megatrain.step.hazards import Hazards
from megatrain.step.ops import LANES, Op
from megatrain.step.settings import StepSettings
from megatrain.step.shape import StepShape

_STARTS = 1e-12
"""Work below this is done: seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedOp:
    """One op on the virtual clock."""

    op: Op
    cost: Cost
    start_s: float
    end_s: float
    cause: int
    """The op, by its place in the list, that it began behind; -1: none."""
    waits: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """A step that was played."""

    ops: Sequence[SimulatedOp]
    step_s: float
    """Until losses and norms are known: the time from one step to the next."""
    tokens: int

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_s

    @cached_property
    def busy_s(self) -> dict[str, float]:
        """Seconds of a step that each lane works."""
        busy = dict.fromkeys(LANES, 0.0)
        for played in self.ops:
            busy[played.op.lane] += played.end_s - played.start_s
        return busy

    @property
    def busy_shares(self) -> dict[str, float]:
        return {lane: busy / self.step_s for lane, busy in self.busy_s.items()}

    @cached_property
    def chain(self) -> dict[str, float]:
        """Seconds, by limit, of the chain of ops that ends with the step: they add up to it."""
        seconds: defaultdict[str, float] = defaultdict(float)
        index = max(range(len(self.ops)), key=lambda i: (self._ends_step(i), self.ops[i].end_s))
        while index >= 0:
            played = self.ops[index]
            limit = played.cost.limit or played.op.kind.spec.limit
            seconds[limit] += played.end_s - played.start_s
            index = played.cause
        return dict(seconds)

    @property
    def bottleneck(self) -> str:
        """The limit of the step: `compute`, `link in`, `network`, ... (step/ops.py)."""
        return max(self.chain, key=lambda limit: self.chain[limit])

    def trace(self) -> Trace:
        """Return the step as a trace, waits included, like that of a real one."""
        trace = Trace()
        lane_ends = dict.fromkeys(LANES, 0.0)
        for played in sorted(self.ops, key=lambda played: played.end_s):
            lane = played.op.lane
            if played.start_s > lane_ends[lane] and played.cause >= 0:
                awaited = self.ops[played.cause].op
                span = _span(played.op, lane_ends[lane], played.start_s, 0, awaited)
                trace.add(span)
            num_bytes = played.cost.num_bytes
            trace.add(_span(played.op, played.start_s, played.end_s, num_bytes, None))
            lane_ends[lane] = played.end_s
        return trace

    def _ends_step(self, index: int) -> bool:
        return self.ops[index].op.kind.spec.ends_step


def _span(op: Op, start_s: float, end_s: float, num_bytes: int, awaited: Op | None) -> Span:
    return Span(0, op.lane, op, round(start_s * 1e9), round(end_s * 1e9), num_bytes, awaited)


def simulate(profile: MachineProfile, workload: Workload, settings: StepSettings) -> Simulation:
    """Return a step of `workload` on a machine, in the middle of a run."""
    shape = step_shape(settings, workload, unified=profile.unified)
    costs = Costs(profile, workload, settings)
    return play(steady_step(shape), costs, profile, tokens=workload.step_tokens)


def forward_seconds(profile: MachineProfile, workload: Workload, settings: StepSettings) -> float:
    """Return how long the tokens of a step take to go through the model, without a step."""
    shape = step_shape(settings, workload, unified=profile.unified)
    costs = Costs(profile, workload, settings)
    return play(build_ops("forward", shape), costs, profile, tokens=workload.step_tokens).step_s


def step_shape(settings: StepSettings, workload: Workload, *, unified: bool) -> StepShape:
    """Return the shape of a step of `workload`."""
    model = workload.model
    return settings.shape(
        num_blocks=model.num_blocks,
        num_micro=workload.num_micro(settings.micro_batch_tokens),
        copying=not unified,
        tied=model.tied,
        divided=not workload.division.is_alone,
        trained=tuple(block.is_trained for block in model.blocks),
        matrices=tuple(bool(block.matrices) for block in model.blocks),
    )


def steady_step(shape: StepShape) -> list[Op]:
    """Return the ops of a step with, on top, the updates that the one before left behind."""
    ops = build_ops("pending step" if shape.update == "late" else "step", shape)
    last_known = max(i for i, op in enumerate(ops) if op.kind.spec.ends_step)
    return [*ops[last_known + 1 :], *ops]


def play(ops: Sequence[Op], costs: Costs, profile: MachineProfile, *, tokens: int) -> Simulation:
    """Play a list of ops on a virtual clock."""
    clock = _Clock(ops, costs, profile)
    clock.run()
    played = [
        SimulatedOp(
            op=op,
            cost=clock.costs[index],
            start_s=clock.starts[index],
            end_s=clock.ends[index],
            cause=clock.causes[index],
            waits=tuple(clock.waits[index]),
        )
        for index, op in enumerate(ops)
    ]
    known = max(one.end_s for one in played if one.op.kind.spec.ends_step)
    return Simulation(ops=played, step_s=known, tokens=tokens)


class _Clock:
    """Lanes at work."""

    def __init__(self, ops: Sequence[Op], costs: Costs, profile: MachineProfile) -> None:
        self.costs = [costs.of(op) for op in ops]
        self.starts = [0.0] * len(ops)
        self.ends = [0.0] * len(ops)
        self.causes = [-1] * len(ops)
        self.queues: dict[str, list[int]] = {lane: [] for lane in LANES}
        self.waits: list[list[int]] = []
        self._profile = profile
        self._speeds: dict[tuple[int, ...], list[float]] = {}
        hazards = Hazards()
        for index, op in enumerate(ops):
            _, tickets = hazards.feed(op)
            self.waits.append([self.queues[t.lane][t.number] for t in tickets])
            self.queues[op.lane].append(index)

    def run(self) -> None:
        """Play until every lane is through."""
        lanes = [queue for queue in self.queues.values() if queue]
        done = [False] * len(self.costs)
        places = [0] * len(lanes)
        running: list[int] = [-1] * len(lanes)
        left = [0.0] * len(lanes)
        now = 0.0
        while True:
            for lane, queue in enumerate(lanes):
                if running[lane] < 0 and places[lane] < len(queue):
                    index = queue[places[lane]]
                    if all([done[other] for other in self.waits[index]]):  # noqa: C419 - faster
                        running[lane], left[lane] = index, self.costs[index].seconds
                        self.starts[index] = now
                        self.causes[index] = self._cause(index, queue, places[lane])
            active = [lane for lane, index in enumerate(running) if index >= 0]
            if not active:
                return
            speeds = self._speeds_of([running[lane] for lane in active])
            passed = min(left[lane] / speed for lane, speed in zip(active, speeds, strict=True))
            now += passed
            for lane, speed in zip(active, speeds, strict=True):
                left[lane] -= passed * speed
                if left[lane] <= _STARTS:
                    index = running[lane]
                    done[index], self.ends[index] = True, now
                    running[lane] = -1
                    places[lane] += 1

    def _cause(self, index: int, queue: Sequence[int], place: int) -> int:
        """Return the op that ended last of those that this one began behind."""
        before = [queue[place - 1]] if place else []
        behind = [*self.waits[index], *before]
        return max(behind, key=lambda other: self.ends[other], default=-1)

    def _speeds_of(self, running: Sequence[int]) -> list[float]:
        costs = [self.costs[index] for index in running]
        key = tuple(map(id, costs))
        found = self._speeds.get(key)
        if found is None:
            found = self._speeds[key] = shared_speeds(costs, self._profile)
        return found


def shared_speeds(costs: Sequence[Cost], profile: MachineProfile) -> list[float]:
    """Return how fast each of the ops that run at once goes, against going alone."""
    speeds = [1.0] * len(costs)
    if {"in", "out"} <= {cost.link for cost in costs}:
        lost = 1 - profile.duplex_share
        speeds = [1 - lost * cost.demand(cost.link) if cost.link else 1.0 for cost in costs]
    for way in ("in", "out"):
        _share(speeds, [cost.demand(way) for cost in costs], 1.0)
    _share(speeds, [cost.dram_rate for cost in costs], profile.dram_bytes_per_s)
    _share(speeds, [cost.cores for cost in costs], profile.cores)
    return speeds


def _share(speeds: list[float], demands: Sequence[float], supply: float) -> None:
    """Slow down all who ask, by as much, until what they ask for together is there."""
    asked = sum(speed * demand for speed, demand in zip(speeds, demands, strict=True))
    if asked > supply:
        for index, demand in enumerate(demands):
            if demand > 0:
                speeds[index] *= supply / asked
