"""`megatrain doctor --gpu`: is a device right, and is it as fast as it should be?

    facts  ->  laws (is it right?)  ->  the examination of doctor  ->  GpuCheck: JSON, an exit code

A law that is broken does not end the check, unless the device may be lost. What was found holds no
path and no name of a user or host, so that it can be sent as it is.

Laws (tests/doctor/gpu_check/test_check.py)
    1. A device that is right and fast gives exit code 0, one that is wrong the code of its error.
    2. A link or a device that is slower than it should be is named, with figures.
"""

from __future__ import annotations

import json
import textwrap
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatrain.doctor.examine import examine
from megatrain.doctor.gpu_check.facts import SystemFacts, system_facts
from megatrain.doctor.gpu_check.findings import Check, failed_check
from megatrain.doctor.gpu_check.laws import laws
from megatrain.doctor.rates import CopyRates, registration_rate
from megatrain.doctor.subject import find_subject
from megatrain.errors import ConfigError
from megatrain.planning.catalog.asked_machines import find_machine
from megatrain.planning.machine.examination import Examination
from megatrain.planning.machine.profile import MachineProfile
from megatrain.progress import Say
from megatrain.text import byte_rate, duration, flop_rate, percent, size

LINK_SHARE, DUPLEX_SHARE, PRODUCTS_SHARE = 0.65, 0.6, 0.6
"""Below these shares of what should be there a figure is slow."""
LEAST_PINNING = 1e9
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
    examination: Examination | None
    """None: nothing was measured, because the device may be lost or a measurement failed."""
    pinning_bytes_per_s: float | None
    """None: there is nothing to pin for this device, or it cannot be pinned."""

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
        """Return all of it as JSON text, with the verdict, but without the folder of the disk."""
        found = self.examination
        values = {
            "device": self.device,
            "when": self.when,
            "seconds": self.seconds,
            "verdict": self.verdict(),
            "checks": [asdict(check) for check in self.checks],
            "facts": self.facts,
            "pinning_bytes_per_s": self.pinning_bytes_per_s,
            "update_kernel": None if found is None else found.kernel,
            "profile": None if found is None else json.loads(found.profile.to_json()),
        }
        return json.dumps(values, indent=1)

    def text(self) -> str:
        """Return the page for a terminal."""
        lines = [] if self.examination is None else [self.examination.text(), ""]
        for check in self.checks:
            first = f"{check.state:9}{check.name:31}"
            lines += textwrap.wrap(
                check.found, 100, initial_indent=first, subsequent_indent=" " * len(first)
            )
        return "\n".join([*lines, "", self.verdict(), f"checked in {duration(self.seconds)}"])


def check_device(name: str, folder: Path, say: Say, *, quick: bool = False) -> GpuCheck:
    """Check the accelerator called `name`, or torch's own for `auto`. Raises NoDevice.

    `folder` is where the disk is measured, unless `quick`. `say` gets the name of each check.
    """
    begin = time.monotonic()
    subject = find_subject(name, needed=True)
    say("facts")
    facts = system_facts(subject)
    checks = [*machine_checks(facts), *laws(subject, say)]
    examination, pinning = None, None
    if not any(check.may_have_lost_device for check in checks):
        try:
            examination = examine(folder, say, subject=subject, quick=quick)
            profile = examination.profile
            if subject.runtime is not None and not profile.pinned_bytes:
                say("pinning")
                device = subject.new_device()
                pinning = registration_rate(device)
                device.close()
        except Exception as error:
            checks.append(failed_check("rates", error))
        else:
            facts = system_facts(subject)  # once more: an idle link and a cold card tell little
            checks += rate_checks(profile, pinning, facts)
    return GpuCheck(
        device=str(subject.place),
        when=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        seconds=time.monotonic() - begin,
        facts=facts.values,
        checks=tuple(checks),
        examination=examination,
        pinning_bytes_per_s=pinning,
    )


def machine_checks(facts: SystemFacts) -> Iterator[Check]:
    """Yield what the facts alone tell."""
    values = facts.values
    name, free, total = (
        values.get(key) for key in ("device_name", "device_free_bytes", "device_bytes")
    )
    text = f"{name}, {size(free)} free" if free else str(name)
    is_shared = bool(values.get("other_processes"))
    is_shared |= bool(free and total and free < _USUALLY_FREE * total)
    if is_shared:
        text += ": other processes use it, and figures are too low"
    yield _judged("accelerator", text, is_slow=is_shared)
    is_busy = values["load"] > values["cores"] / 2
    room = size(values["free_bytes"])
    text = f"{values['cores']} cores, load {values['load']}, {room} of memory free"
    yield _judged("host", text, is_slow=is_busy)


def rate_checks(
    profile: MachineProfile, pinning: float | None, facts: SystemFacts
) -> Iterator[Check]:
    """Yield a check for each rate that has something to be compared with."""
    yield _copies(profile, facts)
    if not profile.on_host:
        yield _pinning(pinning)
    yield _products(profile, facts)


def _judged(name: str, found: str, *, is_slow: bool) -> Check:
    return Check(name=name, state="slow" if is_slow else "ok", found=found)


def _copies(profile: MachineProfile, facts: SystemFacts) -> Check:
    link = facts.link
    copies = CopyRates(
        into=profile.copy_in_bytes_per_s,
        out=profile.copy_out_bytes_per_s,
        duplex_share=profile.duplex_share,
    )
    text = (
        f"{byte_rate(copies.into)} in, {byte_rate(copies.out)} out, "
        f"{byte_rate(copies.both)} both at once"
    )
    if link is None or not link.bytes_per_s:
        return _judged("copies", text, is_slow=False)
    share = min(copies.into, copies.out) / link.bytes_per_s
    is_slow = link.is_narrow or share < LINK_SHARE or copies.duplex_share < DUPLEX_SHARE
    return _judged("copies", f"{text}; {percent(share)} of the link ({link})", is_slow=is_slow)


def _pinning(rate: float | None) -> Check:
    if rate is None:
        text = "host memory cannot be pinned: copies are staged, with one more pass over it"
        return _judged("pinning", text, is_slow=True)
    return _judged("pinning", byte_rate(rate), is_slow=rate < LEAST_PINNING)


def _products(profile: MachineProfile, facts: SystemFacts) -> Check:
    flops = max(point.flops for point in profile.forward_flops)
    text, is_slow = f"{flop_rate(flops)} in bf16", False
    known = known_flops(profile.device)
    if known is not None:
        text += f", {percent(flops / known)} of what this device sustains elsewhere"
        is_slow = flops < PRODUCTS_SHARE * known
    if throttled := facts.values.get("throttled"):
        text, is_slow = f"{text}; throttled: {', '.join(throttled)}", True
    if profile.fp32_efficiency > 1:
        # The device has no bf16 units.
        text += f"; fp32 is {profile.fp32_efficiency:.3g} times as fast: use model.dtype: fp32"
        is_slow = True
    return _judged("products", text, is_slow=is_slow)


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
