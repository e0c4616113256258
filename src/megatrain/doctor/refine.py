"""Rates of the kept profile, corrected by the trace of a run, so that the next plan is nearer.

    spans of the first steps  ->  each kind of op alone, without what others took from it
                              ->  rates that give these times (fit.py)  ->  the kept profile

Ops of a step run side by side, and slow each other down. The simulator says by how much for each
kind of op; a measured time is divided by that. Only figures that the trace constrains change:

    copies      layers, where all of host memory is pinned
    update      layers
    products    at the width and the tokens of the run's micro-batches; other shapes in proportion,
                as doctor found them. Not where layers are cut into tiles, hold experts, multiply in
                fp8 or are not trained as a whole, and not where the host's pace of issuing
                set the time
    head        where the vocabulary is not cut

A machine that is busy with something else shows rates that are too low. So nothing is learned where
more threads want to run than a run has, twice over, or steps of the same work take very different
times (`disturbed`).

An op that others slow down by more than MOST_SLOWED tells more of them than of itself. What comes
out is kept only if the step that it predicts is nearer to the measured one than before.

Laws (tests/doctor/test_refine.py)
    1. A wrong rate is corrected by the trace of a step on the real machine, and the next plan's
       step is nearer.
    2. A figure that the trace does not constrain keeps its value.
    3. The kept profile says of each figure where it comes from.
    4. A busy machine teaches nothing, and is named.
"""

from __future__ import annotations

import os
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatrain.doctor.examine import keep
from megatrain.doctor.fit import fitted
from megatrain.lanes.trace import Span
from megatrain.memory.host import num_cores
from megatrain.planning.machine.examination import kept_examination
from megatrain.planning.machine.profile import FlopRate, MachineProfile, interpolate
from megatrain.planning.plan import Plan
from megatrain.planning.search import effective_profile
from megatrain.planning.simulate import simulate
from megatrain.step.ops import Op, OpKind, Role

MOST_SLOWED = 1.2
PACED = 1.1
"""Over the host's time to issue an op: what takes no longer was set by the host."""
NEAR = 0.25
"""Micro-batches within this share of the planned size count, in proportion: rows leave room."""
LEAST_SPANS = 3
MOST_SPREAD = 0.25
"""Between the quartiles of the steps' times per token, over their median."""
MOST_LOAD = 2.0
"""Threads that want to run, per core: those of a run itself are about one."""
_ROUNDS = 3
"""Rounds of fitting: what slows ops down depends on the rates."""
_FIGURES = {
    OpKind.FETCH: ("copy_in_bytes_per_s",),
    OpKind.DRAIN: ("copy_out_bytes_per_s",),
    OpKind.UPDATE: ("update_params_per_s",),
    OpKind.FORWARD: ("forward_flops", "device_bytes_per_s"),
    OpKind.BACKWARD: ("backward_flops",),
    OpKind.HEAD: ("head_efficiency",),
}
_TABLES = ("forward_flops", "backward_flops")
_Place = tuple[object, ...]
"""Kind, block, micro-batch and piece of an op, and how many of the same came before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrace:
    """One step of a run as its lanes took it."""

    spans: Sequence[Span]
    micro_tokens: Sequence[int]
    """Tokens of each micro-batch, padding included."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Refinement:
    """The rates that a trace shows."""

    profile: MachineProfile
    figures: tuple[str, ...]
    """Names of those that changed; the others are as they were."""


def op_times(plan: Plan, steps: Sequence[StepTrace]) -> list[dict[str, Any]]:
    """Return the seconds that each kind of op takes in a step, beside others, and was to take.

    Measured are the usual op, and as many as the plan has: a trace may end before the last update.
    """
    predicted: dict[OpKind, list[float]] = {}
    for one in plan.simulation.ops:
        predicted.setdefault(one.op.kind, []).append(one.end_s - one.start_s)
    measured: dict[OpKind, list[float]] = {}
    for step in steps:
        for span in step.spans:
            if span.awaited is None:
                measured.setdefault(span.op.kind, []).append(span.seconds)
    return [
        {
            "op": kind.value,
            "measured_s": statistics.fmean(times) * len(predicted[kind]),
            "predicted_s": sum(predicted[kind]),
        }
        for kind, times in measured.items()
        if kind in predicted
    ]


def disturbed(steps: Sequence[StepTrace], load: float | None = None) -> str:
    """Return why the steps tell more of other programs than of the machine; empty: they do not.

    `load` is the number of threads that want to run, per core; None: that of the last minute.
    """
    if load is None:
        load = os.getloadavg()[0] / num_cores()
    if load > MOST_LOAD:
        return f"the machine is busy, {load:.1f} runnable threads per core"
    times = [step.seconds / max(1, sum(step.micro_tokens)) for step in steps]
    low, usual, high = statistics.quantiles(times, n=4, method="inclusive")
    if high - low > MOST_SPREAD * usual:
        return f"the machine is busy, step times vary by {(high - low) / usual:.0%}"
    return ""


def refined(plan: Plan, steps: Sequence[StepTrace]) -> Refinement:
    """Return the rates that steps of the plan show; without figures if they show nothing new."""
    before = effective_profile(plan.profile, plan.ledger)
    unchanged = Refinement(profile=plan.profile, figures=())
    spans = _telling(plan, before, steps)
    if not spans or not plan.workload.division.is_alone:
        return unchanged
    profile = before
    used: set[OpKind] = set()
    for _ in range(_ROUNDS):
        alone, used = _alone(plan, profile, spans)
        profile = fitted(profile, plan.workload, plan.settings, alone)
    figures = tuple(
        name
        for kind, names in _FIGURES.items()
        for name in names
        if kind in used and getattr(profile, name) != getattr(before, name)
    )
    step_s = statistics.median(step.seconds for step in steps)
    errors = [
        abs(simulate(one, plan.workload, plan.settings).step_s - step_s)
        for one in (profile, before)
    ]
    if not figures or errors[0] >= errors[1]:
        return unchanged
    changes = {name: getattr(profile, name) for name in figures}
    for name in set(changes) & set(_TABLES):
        table = getattr(plan.profile, name) or plan.profile.forward_flops
        changes[name] = leveled(table, changes[name][0])
    return Refinement(profile=plan.profile.changed(**changes), figures=figures)


def leveled(table: Sequence[FlopRate], point: FlopRate) -> tuple[FlopRate, ...]:
    """Return a table of rates, all in proportion, that has this rate at the shape of the point.

    If the other shapes kept their rates, the next plan would choose the one that is most wrong.
    """
    factor = point.flops / interpolate(table, point.width, point.tokens)
    return tuple(one._replace(flops=factor * one.flops) for one in table)


def keep_refined(found: Refinement, origin: str) -> bool:
    """Write the figures into the kept profile, with where they come from; return whether it is.

    Without a kept profile there is nothing to correct. Raises DiskError.
    """
    kept = kept_examination()
    if kept is None or not found.figures:
        return False
    changes = {name: getattr(found.profile, name) for name in found.figures}
    origins = {**kept.origins, **dict.fromkeys(found.figures, origin)}
    keep(replace(kept, profile=kept.profile.changed(**changes), origins=origins))
    return True


def _telling(
    plan: Plan, profile: MachineProfile, steps: Sequence[StepTrace]
) -> list[tuple[_Place, Span]]:
    """Return the spans that tell something of a rate, each with its place in the step.

    Those of a micro-batch are as long as if it had the planned size.
    """
    kinds = _kinds_of(plan, profile)
    planned = plan.workload.micro_sizes(plan.settings.micro_batch_tokens)[0]
    found = []
    for step in steps:
        own = sorted((s for s in step.spans if s.awaited is None), key=lambda s: s.start_ns)
        for place, span in zip(_places(span.op for span in own), own, strict=True):
            micro, sizes = span.op.micro, step.micro_tokens
            tokens = planned if micro is None else sizes[micro] if micro < len(sizes) else 0
            is_near = abs(tokens - planned) <= NEAR * planned
            if span.op.kind in kinds and _is_usual(span.op) and is_near:
                found.append((place, _lasting(span, span.seconds * planned / tokens)))
    return found


def _places(ops: Iterable[Op]) -> Iterator[_Place]:
    """Yield the place of each op among those of a step: a block may be fetched twice."""
    seen = Counter[tuple[object, ...]]()
    for op in ops:
        name = (op.kind, op.block, op.micro)
        yield (*name, seen[name])
        seen[name] += 1


def _is_usual(op: Op) -> bool:
    """Return whether the op is one that a rate describes: of a layer, or the head."""
    if op.kind is OpKind.HEAD:
        return op.trains
    return op.role is Role.LAYER


def _kinds_of(plan: Plan, profile: MachineProfile) -> set[OpKind]:
    """Return the kinds of op whose rates a run of this plan can show."""
    kinds = set(_FIGURES)
    workload, settings = plan.workload, plan.settings
    if profile.copy_in_bytes_per_s != plan.profile.copy_in_bytes_per_s:  # not all is pinned
        kinds -= {OpKind.FETCH, OpKind.DRAIN}
    layers = workload.model.layers
    is_consistent = all(layer.is_trained and not layer.num_experts for layer in layers)
    is_consistent &= all(
        layer.gradient_flops_per_token == layer.matmul_flops_per_token for layer in layers
    )
    sizes = {layer.trained_elements() for layer in layers}
    plain = workload.products == "plain"  # the rates are those of bf16
    if settings.tile_tokens is not None or not is_consistent or len(sizes) > 1 or not plain:
        kinds -= {OpKind.FORWARD, OpKind.BACKWARD}
    if not workload.model.trains_projection or workload.projects_twice:
        kinds -= {OpKind.HEAD}
    return kinds


def _alone(
    plan: Plan, profile: MachineProfile, found: Sequence[tuple[_Place, Span]]
) -> tuple[list[Span], set[OpKind]]:
    """Return the spans as long as they would be alone, and the kinds of op that they are of."""
    played = simulate(profile, plan.workload, plan.settings).ops
    ordered = sorted(played, key=lambda one: one.start_s)
    slowed = {
        place: (one.end_s - one.start_s) / one.cost.seconds if one.cost.seconds else 1.0
        for place, one in zip(_places(one.op for one in ordered), ordered, strict=True)
    }
    groups: dict[OpKind, list[tuple[Span, float]]] = {}
    for place, span in found:
        if slowed.get(place, 1.0) <= MOST_SLOWED:
            seconds = span.seconds / slowed.get(place, 1.0)
            groups.setdefault(span.op.kind, []).append((span, seconds))
    groups = {kind: some for kind, some in groups.items() if len(some) >= LEAST_SPANS}
    for kind, issue_s in (
        (OpKind.FORWARD, profile.forward_issue_s),
        (OpKind.BACKWARD, profile.backward_issue_s),
    ):
        # The host's pace of issuing may have set the time.
        if kind in groups and _usual(groups[kind]) <= PACED * issue_s:
            del groups[kind]
    if OpKind.FORWARD not in groups:  # the recompute of backward is not known then
        groups.pop(OpKind.BACKWARD, None)
    forward_s = _usual(groups.get(OpKind.FORWARD, []))
    spans = []
    for some in groups.values():
        for span, seconds in some:
            if span.op.kind is OpKind.BACKWARD and span.op.touches(
                "kept", span.op.block, span.op.micro
            ):
                seconds += forward_s  # as if it had computed them again
            spans.append(_lasting(span, seconds))
    return spans, set(groups)


def _lasting(span: Span, seconds: float) -> Span:
    return span._replace(end_ns=span.start_ns + round(1e9 * seconds))


def _usual(some: Sequence[tuple[Span, float]]) -> float:
    return statistics.median([seconds for _, seconds in some] or [0.0])
