"""Results of `megatrain doctor`: facts and measured rates of this machine, for people and plans.

Measured by doctor/examine.py, which needs torch; read and shown here, which does not. The
examination is kept under the machine's key, and `measured_profile` finds it again.

Laws (tests/planning/machine/test_examination.py)
    1. Saved results are found again; a file that is damaged, or of another machine, is ignored.
    2. The verdict's largest model is what the ledger of such a model needs: 14 bytes a parameter,
       and 8 with moments in 8 bits.
    3. No line is longer than 80 columns.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from megatrain.errors import MegaTrainError
from megatrain.memory.kinds import TensorKind, bytes_per_param, store_kinds, update_traffic
from megatrain.optim.states import ADAMW, ADAMW_8BIT, WITH_CLIP, WITHOUT_CLIP
from megatrain.planning.machine.facts import HostFacts, host_facts, profile_path
from megatrain.planning.machine.profile import MachineProfile
from megatrain.planning.prediction import predicted_speed
from megatrain.text import byte_rate, count, duration, figure, flop_rate, size

BYTES_PER_PARAM = bytes_per_param(WITH_CLIP)
UNCLIPPED_BYTES_PER_PARAM = bytes_per_param(WITHOUT_CLIP)
LEAST_BYTES_PER_PARAM = bytes_per_param(store_kinds(ADAMW_8BIT, waits=True))
_WIDTH = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """One visit to the doctor."""

    facts: HostFacts
    profile: MachineProfile
    kernel: str
    """Which optimizer kernel was measured."""
    folder: str
    """Folder in which the disk was measured; empty if doctor was quick, or stopped before that."""
    when: str
    seconds: float
    placement: str = ""
    """Placement of a run's arenas and threads."""
    load: float = 0.0
    """Others' processes that wanted a core when it began."""
    origins: Mapping[str, str] = field(default_factory=dict)
    """Where figures of the profile come from that this examination did not measure, by field."""

    def to_json(self) -> str:
        """Return all of it, and the verdict, as JSON text."""
        profile = json.loads(self.profile.to_json())
        return json.dumps(asdict(self) | {"profile": profile, "verdict": self.verdict()}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Examination:
        """Return what `to_json` wrote. Raises ValueError, KeyError, TypeError or ConfigError."""
        fields: dict[str, Any] = json.loads(text)
        facts = dict(fields["facts"])
        facts["gpus"] = tuple(facts["gpus"])
        return cls(
            facts=HostFacts(**facts),
            profile=MachineProfile.from_facts(fields["profile"]),
            kernel=str(fields["kernel"]),
            folder=str(fields["folder"]),
            when=str(fields["when"]),
            seconds=float(fields["seconds"]),
            placement=str(fields.get("placement", "")),
            load=float(fields["load"]),
            origins={str(name): str(text) for name, text in fields.get("origins", {}).items()},
        )

    @property
    def sustained_flops(self) -> float:
        """The best rate of forward products."""
        return max(point.flops for point in self.profile.forward_flops)

    @property
    def largest_params(self) -> float:
        """Params of the largest model whose home is host memory."""
        return max(0, self.profile.ram_bytes - self.profile.base_bytes) / BYTES_PER_PARAM

    def verdict(self) -> str:
        """Return the conclusions in a few sentences."""
        profile, most = self.profile, self.largest_params
        unclipped = most * BYTES_PER_PARAM / UNCLIPPED_BYTES_PER_PARAM
        narrow = most * BYTES_PER_PARAM / LEAST_BYTES_PER_PARAM
        rate = self.sustained_flops / (8 * most) if most else 0.0
        where = "the processor" if profile.on_host else profile.device
        text = (
            f"Trains models of up to about {figure(most)} parameters in host memory "
            f"({figure(unclipped)} without clipping, {figure(narrow)} with moments in 8 bits); "
            f"at that size at most {predicted_speed(rate)} on {where}, predicted."
        )
        if profile.on_host:
            return text + " Without an accelerator this machine is only for trials."
        link = self.sustained_flops / profile.copy_in_bytes_per_s
        # Late updates share DRAM with forward, which reads a weight for 2 FLOPs per token.
        traffic = update_traffic(ADAMW) + TensorKind.HI.bytes_per_element()
        late = traffic / 2 * self.sustained_flops / profile.dram_bytes_per_s
        return (
            f"{text} Copies hide behind compute from {figure(link)} tokens per step, "
            f"clipped updates from {figure(late)}."
        )

    def text(self) -> str:
        """Return the page for people."""
        facts, profile = self.facts, self.profile
        limit, lock = facts.group_limit_bytes, facts.memlock_bytes
        rows: list[tuple[str, str]] = [
            ("processor", f"{facts.processor}, {facts.cores} cores"),
            ("NUMA nodes", count(facts.numa_nodes)),
            ("  memory and threads", self.placement or "as the system places them"),
            ("host memory", f"{size(facts.ram_bytes)}, {size(profile.ram_bytes)} usable now"),
            ("control group limit", "none" if limit is None else size(limit)),
            ("pinning limit", "none" if lock is None else size(lock)),
            ("memory errors", _errors(facts)),
            ("memory traffic", byte_rate(profile.dram_bytes_per_s)),
            ("device", profile.device or "none: compute happens on the processor"),
        ]
        if not profile.on_host:
            rows.append(("device memory", size(profile.device_bytes)))
        rows += [
            ("copies in / out", _pair(profile.copy_in_bytes_per_s, profile.copy_out_bytes_per_s)),
            ("  both at once", f"{profile.duplex_share:.0%} of each"),
            *self._products(),
            ("  in fp32", f"{profile.fp32_efficiency:.0%} of that"),
            *([("  in fp8", f"{profile.fp8_gain:.3g} times that")] if profile.fp8_gain > 1 else []),
            ("  attention", f"{profile.attention_efficiency:.0%} of that"),
            ("element-wise work", byte_rate(profile.device_bytes_per_s)),
            ("optimizer", f"{figure(profile.update_params_per_s)} params/s, {self.kernel}"),
            *self._network(),
            ("disk read / write", self._disk()),
            *([("  measured in", self.folder)] if self.folder else []),
            *((name, text) for name, text in facts.versions.items()),
        ]
        lines = [_row(name, value) for name, value in rows]
        text = [*_wrapped(self.verdict()), f"measured {self.when} in {duration(self.seconds)}"]
        for origin, names in self._others().items():
            text += _wrapped(f"From {origin}: {', '.join(names)}.")
        text += _wrapped(self.disturbance) if self.disturbance else []
        return "\n".join([*lines, "", *text])

    @property
    def disturbance(self) -> str:
        """Why the rates are too low, for people; empty if the machine was idle."""
        if self.load <= self.facts.cores / 2:
            return ""
        return (
            f"Other programs ran: {self.load:.1f} processes on {self.facts.cores} cores. The rates "
            "are too low; measure again when the machine is idle."
        )

    def _network(self) -> list[tuple[str, str]]:
        """Return the rates between ranks, if they were measured."""
        network = self.profile.network
        if network is None:
            return []
        between_hosts = network.host_bytes_per_s is not None
        rate = network.host_bytes_per_s or network.peer_bytes_per_s
        latency_s = network.host_latency_s if between_hosts else network.peer_latency_s
        where = "a host, to others" if between_hosts else "a rank, in this host"
        return [
            ("gather / exchange", f"{_pair(rate, rate * network.exchange_share)}, {where}"),
            ("  latency", f"{1e6 * latency_s:,.0f} us a message; {network.name}"),
        ]

    def _others(self) -> dict[str, list[str]]:
        """Return the names of figures that come from elsewhere, by where."""
        found: dict[str, list[str]] = {}
        for name, origin in self.origins.items():
            found.setdefault(origin, []).append(name.replace("_", " "))
        return found

    def _disk(self) -> str:
        if not self.folder:
            return "not measured yet: `megatrain doctor` does, at its end"
        profile = self.profile
        return _pair(profile.disk_read_bytes_per_s, profile.disk_write_bytes_per_s)

    def _products(self) -> list[tuple[str, str]]:
        """Return the rates of products by width: at few tokens and at many."""
        rows = []
        for width in sorted({point.width for point in self.profile.forward_flops}):
            points = sorted(p for p in self.profile.forward_flops if p.width == width)
            few, many = points[0], points[-1]
            text = f"{flop_rate(few.flops)} at {few.tokens} tokens"
            if many is not few:
                text += f", {flop_rate(many.flops)} at {count(many.tokens)}"
            rows.append((f"products, width {width}", text))
        return rows


def measured_profile() -> MachineProfile | None:
    """Return the profile that doctor measured on this machine; None if it never did."""
    found = kept_examination()
    return None if found is None else found.profile


def kept_examination() -> Examination | None:
    """Return the last examination of this machine, if it exists and is valid."""
    facts = host_facts()
    try:
        found = Examination.from_json(profile_path(facts).read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, MegaTrainError):
        return None
    return found if found.facts.key == facts.key else None


def _errors(facts: HostFacts) -> str:
    corrected, uncorrected = facts.corrected_errors, facts.uncorrected_errors
    if corrected is None and uncorrected is None:
        return "no counters: no ECC, or no EDAC driver"
    text = f"{count(corrected or 0)} corrected, {count(uncorrected or 0)} uncorrected"
    return f"{text}: test the modules" if corrected or uncorrected else f"{text} since the start"


def _pair(first: float, second: float) -> str:
    return f"{first / 1e9:.3g} / {second / 1e9:.3g} GB/s"


def _row(name: str, value: str) -> str:
    line = f"{name:{_WIDTH}}{value}"
    return line if len(line) <= 80 else f"{line[:77]}..."


def _wrapped(text: str, width: int = 80) -> list[str]:
    lines, line = [], ""
    for word in text.split():
        if len(line) + len(word) + 1 > width:
            lines.append(line)
            line = ""
        line = f"{line} {word}".strip()
    return [*lines, line]
