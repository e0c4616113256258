"""The plan of rounds with peers: bytes, seconds on a given link, utilization, and wear of the disk.

    round    = inner steps x step
    behind   = compress + upload own difference + download those of the others + move the anchor
    exposed  = copy the weights, and later take the anchor + what of `behind` the late steps
               cannot hide

Without late steps nothing is hidden. Downloads are those of all other peers, from the bucket: a
link at home is faster that way, 10 times if nothing else is said.

Laws (tests/planning/test_peers.py)
    1. Bytes are those that the form of differences has (megatrain/peers/compression.py).
    2. A slower link and more peers never have a higher utilization.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from megatrain.config.sections import PeerSettings
from megatrain.errors import ConfigError
from megatrain.planning.plan import Plan
from megatrain.text import duration, size

COMPRESSED_PER_S = 80e6
"""Parameters that four threads make into a sparse difference in a second: 22 million each on two
cores of a server of 2020."""
DOWN_PER_UP = 10.0
_USABLE = 0.94
_CHUNK = 4096
_RATE = re.compile(r"(\d+(?:\.\d+)?) ?([kmg])bit(?:/s|ps)?", re.I)
_DAY_S = 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerPlan:
    """Rounds of one peer among others."""

    num_peers: int
    inner_steps: int
    late: int
    round_s: float
    step_s: float
    difference_bytes: float
    """Of a round, as this peer sends it."""
    up_s: float
    down_s: float
    host_s: float
    """Compressing, and moving the anchor."""
    copy_s: float
    """Copying the weights before an exchange, and taking the anchor after it."""
    written_bytes: float
    """Written to the disk in a round."""

    @property
    def behind_s(self) -> float:
        """Time of all exchanges of a round that steps can hide."""
        return self.up_s + self.down_s + self.host_s

    def exposed_s(self, late: int | None = None) -> float:
        """Return the time of a round in which the device waits, with so many late steps."""
        late = self.late if late is None else late
        if not late:
            return self.behind_s + self.copy_s / 2
        return self.copy_s + max(0.0, self.behind_s - late * self.step_s)

    def utilization(self, late: int | None = None) -> float:
        """Return the share of time in which steps are taken."""
        return self.round_s / (self.round_s + self.exposed_s(late))

    @property
    def late_needed(self) -> int:
        """Late steps that hide an exchange whole, as far as a round has so many."""
        return min(self.inner_steps, math.ceil(self.behind_s / self.step_s))

    def facts(self) -> dict[str, Any]:
        """Return the figures by name."""
        return {
            "peers": self.num_peers,
            "inner_steps": self.inner_steps,
            "round_s": self.round_s,
            "difference_bytes": self.difference_bytes,
            "up_s": self.up_s,
            "down_s": self.down_s,
            "host_s": self.host_s,
            "copy_s": self.copy_s,
            "written_bytes": self.written_bytes,
            "utilization_waiting": self.utilization(0),
            "late": self.late_needed,
            "utilization": self.utilization(self.late_needed),
        }

    def lines(self) -> list[str]:
        """Return them for people."""
        late, day = self.late_needed, _DAY_S / (self.round_s + self.exposed_s(self.late_needed))
        return [
            f"{self.num_peers} of them, rounds of {self.inner_steps} steps: "
            f"{duration(self.round_s)} of compute",
            f"{size(round(self.difference_bytes))} up in {duration(self.up_s)}, "
            f"{size(round(self.difference_bytes * (self.num_peers - 1)))} down in "
            f"{duration(self.down_s)}",
            f"utilization {self.utilization(0):.1%} if every exchange is waited for,",
            f"{self.utilization(late):.1%} with peers.late={late}",
            f"{size(round(self.written_bytes))} written to the disk a round, "
            f"{self.written_bytes * day / 1e12:,.1f} TB a day",
        ]


def plan_peers(
    settings: PeerSettings, plan: Plan, num_peers: int, uplink: str, downlink: str | None
) -> PeerPlan:
    """Return the rounds of a plan. Raises ConfigError for a link or a number that is none."""
    if num_peers < 2:
        raise ConfigError(f"--peers is {num_peers}: give 2 or more, this one among them")
    up = link_bytes_per_s("uplink", uplink)
    down = DOWN_PER_UP * up if downlink is None else link_bytes_per_s("downlink", downlink)
    params, profile = plan.workload.model.trained_params, plan.profile
    num_bytes = params * bits_per_param(settings) / 8
    # The anchor is 4 bytes per parameter, so are momentum, what is not sent, and a late copy.
    moved = 4 * params * (2 if settings.momentum else 1)
    kept = 0 if settings.compression == "none" else 4 * params
    host_s = params / COMPRESSED_PER_S
    host_s += (2 * moved + kept) / profile.disk_read_bytes_per_s
    host_s += (moved + kept) / profile.disk_write_bytes_per_s
    copy_s = (
        4 * params / profile.disk_write_bytes_per_s + 4 * params / profile.disk_read_bytes_per_s
    )
    return PeerPlan(
        num_peers=num_peers,
        inner_steps=settings.inner_steps,
        late=settings.late,
        round_s=settings.inner_steps * plan.step_s,
        step_s=plan.step_s,
        difference_bytes=num_bytes,
        up_s=num_bytes / up,
        down_s=(num_peers - 1) * num_bytes / down,
        host_s=host_s,
        copy_s=copy_s,
        written_bytes=moved + kept + 4 * params,
    )


def bits_per_param(settings: PeerSettings) -> float:
    """Return the bits of a difference for each parameter."""
    if settings.compression == "none":
        return 32.0
    if settings.compression == "int8":
        return 8 + 8 / _CHUNK
    kept = max(1, round(settings.density * _CHUNK))
    low = max(0, (_CHUNK // kept).bit_length() - 1)
    return (kept * (settings.bits + 1 + low) + (_CHUNK >> low) + 8) / _CHUNK


def link_bytes_per_s(name: str, text: str) -> float:
    """Return the bytes that a link moves in a second. Raises ConfigError."""
    found = _RATE.fullmatch(text.strip())
    if found is None or float(found[1]) <= 0:
        raise ConfigError(f"--{name} is {text[:60]}: give a rate, like 20Mbit or 1Gbit")
    times = {"k": 1e3, "m": 1e6, "g": 1e9}[found[2].lower()]
    return float(found[1]) * times * _USABLE / 8
