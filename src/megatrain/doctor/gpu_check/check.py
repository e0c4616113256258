"""`megatrain gpu-check`: facts, laws, figures and a verdict about one device, in minutes.

    facts  ->  laws (is it right?)  ->  rates  ->  a step  ->  GpuCheck: JSON, a page, an exit code

A check that fails does not end the others, unless the device may be lost. What was found holds no
path and no name of a user or host, so that it can be sent as it is.

Laws (tests/doctor/gpu_check/test_check.py)
    1. A device that is right and fast gives exit code 0, one that is wrong the code of its error.
    2. Without an accelerator the result says why, and what to install.
    3. The result written as JSON and read back is equal to itself.
"""

from __future__ import annotations

import json
import textwrap
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

from megatrain.devices.runtime import why_not_driven
from megatrain.doctor.gpu_check.facts import SystemFacts, system_facts, why_no_device
from megatrain.doctor.gpu_check.failing import failed_check, may_have_lost_device
from megatrain.doctor.gpu_check.findings import CAUSES, Check, anonymous, judged
from megatrain.doctor.gpu_check.laws import laws
from megatrain.doctor.gpu_check.speed import (
    Rates,
    measured_rates,
    rate_checks,
    step_checks,
    timed_figures,
)
from megatrain.doctor.subject import Subject, find_subject
from megatrain.errors import NoDevice
from megatrain.progress import Say
from megatrain.text import duration, size

Found = TypeVar("Found")
DEFAULT_PARAMS = 1_000_000_000
FORMAT = 1
_TRY = f"{'':9}try: "
_USUALLY_FREE = 0.8
"""Share of the device's memory from which nobody else is taken to use it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCheck:
    """All that was found."""

    device: str
    when: str
    seconds: float
    facts: dict[str, Any]
    checks: tuple[Check, ...]
    rates: dict[str, Any]
    step: dict[str, Any]
    profile: dict[str, Any]
    """The figures for plans; empty if they were not measured."""

    @property
    def exit_code(self) -> int:
        """0, or that of the first check that is wrong."""
        return next((check.exit_code for check in self.checks if check.state == "wrong"), 0)

    def verdict(self) -> str:
        """Return the result in a sentence."""
        names = {
            state: ", ".join(check.name for check in self.checks if check.state == state)
            for state in ("wrong", "slow")
        }
        if names["wrong"]:
            return f"Do not train on this device yet. Wrong: {names['wrong']}."
        if names["slow"]:
            return f"This device computes correctly. Slower than it should be: {names['slow']}."
        return "This device computes correctly, and as fast as it should."

    def to_json(self) -> str:
        """Return all of it as JSON text, with the verdict and the causes that were found."""
        named = dict.fromkeys(cause for check in self.checks for cause in check.causes)
        causes = {name: asdict(CAUSES[name]) for name in named}
        extra = {"format": FORMAT, "verdict": self.verdict(), "causes": causes}
        return json.dumps(asdict(self) | extra, indent=1)

    def text(self) -> str:
        """Return the page for a terminal."""
        lines = []
        for check in self.checks:
            lines += _wrapped(f"{check.state:9}{check.name:26}", check.found)
            for cause in check.causes:
                lines += _wrapped(f"{'':9}means: ", CAUSES[cause].means)
                lines += [row for text in CAUSES[cause].tries for row in _wrapped(_TRY, text)]
        return "\n".join([*lines, "", self.verdict(), f"checked in {duration(self.seconds)}"])


def _wrapped(first: str, text: str) -> list[str]:
    return textwrap.wrap(text, 100, initial_indent=first, subsequent_indent=" " * len(first))


def check_device(name: str, params: int, say: Say) -> GpuCheck:
    """Check the accelerator called `name`, or torch's own for `auto`, by a model of `params`."""
    begin = time.monotonic()
    try:
        subject = find_subject(name, needed=True)
    except NoDevice as error:
        facts = system_facts(None)
        check = Check(
            group="machine",
            name="accelerator",
            state="wrong",
            found=anonymous(str(error)),
            causes=("not driven" if why_not_driven() else why_no_device(facts.values),),
            exit_code=error.exit_code,
        )
        return _checked(name, begin, facts, [check])
    return check_subject(subject, params, say, begin)


def check_subject(subject: Subject, params: int | None, say: Say, begin: float) -> GpuCheck:
    """Check a subject; `begin` is when the check began, by time.monotonic.

    Without `params` no step is timed.
    """
    say("facts")
    facts = system_facts(subject)
    checks = [*machine_checks(facts), *laws(subject, say)]
    rates: Rates | None = None
    step: dict[str, Any] = {}
    if not any(map(may_have_lost_device, checks)):
        rates, found = _tried("rates", lambda: measured_rates(subject, say, time.monotonic()))
        checks += found
    if rates is not None:
        facts = system_facts(subject)  # once more: an idle link and a cold card tell little
        checks += rate_checks(rates, facts)
    if rates is not None and params is not None:
        figures, found = _tried("step", partial(timed_figures, subject, rates, params, say))
        checks += found
        if figures is not None:
            checks += step_checks(figures, subject)
            step = figures.facts()
    return _checked(str(subject.place), begin, facts, checks, rates, step)


def machine_checks(facts: SystemFacts) -> Iterable[Check]:
    """Yield what the facts alone tell."""
    values = facts.values
    name, free, total = (
        values.get(key) for key in ("device_name", "device_free_bytes", "device_bytes")
    )
    room = f", {size(free)} free" if free else ""
    shared = bool(values.get("other_processes"))
    shared |= bool(free and total and free < _USUALLY_FREE * total)
    yield judged("machine", "accelerator", f"{name}{room}", ["shared"] if shared else [])
    busy = values["load"] > values["cores"] / 2
    room = size(values["free_bytes"])
    text = f"{values['cores']} cores, load {values['load']}, {room} of memory free"
    yield judged("machine", "host", text, ["busy host"] if busy else [])


def _tried(name: str, work: Callable[[], Found]) -> tuple[Found | None, list[Check]]:
    """Return what `work` does, or the check that says why it cannot."""
    try:
        return work(), []
    except Exception as error:
        return None, [failed_check("fast", name, error)]


def _checked(
    device: str,
    begin: float,
    facts: SystemFacts,
    checks: list[Check],
    rates: Rates | None = None,
    step: dict[str, Any] | None = None,
) -> GpuCheck:
    return GpuCheck(
        device=device,
        when=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        seconds=time.monotonic() - begin,
        facts=facts.values,
        checks=tuple(checks),
        rates={} if rates is None else rates.facts(),
        step=step or {},
        profile={} if rates is None else json.loads(rates.profile.to_json()),
    )
