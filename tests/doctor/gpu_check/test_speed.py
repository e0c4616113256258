"""Figures of a device: each that is slower than it should be is named with its cause."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.devices.device import CpuDevice, Device
from megatrain.doctor.gpu_check.facts import Link, SystemFacts
from megatrain.doctor.gpu_check.sizes import step_for
from megatrain.doctor.gpu_check.speed import (
    Rates,
    StepFigures,
    known_flops,
    rate_checks,
    step_checks,
    timed_figures,
)
from megatrain.doctor.subject import CPU, Subject
from megatrain.lanes.trace import StepSummary, Trace
from megatrain.planning.catalog.asked_machines import find_machine
from megatrain.planning.machine.profile import MachineProfile
from megatrain.step.ops import LIMITS
from testkit.simulated.accelerator import Simulator

WIDE = Link(speed=16.0, lanes=16, most_speed=16.0, most_lanes=16)


def card(**changes: Any) -> MachineProfile:
    machine, _ = find_machine("4090")
    return machine.profile().changed(device="NVIDIA GeForce RTX 4090", **changes)


def causes(profile: MachineProfile, *, pinning: float | None = 5e9, **facts: Any) -> dict[str, Any]:
    link = facts.pop("link", WIDE)
    rates = Rates(profile=profile, kernel="native", pinning_bytes_per_s=pinning)
    checks = rate_checks(rates, SystemFacts(values=facts, link=link))
    return {check.name: check.causes for check in checks if check.causes}


def test_a_card_as_it_should_be_has_no_cause() -> None:
    assert causes(card()) == {}


@pytest.mark.parametrize(
    ("changes", "facts", "found"),
    [
        ({"copy_in_bytes_per_s": 9e9}, {}, {"copies": ("slow link",)}),
        ({}, {"link": replace(WIDE, lanes=8)}, {"copies": ("narrow link",)}),
        ({"duplex_share": 0.5}, {}, {"copies": ("one way",)}),
        ({}, {"pinning": None}, {"pinning": ("pinning",)}),
        ({}, {"pinning": 3e8}, {"pinning": ("registration",)}),
        ({"forward_flops": ((4096, 4096, 5e13),)}, {}, {"products": ("slow products",)}),
        ({}, {"throttled": ["sw_thermal_slowdown"]}, {"products": ("slow products",)}),
        ({"fp32_efficiency": 3.0}, {}, {"products": ("no bf16",)}),
    ],
)
def test_what_is_slow_is_named(
    changes: dict[str, Any], facts: dict[str, Any], found: dict[str, Any]
) -> None:
    assert causes(card(**changes), **facts) == found


def test_cards_are_known_by_the_names_of_their_drivers() -> None:
    assert known_flops("NVIDIA GeForce RTX 4090") == 168e12
    assert known_flops("NVIDIA A100-SXM4-80GB") is not None
    assert known_flops("testkit/host_gpu 0") is None
    assert known_flops("") is None


SLOW_S = 0.02


class SlowIn(CpuDevice):
    """A link in which a copy to the device takes SLOW_S."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        time.sleep(SLOW_S)
        super().copy(target, source)


class SlowLink(Subject):
    def new_device(self, cap_bytes: int | None = None, **sizes: int) -> Device:
        return SlowIn(copying=True)


def small() -> Rates:
    """Return a host of its own rates, so slow that the model is tiny."""
    profile = card(
        forward_flops=((1024, 1024, 1.8e9),), fp32_efficiency=2.0, ram_bytes=1 << 34, cores=2,
        copy_in_bytes_per_s=1e6, copy_out_bytes_per_s=1e9,
    )  # fmt: skip
    return Rates(profile=profile, kernel="native", pinning_bytes_per_s=None)


@pytest.fixture(scope="module")
def slow_step() -> StepFigures:
    subject = SlowLink(name="", place=torch.device("cpu"), device_bytes=0, runtime=None)
    return timed_figures(subject, small(), 1_000_000, lambda what: None)


@pytest.mark.merge
def test_a_link_that_is_slow_is_the_bound_and_what_compute_waits_for(
    slow_step: StepFigures,
) -> None:
    facts = slow_step.facts()
    assert facts["bound_by"] == "in"
    split = facts["split_s"]
    assert sum(split.values()) == pytest.approx(slow_step.timed.step_s, rel=1e-3)
    assert facts["limit"] in LIMITS
    waits = {part: seconds for part, seconds in split.items() if part != "compute"}
    assert max(waits, key=lambda part: waits[part]) == "fetch"
    assert facts["params"] == pytest.approx(1e6, rel=0.15)
    assert {span[0] for span in facts["spans"]} >= {"in", "out", "compute", "host"}


def test_a_step_far_from_its_bound_and_its_prediction_is_named(slow_step: StepFigures) -> None:
    device = Subject(name="x", place=torch.device("cpu"), device_bytes=1, runtime=Simulator())
    timed = replace(slow_step.timed, step_s=100 * slow_step.chosen.plan.step_s)
    far = replace(slow_step, timed=timed, lanes_s={"compute": timed.step_s / 2})
    assert [check.causes for check in step_checks(far, device)] == [
        ("far from bound",), ("unpredicted",),
    ]  # fmt: skip
    assert [check.state for check in step_checks(far, CPU)] == ["ok", "ok"], "cores are shared"
    on_device, on_cpu = (next(iter(step_checks(far, where))).found for where in (device, CPU))
    assert "50 % of the speed at its bound (compute)" in on_device
    assert "bound" not in on_cpu
    near = replace(far, timed=replace(timed, step_s=slow_step.chosen.plan.step_s))
    near = replace(near, lanes_s={"compute": near.timed.step_s * 0.95})
    assert [check.state for check in step_checks(near, device)] == ["ok", "ok"]


def test_a_device_that_waits_for_its_host_is_named(
    slow_step: StepFigures, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound cannot tell: the engine without copies has the same pace."""
    device = Subject(name="x", place=torch.device("cpu"), device_bytes=1, runtime=Simulator())
    step_s = slow_step.chosen.plan.step_s
    near = replace(slow_step, timed=replace(slow_step.timed, step_s=step_s))
    near = replace(near, lanes_s={"compute": 0.95 * step_s})
    assert next(iter(step_checks(near, device))).causes == ()

    def paced(trace: Trace) -> list[StepSummary]:
        return [StepSummary(seconds=step_s, compute_waited_s={}, host_paced_s=0.5 * step_s)]

    monkeypatch.setattr(Trace, "step_summaries", paced)
    check = next(iter(step_checks(near, device)))
    assert check.causes == ("host paced",)
    assert "50 % host-paced" in check.found


def test_a_step_that_takes_too_long_is_made_smaller() -> None:
    chosen = step_for(small().profile, 10**9)
    assert chosen.reduced == "a step would take too long"
