"""The figures of a device, and whether each is what it should be.

    copies       pinned memory each way, and both at once, against the link's own rate
    pinning      how fast host memory is pinned, or that it cannot be
    products     matrix products in bf16, against what such a device sustains elsewhere
    optimizer    parameters that the host updates per second
    step         a step against its bound, where its time goes, and what the planner predicts

A figure without anything to compare it with (a device that no table knows) is ok.

Laws (tests/doctor/gpu_check/test_speed.py)
    1. A link, a device or a step that is slower than it should be is named, with its cause.
    2. Memory that is full ends the step's check alone, with its cause.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatrain.doctor.examine import measure_rates
from megatrain.doctor.gpu_check.facts import SystemFacts
from megatrain.doctor.gpu_check.findings import Check, judged
from megatrain.doctor.gpu_check.sizes import ChosenStep, step_for
from megatrain.doctor.rates import CopyRates, registration_rate
from megatrain.doctor.subject import Subject
from megatrain.doctor.timed_step import TimedStep, time_step
from megatrain.errors import ConfigError
from megatrain.lanes.trace import Trace, step_split
from megatrain.memory.host import free_bytes
from megatrain.planning.catalog.asked_machines import find_machine
from megatrain.planning.machine.facts import host_facts
from megatrain.planning.machine.profile import MachineProfile
from megatrain.progress import Say
from megatrain.text import byte_rate, duration, figure, flop_rate, percent, size

LINK_SHARE, DUPLEX_SHARE, PRODUCTS_SHARE = 0.65, 0.6, 0.6
"""Below these shares of what should be there a figure is slow."""
LEAST_PINNING = 1e9
LEAST_OF_BOUND = 0.8
MOST_OVER_PREDICTION = 1.3
MOST_HOST_PACED = 0.2
MEASURE_S = 15.0
"""For the rates; after it what refines them is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Figures measured before the step."""

    profile: MachineProfile
    kernel: str
    pinning_bytes_per_s: float | None
    """None: there is nothing to pin for this device, or it cannot be pinned."""

    @property
    def copies(self) -> CopyRates:
        profile = self.profile
        return CopyRates(
            into=profile.copy_in_bytes_per_s,
            out=profile.copy_out_bytes_per_s,
            duplex_share=profile.duplex_share,
        )

    @property
    def flops(self) -> float:
        """The best rate of forward's products."""
        return max(point.flops for point in self.profile.forward_flops)

    def facts(self) -> dict[str, Any]:
        """Return the figures as plain values."""
        profile, copies = self.profile, self.copies
        return {
            "copy_in_bytes_per_s": copies.into,
            "copy_out_bytes_per_s": copies.out,
            "copy_both_bytes_per_s": copies.both,
            "pinning_bytes_per_s": self.pinning_bytes_per_s,
            "product_flops": [list(point) for point in profile.forward_flops],
            "fp32_share": profile.fp32_efficiency,
            "attention_share": profile.attention_efficiency,
            "elementwise_bytes_per_s": profile.device_bytes_per_s,
            "dram_bytes_per_s": profile.dram_bytes_per_s,
            "update_params_per_s": profile.update_params_per_s,
            "update_kernel": self.kernel,
        }


def measured_rates(subject: Subject, say: Say, now: float) -> Rates:
    """Measure the subject: well under a minute. `now` is time.monotonic."""
    facts = host_facts()
    usable = min(free_bytes(), facts.usable_bytes)
    profile, kernel = measure_rates(subject, facts, usable, say, now + MEASURE_S)
    pinning = None
    if subject.runtime is not None and not profile.pinned_bytes:
        say("pinning")
        device = subject.new_device()
        pinning = registration_rate(device)
        device.close()
    # A processor makes copies here, as an accelerator would.
    profile = profile.changed(unified=False)
    return Rates(profile=profile, kernel=kernel, pinning_bytes_per_s=pinning)


def rate_checks(rates: Rates, facts: SystemFacts) -> Iterator[Check]:
    """Yield a check for each rate."""
    yield _copies(rates, facts)
    if rates.profile.device_bytes:
        yield _pinning(rates)
    yield _products(rates, facts.values)
    yield _check(
        "optimizer", f"{figure(rates.profile.update_params_per_s)} params/s, {rates.kernel}"
    )


def _check(name: str, found: str, *causes: str) -> Check:
    return judged("fast", name, found, causes)


def _copies(rates: Rates, facts: SystemFacts) -> Check:
    copies, link = rates.copies, facts.link
    text = (
        f"{byte_rate(copies.into)} in, {byte_rate(copies.out)} out, "
        f"{byte_rate(copies.both)} both at once"
    )
    if link is None or not link.bytes_per_s:
        return _check("copies", text)
    share = min(copies.into, copies.out) / link.bytes_per_s
    causes = ["narrow link"] if link.is_narrow else []
    causes += ["slow link"] if share < LINK_SHARE else []
    causes += ["one way"] if copies.duplex_share < DUPLEX_SHARE else []
    return _check("copies", f"{text}; {percent(share)} of the link ({link})", *causes)


def _pinning(rates: Rates) -> Check:
    rate = rates.pinning_bytes_per_s
    if rate is None:
        return _check("pinning", "host memory cannot be pinned: copies are staged", "pinning")
    return _check("pinning", byte_rate(rate), *(["registration"] if rate < LEAST_PINNING else []))


def _products(rates: Rates, facts: Mapping[str, Any]) -> Check:
    text, causes = f"{flop_rate(rates.flops)} in bf16", []
    known = known_flops(rates.profile.device)
    if known is not None:
        text += f", {percent(rates.flops / known)} of what this device sustains elsewhere"
        causes += ["slow products"] if rates.flops < PRODUCTS_SHARE * known else []
    if facts.get("throttled"):
        text += f"; throttled: {', '.join(facts['throttled'])}"
        causes = ["slow products"]
    if rates.profile.fp32_efficiency > 1:
        text += f"; fp32 is {rates.profile.fp32_efficiency:.3g} times as fast"
        causes.append("no bf16")
    return _check("products", text, *causes)


def known_flops(name: str) -> float | None:
    """Return what a card of this name sustains, if the catalog has it."""
    words = name.replace("-", " ").split()
    for count in range(len(words), 0, -1):
        try:
            machine, _ = find_machine(" ".join(words[:count]))
        except ConfigError:
            continue
        return None if machine.on_host else machine.sustained * 1e12
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """A step that was timed, and what was predicted of it."""

    asked_params: int
    chosen: ChosenStep
    timed: TimedStep
    lanes_s: Mapping[str, float]

    @property
    def bound(self) -> tuple[float, str]:
        """The least time of the step, and the lane that sets it."""
        lane = max(self.lanes_s, key=lambda name: self.lanes_s[name])
        return self.lanes_s[lane], lane

    @property
    def _mfu(self) -> float:
        """6 FLOPs per token and parameter, over the best rate of products."""
        best = max(point.flops for point in self.chosen.plan.profile.forward_flops)
        return 6 / 8 * self.timed.flops / best

    def facts(self) -> dict[str, Any]:
        """Return the figures as plain values."""
        timed, model, plan = self.timed, self.chosen.model, self.chosen.plan
        bound_s, bound_by = self.bound
        trace = timed.trace.last_step()
        (summary,) = trace.step_summaries()
        return {
            "params": timed.num_params,
            "asked_params": self.asked_params,
            "reduced": self.chosen.reduced,
            "layers": model.layers,
            "hidden": model.hidden,
            "vocabulary": model.vocabulary,
            "dtype": model.dtype,
            "tokens": timed.num_tokens,
            "settings": plan.settings.facts(),
            "step_s": timed.step_s,
            "tokens_per_s": timed.num_tokens / timed.step_s,
            "flops": timed.flops,
            "bound_s": bound_s,
            "bound_by": bound_by,
            "of_bound": bound_s / timed.step_s,
            "lanes_s": dict(self.lanes_s),
            "device_busy_s": trace.lane_summaries()["compute"].busy_s,
            "host_paced_s": summary.host_paced_s,
            "mfu": self._mfu,
            "split_s": step_split(trace, timed.step_s),
            "bytes_in": timed.bytes_in,
            "bytes_out": timed.bytes_out,
            "peak_device_bytes": timed.peak_bytes,
            "limit": summary.bottleneck,
            "predicted_s": plan.step_s,
            "predicted_limit": plan.bottleneck,
            "spans": drawn_spans(trace),
        }


def timed_figures(subject: Subject, rates: Rates, params: int, say: Say) -> StepFigures:
    """Time the step. Raises DoesNotFit, DeviceFull or what a lane raised."""
    say("how to step on this device")
    chosen = step_for(rates.profile, params)
    model, plan = chosen.model, chosen.plan
    say(f"steps of {figure(plan.workload.model.params)} parameters, {model.step_tokens} tokens")
    timed = time_step(
        subject,
        model,
        plan.settings,
        num_steps=3 if plan.step_s > 1 else 5,
        num_threads=max(1, int(rates.profile.update_cores)),
    )
    lanes_s = timed.lanes_s(rates.copies)
    return StepFigures(asked_params=params, chosen=chosen, timed=timed, lanes_s=lanes_s)


def step_checks(figures: StepFigures, subject: Subject) -> Iterator[Check]:
    """Yield the checks of a timed step."""
    facts = figures.facts()
    reduced = f" ({facts['reduced']})" if facts["reduced"] else ""
    text = (
        f"{duration(facts['step_s'])} for {figure(facts['params'])} parameters{reduced} and "
        f"{facts['tokens']:,} tokens in {facts['dtype']}: "
        f"{figure(facts['tokens_per_s'])} tokens/s, "
    )
    # Lanes that share the cores of one processor have no bound of their own.
    if subject.runtime is not None:
        text += f"{percent(facts['of_bound'])} of the speed at its bound ({facts['bound_by']}), "
    text += f"{size(facts['peak_device_bytes'])} of device memory"
    causes = []
    if subject.runtime is not None:
        # The bound has the host's pace in it: a step that waits for the host may be near it.
        share = facts["host_paced_s"] / facts["step_s"]
        text += f"; {percent(facts['mfu'])} of the rate of products, {percent(share)} host-paced"
        causes += ["far from bound"] if facts["of_bound"] < LEAST_OF_BOUND else []
        causes += ["host paced"] if share > MOST_HOST_PACED else []
    yield _check("step", text, *causes)
    ratio = facts["step_s"] / facts["predicted_s"]
    text = (
        f"{duration(facts['predicted_s'])} predicted, limited by {facts['predicted_limit']}; "
        f"measured {ratio:.2f} times that, limited by {facts['limit']}"
    )
    over = subject.runtime is not None and ratio > MOST_OVER_PREDICTION
    yield _check("prediction", text, *(["unpredicted"] if over else []))


def drawn_spans(trace: Trace) -> list[list[Any]]:
    """Return a step for its picture: lane, kind, name, begin and end in seconds."""
    spans = sorted(trace.spans, key=lambda span: span.start_ns)
    origin = spans[0].start_ns
    return [
        [
            span.lane,
            "wait" if span.awaited is not None else span.op.kind.value,
            f"wait for {span.awaited}" if span.awaited is not None else str(span.op),
            round((span.start_ns - origin) / 1e9, 6),
            round((span.end_ns - origin) / 1e9, 6),
        ]
        for span in spans
    ]
