"""Part `roofline`: each kind of op of a step against the device's own rates, and against the plan.

    work     FLOPs of products and attention, or bytes over the link or host memory
    peak     the best rate of products, of copies alone, or of host memory, as measured before
    planned  seconds that the planner gives to such an op

A share of the peak that is small where work is large is a kernel, or a wait, to look at.

Laws (tests/doctor/gpu_check/long/test_roofline.py)
    1. Ops that take what their costs say are at the planner's time, each kind of op in one row.
    2. Ops twice as slow have half the share of the peak.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from megatrain.doctor.gpu_check.long.given import Given
from megatrain.doctor.gpu_check.long.long_model import (
    long_model,
    planned_step,
    step_facts,
    steps_of,
)
from megatrain.lanes.trace import Span
from megatrain.planning.costs import BACKWARD_ATTENTION, Costs
from megatrain.planning.plan import Plan
from megatrain.planning.search import effective_profile
from megatrain.step.ops import Op, OpKind, Role
from megatrain.text import percent

NUM_STEPS = 4


def measure(given: Given) -> dict[str, Any]:
    """Return a row for each kind of op, and the figures of the step as a whole."""
    model = long_model(given.profile, given.scale)
    plan = planned_step(given, model)
    micro = plan.settings.micro_batch_tokens
    given.say(f"{NUM_STEPS} steps of {model.step_tokens:,} tokens, micro-batches of {micro:,}")
    form = model.with_step(model.step_tokens, packed=True, micro=micro)
    steps = steps_of(given, model)
    step_s, trace, peak_bytes = steps.time(plan.settings, form.batch(), NUM_STEPS)
    last = max(span.step for span in trace.spans)
    spans = [span for span in trace.spans if span.step > last - NUM_STEPS]
    given.attach("lanes-trace.json", trace.last_step().to_json().encode())
    table = op_rows(plan, spans)
    facts = step_facts(step_s, trace, model.step_tokens)
    flops = max(point.flops for point in given.profile.forward_flops)
    multiplied = plan.workload.model.params - form.vocabulary * form.hidden
    mfu = 6 * multiplied * model.step_tokens / step_s / flops
    figures = model.facts() | facts | {
        "mfu": mfu,
        "predicted_s": plan.step_s,
        "peak_device_bytes": peak_bytes,
        "settings": plan.settings.facts(),
    }  # fmt: skip
    lead = (
        f"A step took {step_s / plan.step_s:.2f} times the planned time; 6 FLOPs per token and "
        f"parameter are {percent(mfu)} of the best rate of products."
    )
    return {"lead": lead, "figures": figures, "tables": {"Ops": table}}


def op_rows(plan: Plan, spans: Iterable[Span]) -> list[dict[str, Any]]:
    """Return measured and planned time, work and share of the peak for each kind of op."""
    profile = effective_profile(plan.profile, plan.ledger)
    costs = Costs(profile, plan.workload, plan.settings)
    groups: dict[tuple[OpKind, Role | None], list[Span]] = {}
    for span in spans:
        if span.awaited is None:
            groups.setdefault((span.op.kind, span.op.role), []).append(span)
    rows = []
    for (kind, role), found in groups.items():
        measured = statistics.median(span.seconds for span in found)
        planned = statistics.median(costs.of(span.op).seconds for span in found)
        amounts = [_work(costs, span) for span in found]
        unit, peak = amounts[0][1:]
        amount = statistics.median(amount for amount, *_ in amounts)
        rows.append(
            {
                "op": kind.value,
                "of": "" if role is None else role.value,
                "ops_per_step": len(found) / len({span.step for span in found}),
                "measured_s": measured,
                "planned_s": planned,
                "over_plan": measured / planned,
                "work": amount,
                "unit": unit,
                "rate": amount / measured if measured else 0.0,
                "of_peak": amount / measured / peak if measured else 0.0,
            }
        )
    return sorted(rows, key=lambda row: -row["ops_per_step"] * row["measured_s"])


def _work(costs: Costs, span: Span) -> tuple[float, str, float]:
    """Return the work of an op, its unit, and the best rate of such work."""
    op, profile, cost = span.op, costs.profile, costs.of(span.op)
    if op.kind.spec.lane == "compute" and op.role is not Role.EMBEDDING:
        return _flops(costs, op), "FLOP", max(point.flops for point in profile.forward_flops)
    if cost.link:
        into = cost.link == "in"
        rate = profile.copy_in_bytes_per_s if into else profile.copy_out_bytes_per_s
        return float(span.num_bytes or cost.num_bytes), "byte", rate
    if op.kind.spec.lane == "compute":
        return cost.seconds * profile.device_bytes_per_s, "byte", profile.device_bytes_per_s
    return cost.dram_rate * cost.seconds, "byte", profile.dram_bytes_per_s


def _flops(costs: Costs, op: Op) -> float:
    """Return the FLOPs of a layer or of the head: products and attention."""
    workload = costs.workload
    sizes = workload.micro_sizes(costs.settings.micro_batch_tokens)
    tokens = 0 if op.micro is None else sizes[op.micro]
    if op.role is Role.HEAD:
        return 3.0 * workload.model.head_flops_per_token * tokens / op.num_pieces
    block = workload.model.blocks[op.block or 0]
    products, attention = block.matmul_flops_per_token * tokens, 0.0
    if block.attention is not None:
        sequence = min(workload.sequence, tokens)
        attention = block.attention.flops_per_token(sequence, masked=workload.masked) * tokens
    if op.kind is OpKind.FORWARD:
        return products + attention
    again = 0.0 if op.keeps_activations else products + attention
    gradients = block.gradient_flops_per_token * tokens
    return again + products + gradients + BACKWARD_ATTENTION * attention
