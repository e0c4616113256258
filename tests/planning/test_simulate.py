"""The schedule on a virtual clock keeps the schedule's order, and finds what limits it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from megatrain.planning.costs import Cost
from megatrain.planning.machine.profile import FlopRate, MachineProfile
from megatrain.planning.simulate import (
    Simulation,
    shared_speeds,
    simulate,
    steady_step,
    step_shape,
)
from megatrain.planning.workload import Workload
from megatrain.step.ops import OpKind
from megatrain.step.settings import StepSettings
from testkit.effort import require_effort
from testkit.machines import DESKTOP, EIGHT, LARGEST, PROCESSOR, SERVER, SMALL

WORK = Workload(model=SMALL, step_tokens=16384, sequence=2048)
WAYS = [
    StepSettings(micro_batch_tokens=micro, slots=slots, tape=tape, update=update)  # type: ignore[arg-type]
    for micro, slots, tape, update in itertools.product(
        (4096, 16384), (2, 4), ("device", "host"), ("late", "in_backward")
    )
]
SLOW: dict[str, dict[str, Any]] = {
    "compute": {"forward_flops": (FlopRate(1, 1, 1e12),)},
    "link in": {"copy_in_bytes_per_s": 1e7},
    "link out": {"copy_out_bytes_per_s": 1e7},
    "optimizer": {"update_params_per_s": 1e6},
}


def simulated(settings: StepSettings, profile: MachineProfile = DESKTOP) -> Simulation:
    return simulate(profile, WORK, settings)


@pytest.mark.parametrize("profile", [DESKTOP, PROCESSOR], ids=lambda profile: profile.name)
@pytest.mark.parametrize("settings", WAYS, ids=str)
def test_no_op_begins_before_what_it_waits_for_has_ended(
    settings: StepSettings, profile: MachineProfile
) -> None:
    played = simulated(settings, profile).ops
    ends: dict[str, float] = {}
    for one in played:
        assert one.start_s >= max((played[other].end_s for other in one.waits), default=0.0)
        assert one.start_s >= ends.get(one.op.lane, 0.0)
        assert one.end_s >= one.start_s + 0.999 * one.cost.seconds
        ends[one.op.lane] = one.end_s
    if not profile.unified:
        assert any(one.waits for one in played)


@pytest.mark.parametrize("settings", WAYS, ids=str)
def test_a_step_is_between_its_busiest_lane_and_all_ops_in_turn(settings: StepSettings) -> None:
    result = simulated(settings)
    assert max(result.busy_s["compute"], result.busy_s["in"]) <= result.step_s * 1.0001
    assert result.step_s <= sum(one.end_s - one.start_s for one in result.ops)
    assert sum(result.chain.values()) == pytest.approx(result.step_s)


@pytest.mark.parametrize("settings", WAYS, ids=str)
@pytest.mark.parametrize("limit", SLOW)
def test_what_is_slow_is_named(limit: str, settings: StepSettings) -> None:
    assert simulated(settings, DESKTOP.changed(**SLOW[limit])).bottleneck == limit


def test_a_tape_on_a_slow_link_is_named() -> None:
    slow = DESKTOP.changed(copy_in_bytes_per_s=1e9, copy_out_bytes_per_s=1e9)
    many = Workload(model=SMALL, step_tokens=1 << 18, sequence=2048)
    on_host = StepSettings(micro_batch_tokens=16384, tape="host")
    assert simulate(slow, many, on_host).bottleneck == "tape"
    assert simulate(slow, many, on_host.changed(tape="device")).bottleneck == "compute"


@pytest.mark.parametrize("name", ["copy_in_bytes_per_s", "copy_out_bytes_per_s"])
def test_a_faster_link_is_never_slower(name: str) -> None:
    base = DESKTOP.changed(duplex_share=1.0, dram_bytes_per_s=1e15)
    rates = [getattr(base, name) * 2**power for power in range(-6, 3)]
    times = [simulated(WAYS[2], base.changed(**{name: rate})).step_s for rate in rates]
    assert times == sorted(times, reverse=True)
    assert times[0] > 1.5 * times[-1]


def test_the_arithmetic_of_a_step_that_compute_limits() -> None:
    """8 FLOPs per weight and token, and what attention and element-wise work add."""
    work = Workload(model=EIGHT, step_tokens=65536, sequence=2048)
    result = simulate(DESKTOP, work, StepSettings(micro_batch_tokens=16384, tape="host"))
    least = 4 * work.model.flops_per_token(2048) * work.step_tokens / 150e12
    assert result.bottleneck == "compute"
    assert least < result.step_s < 1.5 * least
    assert result.busy_shares["compute"] > 0.97


def test_copies_hide_from_as_many_tokens_as_the_arithmetic_says() -> None:
    """Weights in, 2P/B, against compute, 2PT/F: forward hides its fetches from T = F/B on."""
    ideal = DESKTOP.changed(device_bytes_per_s=1e18, attention_efficiency=1e6, op_overhead_s=1e-9)
    threshold = int(150e12 / 24e9)

    def exposed(tokens: int) -> float:
        work = Workload(model=EIGHT, step_tokens=tokens, sequence=tokens, max_grad_norm=None)
        settings = StepSettings(micro_batch_tokens=tokens, update="in_backward")
        quick = ideal.changed(update_params_per_s=1e15, dram_bytes_per_s=1e18)
        return 1 - simulate(quick, work, settings).busy_shares["compute"]

    assert exposed(threshold // 4) > 0.3
    assert exposed(2 * threshold) < 0.1


def test_those_who_share_are_slowed_by_as_much() -> None:
    link = DESKTOP.changed(duplex_share=0.8)
    into, out = Cost(seconds=1, link="in"), Cost(seconds=1, link="out")
    assert shared_speeds([into], link) == [1.0]
    assert shared_speeds([into, out, Cost(seconds=1)], link) == [0.8, 0.8, 1.0]
    hungry = Cost(seconds=1, dram_rate=60e9)
    assert shared_speeds([hungry, hungry, Cost(seconds=1)], link) == [0.5, 0.5, 1.0]
    busy = Cost(seconds=1, cores=12)
    assert shared_speeds([busy, busy], link) == pytest.approx([16 / 24, 16 / 24])


def test_a_step_in_the_middle_of_a_run_begins_with_what_the_last_one_left() -> None:
    late, early = (
        steady_step(
            step_shape(StepSettings(micro_batch_tokens=16384, update=update), WORK, unified=False)
        )
        for update in ("late", "in_backward")
    )
    assert [op.kind for op in late[: SMALL.num_blocks]] == [OpKind.UPDATE] * SMALL.num_blocks
    assert (early[0].kind, early[0].block) == (OpKind.UPDATE, 0)
    assert early[1].kind is OpKind.FETCH


SLOW_LINK = DESKTOP.changed(copy_in_bytes_per_s=1e9)


def test_the_trace_is_like_a_real_one(tmp_path: Path) -> None:
    result = simulated(WAYS[2], SLOW_LINK)
    trace = result.trace()
    assert trace.lane_summaries()["in"].busy_s == pytest.approx(result.busy_s["in"], rel=1e-6)
    waited = trace.step_summaries()[0].compute_waited_s
    assert waited[OpKind.FETCH] > 0.3 * result.step_s
    trace.write(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["name"] for event in events if event["ph"] == "X"} >= {"FETCH(1)", "CLIP"}


@pytest.mark.merge
def test_the_largest_model_with_little_effort() -> None:
    work = Workload(model=LARGEST, step_tokens=64 * 8192, sequence=4096)
    settings = StepSettings(micro_batch_tokens=8192, tape="host")
    assert len(simulate(SERVER, work, settings).ops) > 30000
    require_effort(lambda: simulate(SERVER, work, settings), at_most=60)
