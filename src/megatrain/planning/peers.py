"""The plan of rounds with peers: bytes, seconds on a given link, utilization, and wear of the disk.

    round    = inner steps x step
    behind   = compress + upload own difference + download those of the others + move the anchor
    exposed  = copy the weights, and later add what the exchange changed + what of `behind` the late
               steps cannot hide

Compressing and moving are done by four threads that compute, hash, read and write at the same time;
downloads are looked at as they come. Without late steps nothing is hidden. The copy takes 4 bytes
of host memory per parameter of a part: there are as many parts as the memory that is left asks for.
Downloads are those of all other peers, from the bucket: a link at home is faster that way, 10 times
if nothing else is said.

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
from megatrain.planning.search import reserves
from megatrain.text import duration, size

DOWN_PER_UP = 10.0
_THREADS = 4
_ENCODED_PER_S = {"none": 500e6, "int8": 35e6, "sparse": 50e6}
_DECODED_PER_S = {"none": 500e6, "int8": 100e6, "sparse": 1.3e9}
_MOVED_PER_S = 50e6
_HASHED_PER_S = 0.85e9
"""Parameters, or bytes, of a thread in a second, on a core of a server of 2020."""
_COPIED_BYTES = 24
"""Traffic of host memory per parameter: a copy into new pages, and a sum in place."""
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
    """Late steps of the run."""
    parts: int
    """Parts of a round whose copies fit in host memory."""
    copy_bytes: float
    """Host memory for the copy of a part."""
    kept_bytes: float
    """What peers.dir holds."""
    fits: bool
    """Whether host memory has room for the copy of a part."""
    fits_in_memory: bool
    """Whether it has room for peers.dir, too."""
    round_s: float
    step_s: float
    difference_bytes: float
    """Bytes of the difference of a round, as this peer sends it."""
    up_s: float
    down_s: float
    host_s: float
    """Compressing, and moving the anchor."""
    copy_s: float
    """Copying the weights before exchanges, and adding what they changed."""
    take_s: float
    """Reading the anchor after an exchange that was waited for."""
    written_bytes: float
    """Written to the disk in a round."""

    @property
    def behind_s(self) -> float:
        """Time of all exchanges of a round that steps can hide."""
        return self.up_s + self.down_s + self.host_s

    def exposed_s(self, late: int) -> float:
        """Return the time of a round in which the device waits, with so many late steps."""
        if not late:
            return self.behind_s + self.take_s
        return self.copy_s + max(0.0, self.behind_s - late * self.parts * self.step_s)

    def utilization(self, late: int) -> float:
        """Return the share of time in which steps are taken."""
        return self.round_s / (self.round_s + self.exposed_s(late))

    @property
    def times(self) -> float:
        """How many times as many tokens as one machine alone all of them train."""
        return self.num_peers * self.utilization(self.late)

    @property
    def late_needed(self) -> int:
        """Late steps that hide an exchange whole, as far as there are so many until the next."""
        needed = math.ceil(self.behind_s / self.parts / self.step_s)
        return min(self.inner_steps // self.parts, needed)

    def facts(self) -> dict[str, Any]:
        """Return the figures by name."""
        return {
            "peers": self.num_peers,
            "inner_steps": self.inner_steps,
            "parts": self.parts,
            "copy_bytes": self.copy_bytes,
            "kept_bytes": self.kept_bytes,
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
        room = "" if self.fits else ", which this host lacks"
        spared = ["peers.dir fits in memory (/dev/shm), which wears no disk"]
        return [
            f"{self.num_peers} of them, rounds of {self.inner_steps} steps: "
            f"{duration(self.round_s)} of compute",
            f"{size(round(self.difference_bytes))} up in {duration(self.up_s)}, "
            f"{size(round(self.difference_bytes * (self.num_peers - 1)))} down in "
            f"{duration(self.down_s)}",
            f"{duration(self.host_s)} to compress, and to move the anchor",
            f"utilization {self.utilization(0):.1%} if every exchange is waited for,",
            f"{self.utilization(late):.1%} with peers.late={late} peers.parts={self.parts},",
            f"which takes {size(round(self.copy_bytes))} of host memory{room}",
            f"{size(round(self.written_bytes))} written to peers.dir a round, "
            f"{self.written_bytes * day / 1e12:,.1f} TB a day",
            *(spared if self.fits_in_memory else []),
        ]


def plan_peers(
    settings: PeerSettings, plan: Plan, num_peers: int, uplink: str, downlink: str | None
) -> PeerPlan:
    """Return the rounds of a plan. Raises ConfigError for a link or a number that is none."""
    if num_peers < 2:
        raise ConfigError(f"--peers is {num_peers}: give 2 or more, this one among them")
    up = link_bytes_per_s("uplink", uplink)
    down = DOWN_PER_UP * up if downlink is None else link_bytes_per_s("downlink", downlink)
    params, profile, form = plan.workload.model.trained_params, plan.profile, settings.compression
    num_bytes = params * bits_per_param(settings) / 8
    # The anchor is 4 bytes per parameter, so are momentum, what is not sent, and a copy.
    moved = 4 * params * (2 if settings.momentum else 1)
    kept = 0 if form == "none" else 4 * params
    read, write = profile.disk_read_bytes_per_s, profile.disk_write_bytes_per_s
    hashed, looked_at = _THREADS * _HASHED_PER_S, num_peers * params / _DECODED_PER_S[form]
    compress_s = max(
        params / (_THREADS * _ENCODED_PER_S[form]) + 4 * params / hashed,
        (4 * params + kept) / read + kept / write,
    )
    move_s = max(
        (looked_at + params / _MOVED_PER_S) / _THREADS + 2 * moved / hashed,
        moved / read + moved / write,
    )
    free = profile.ram_bytes - plan.ledger.total("host")
    free -= reserves(profile, plan.ledger)["host"]
    parts = _parts(settings, 4 * params, free)
    return PeerPlan(
        num_peers=num_peers,
        inner_steps=settings.inner_steps,
        late=settings.late,
        parts=parts,
        copy_bytes=4 * params / parts,
        kept_bytes=moved + kept,
        fits=4 * params / parts <= free,
        fits_in_memory=4 * params / parts + moved + kept <= free,
        round_s=settings.inner_steps * plan.step_s,
        step_s=plan.step_s,
        difference_bytes=num_bytes,
        up_s=num_bytes / up,
        down_s=max((num_peers - 1) * num_bytes / down, looked_at / _THREADS),
        host_s=compress_s + move_s,
        copy_s=_COPIED_BYTES * params / profile.dram_bytes_per_s,
        take_s=4 * params / read,
        written_bytes=moved + kept,
    )


def _parts(settings: PeerSettings, copy_bytes: int, free_bytes: float) -> int:
    """Return the parts that were asked for, or as few as have room for the copy of one."""
    steps = settings.inner_steps
    if settings.parts > 1:
        return settings.parts
    fitting = [parts for parts in range(1, steps + 1) if steps % parts == 0]
    return next((parts for parts in fitting if copy_bytes / parts <= free_bytes), steps)


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
